"""The metadata of a language model's GGUF file, in the words of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.checkpoint import CheckpointError
from ..model.gguf_file import GGUFHeader

WHERE = "its GGUF metadata"
# config.json's name -> the key behind the architecture's name.
_WHOLE_NUMBERS = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}  # fmt: skip
_NUMBERS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
# The second key of a line is an old one of Ollama's.
_SCALING = {
    "factor": ("rope.scaling.factor",),
    "original_max_position_embeddings": ("rope.scaling.original_context_length",),
    "beta_fast": ("rope.scaling.yarn_beta_fast", "rope.scaling.beta_fast"),
    "beta_slow": ("rope.scaling.yarn_beta_slow", "rope.scaling.beta_slow"),
    "mscale_all_dim": ("rope.scaling.yarn_log_multiplier", "rope.scaling.mscale_all_dim"),
    "attention_factor": ("rope.scaling.yarn_attn_factor",),
}
_SCALING_TYPE = "rope.scaling.type"
_HEADS = ".attention.head_count"


def config_from_gguf(header: GGUFHeader, label: str) -> dict[str, Any]:
    """Return the sizes, the epsilon and the rotary positions that a file states; what it leaves out is left out.

    Args:
        header: its keys start with the architecture's name, or another one where a converter changed only one of them.
        label: the file, for messages.

    Raises: CheckpointError for a value of a wrong type or one that makes no sense.
    """
    fields = _fields_of_model(header)
    config: dict[str, Any] = {}
    for name, key in _WHOLE_NUMBERS.items():
        if key in fields:
            config[name] = _number(fields, key, label, whole=True)
    for name, key in _NUMBERS.items():
        if key in fields:
            config[name] = _number(fields, key, label)
    scaling = _scaling(fields, label)
    if scaling:
        config["rope_parameters"] = scaling
    return config


def _fields_of_model(header: GGUFHeader) -> dict[str, Any]:
    """Return the fields behind the architecture's name, without it."""
    names = [key[: -len(_HEADS)] for key in header.fields if key.endswith(_HEADS)]
    name = header.architecture
    if name not in names:
        # "mistral3" before "mistral3.vision" and "clip.vision".
        name = min(names, key=lambda n: (n.count("."), n), default=None)
    start = f"{name}."
    return {key[len(start) :]: value for key, value in header.fields.items() if key.startswith(start)} if name else {}


def _scaling(fields: Mapping[str, Any], label: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    for name, keys in _SCALING.items():
        key = next((key for key in keys if key in fields), None)
        # llama.cpp reads 0 as "not stated".
        if key is not None and fields[key] != 0:
            scaling[name] = _number(fields, key, label)
    if "mscale_all_dim" in scaling:
        # llama.cpp has one number, for Ministral-3 mscale_all_dim, and takes the other as 1.
        scaling["mscale"] = 1.0
    if _SCALING_TYPE in fields:
        kind = fields[_SCALING_TYPE]
        if not isinstance(kind, str):
            raise CheckpointError(f"{label}: {WHERE} has {_SCALING_TYPE} = {kind!r:.40}; a word such as 'yarn' is needed.")
        scaling["rope_type"] = "default" if kind == "none" else kind
    return scaling


def _number(fields: Mapping[str, Any], key: str, label: str, whole: bool = False) -> float:
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 1e12:
        kind = "a positive whole number" if whole else "a number above 0"
        raise CheckpointError(f"{label}: {WHERE} has {key} = {value!r:.40}; {kind} is needed. Download the file again.")
    return value
