"""Read from a checkpoint's headers which Ministral-3 text encoder it holds: prefix, sizes, storage, output head.

Symbols: V vocabulary rows, D hidden size, F feed-forward size, H heads, K key-value heads, E head size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..model.checkpoint import Checkpoint, CheckpointError, TensorInfo
from ..model.foreign import describe
from ..model.shapes import LAYER, check_shapes, count_layers, shape_of
from ..model.storage import SIDE_TENSORS, Storage, detect_storage, logical_shapes

WHAT = "Ministral-3"
RELEASED_HIDDEN_SIZE = 3072
RELEASED_LAYERS = 26
# The condition is the output of the last layer but one, and ComfyUI wants one layer before that.
_MIN_LAYERS = 3
_DEFAULT_HEAD_DIM = 128
_DEFAULT_EPS = 1e-5
_CONFIG_TYPES = ("ministral3", "mistral3", "mistral")
# Encoders with the same tensor names that ERNIE-Image does not use, by hidden size.
_OTHER_WIDTHS = {
    5120: "Mistral Small 3 24B, the text encoder of Flux.2",
    4096: "an 8B model of the Llama or Mistral family",
}
_SIGNATURE = re.compile(r"^((?:.*\.)?)layers\.\d+\.self_attn\.q_proj\.weight$")
_VISION = ("vision_tower.", "vision_model.", "vision_encoder.", "visual.", "multi_modal_projector.")
_SIDE_TENSORS = (*SIDE_TENSORS, ".rotary_emb.inv_freq")
# Formats whose embedding rows ComfyUI can look up one by one.
_EMBEDDING_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """The sizes of one Llama-style text encoder, and the epsilon of its RMS norms."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of every tensor that the encoder needs."""
        d, f = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "embed_tokens.weight", (self.vocab, d)
        yield "norm.weight", (d,)
        for layer in range(self.layers):
            base = f"layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{base}{norm}.weight", (d,)
            for name, shape in (
                ("self_attn.q_proj", (queries, d)), ("self_attn.k_proj", (keys, d)), ("self_attn.v_proj", (keys, d)),
                ("self_attn.o_proj", (d, queries)),
                ("mlp.gate_proj", (f, d)), ("mlp.up_proj", (f, d)), ("mlp.down_proj", (d, f)),
            ):  # fmt: skip
                yield f"{base}{name}.weight", shape


@dataclass(frozen=True)
class EncoderProbe:
    """What a checkpoint holds.

    Args:
        checkpoint: the open checkpoint.
        prefix: what stands before `layers.N`.
        sizes: the encoder's sizes.
        storage: how its tensors are stored.
        head_prefix: what stands before `lm_head.weight`; None when the file has no output head of its own.
        head_storage: how the head is stored.
        config: the text part of the `config.json` beside it, or {}.
    """

    checkpoint: Checkpoint
    prefix: str
    sizes: EncoderSizes
    storage: Storage
    head_prefix: str | None
    head_storage: Storage | None
    config: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The encoder in a few words: 'Ministral-3 text encoder, 26 layers, width 3072, BF16, 7.2 GB'."""
        size = self.storage.stored_bytes
        text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        layers, width = self.sizes.layers, self.sizes.hidden
        return f"Ministral-3 text encoder, {layers} layers, width {width}, {self.storage.title}, {text}"


def probe_text_encoder(checkpoint: Checkpoint) -> EncoderProbe:
    """Find the text encoder in a checkpoint and check that it is whole.

    Args:
        checkpoint: an open checkpoint: the encoder alone behind any prefix, with or without a vision part, or an
            all-in-one file.

    Raises: CheckpointError when it holds another model, misses tensors, or uses a format that cannot be read.
    """
    label = checkpoint.label
    prefix = _find_prefix(checkpoint)
    inside = {n[len(prefix) :]: info for n, info in checkpoint.tensors.items() if n.startswith(prefix)}
    head_prefix = next((p for p in _ancestors(prefix) if p + "lm_head.weight" in checkpoint.tensors), None)
    tensors = {n: info for n, info in inside.items() if n.startswith(("layers.", "embed_tokens.", "norm."))}
    # The marker of old FP8 files stands at the start of the file, before any prefix.
    old_marker = next(
        (checkpoint.tensors[p + "scaled_fp8"] for p in _ancestors(prefix) if p + "scaled_fp8" in checkpoint.tensors),
        None,
    )
    _refuse_other_encoders(tensors, label)
    storage = _storage(checkpoint, tensors, prefix, old_marker)
    shapes = logical_shapes(tensors, storage)
    config = _text_config(checkpoint)
    sizes = _sizes(shapes, config, label)
    check_shapes(sizes.shapes(), shapes, label, WHAT)
    embedding = storage.layers.get("embed_tokens", {}).get("format")
    if embedding is not None and embedding not in _EMBEDDING_FORMATS:
        raise CheckpointError(
            f"{label}: the token embeddings are stored as {embedding}, which cannot be looked up row by row; "
            f"allowed are BF16 and {', '.join(_EMBEDDING_FORMATS)}. Use another file."
        )
    head_storage = _head_storage(checkpoint, head_prefix, sizes, old_marker)
    return EncoderProbe(checkpoint, prefix, sizes, storage, head_prefix, head_storage, config)


def _find_prefix(checkpoint: Checkpoint) -> str:
    label = checkpoint.label
    found = {m[1] for name in checkpoint.tensors if (m := _SIGNATURE.match(name))}
    found = sorted(prefix for prefix in found if not any(part in prefix for part in _VISION))
    if not found:
        raise CheckpointError(f"{label}: no Ministral-3 text encoder. {describe(checkpoint.tensors)}")
    if len(found) > 1:
        raise CheckpointError(
            f"{label}: {len(found)} language models, behind {' and '.join(repr(p) for p in found[:3])}; one is needed. "
            "Use a file that holds the text encoder alone."
        )
    return found[0]


def _ancestors(prefix: str) -> Iterator[str]:
    """Yield 'a.b.', 'a.', '' for 'a.b.'."""
    while prefix:
        yield prefix
        prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
    yield ""


def _refuse_other_encoders(tensors: Mapping[str, TensorInfo], label: str) -> None:
    """Raise for a tensor inside a layer that Ministral-3 does not have."""
    names = dict(EncoderSizes(1, 1, 1, 1, 1, 1, 1, 1.0).shapes())
    known = {name.removeprefix("layers.0.").removesuffix(".weight") for name in names}
    old_scales = (".scale_weight", ".scale_input")
    for name in tensors:
        inner = LAYER.sub("", name)
        layer, _, kind = inner.rpartition(".")
        if (kind == "weight" and layer in known) or name.endswith((*_SIDE_TENSORS, *old_scales)):
            continue
        if ".q_norm." in name or ".k_norm." in name:
            what = "a Qwen3 or Gemma 3 text encoder"
        elif "feedforward_layernorm" in name:
            what = "a Gemma text encoder"
        elif name.endswith("_proj.bias"):
            what = "a Qwen2 text encoder"
        elif name.endswith(("weight_scale_inv", "activation_scale")):
            what = "an FP8 file for transformers, whose scales ComfyUI does not read"
        else:
            what = "another text encoder, or one in a format that is not known"
        raise CheckpointError(
            f"{label}: '{name}' is not part of Ministral-3; this looks like {what}. "
            "ERNIE-Image needs Ministral-3 3B (ministral-3-3b.safetensors)."
        )


def _storage(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo], prefix: str, old_marker: TensorInfo | None
) -> Storage:
    return detect_storage(checkpoint, {**tensors, "scaled_fp8": old_marker} if old_marker else tensors, prefix)


def _head_storage(
    checkpoint: Checkpoint, head_prefix: str | None, sizes: EncoderSizes, old_marker: TensorInfo | None
) -> Storage | None:
    """Return how the output head is stored. Raises CheckpointError when it does not fit the encoder."""
    if head_prefix is None:
        return None
    start = f"{head_prefix}lm_head."
    head = {n[len(head_prefix) :]: info for n, info in checkpoint.tensors.items() if n.startswith(start)}
    storage = _storage(checkpoint, head, head_prefix, old_marker)
    wanted = [("lm_head.weight", (sizes.vocab, sizes.hidden))]
    check_shapes(wanted, logical_shapes(head, storage), checkpoint.label, WHAT)
    return storage


def _text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the text part of config.json; {} when it is of another model (any file in a shared folder sees it)."""
    config = checkpoint.config
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    types = (config.get("model_type"), text.get("model_type"))
    return text if any(kind in _CONFIG_TYPES for kind in types) else {}


def _sizes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], label: str) -> EncoderSizes:
    vocab, hidden = shape_of(shapes, "embed_tokens.weight", 2, label)
    intermediate, _ = shape_of(shapes, "layers.0.mlp.gate_proj.weight", 2, label)
    query_rows, _ = shape_of(shapes, "layers.0.self_attn.q_proj.weight", 2, label)
    key_rows, _ = shape_of(shapes, "layers.0.self_attn.k_proj.weight", 2, label)
    if hidden in _OTHER_WIDTHS:
        raise CheckpointError(
            f"{label}: width {hidden}, so this is {_OTHER_WIDTHS[hidden]}. ERNIE-Image needs Ministral-3 3B, "
            f"width {RELEASED_HIDDEN_SIZE} (ministral-3-3b.safetensors)."
        )
    declared = _config_int(config, "hidden_size", hidden, label)
    if declared != hidden:
        raise CheckpointError(
            f"{label}: the embeddings have width {hidden}, but config.json says hidden_size = {declared}. "
            "The two are of different models; move the config.json away or download the folder again."
        )
    head_dim = _config_int(config, "head_dim", _DEFAULT_HEAD_DIM, label)
    heads, kv_heads = query_rows // head_dim, key_rows // head_dim
    if query_rows % head_dim or key_rows % head_dim or heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{label}: {query_rows} query and {key_rows} key rows do not divide into heads of {head_dim}. "
            "If the model has other heads, put its config.json with head_dim into the same folder."
        )
    eps = config.get("rms_norm_eps", _DEFAULT_EPS)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(
            f"{label}: config.json has rms_norm_eps = {eps!r:.40}; a number between 0 and 1 is needed."
        )
    layers = _count_layers(shapes, hidden, config, label)
    return EncoderSizes(vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, eps)


def _config_int(config: Mapping[str, Any], name: str, default: int, label: str) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < 1 << 24:
        raise CheckpointError(f"{label}: config.json has {name} = {value!r:.40}; a positive whole number is needed.")
    return value


def _count_layers(shapes: Mapping[str, tuple[int, ...]], hidden: int, config: Mapping[str, Any], label: str) -> int:
    count = count_layers(shapes, label)
    wanted = _config_int(
        config, "num_hidden_layers", RELEASED_LAYERS if hidden == RELEASED_HIDDEN_SIZE else count, label
    )
    if count != wanted or count < _MIN_LAYERS:
        raise CheckpointError(
            f"{label}: {count} layers found; {max(wanted, _MIN_LAYERS)} are needed. The file is incomplete or of "
            "another model; download it again. If it is pruned on purpose, state num_hidden_layers in a config.json beside it."
        )
    return count
