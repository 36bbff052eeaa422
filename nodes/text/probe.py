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
from ..model.gguf_storage import detect_gguf_storage
from ..model.shapes import LAYER, check_shapes, count_layers, shape_of
from ..model.storage import GGUF, MARKER, SIDE_TENSORS, Storage, detect_storage, logical_shapes
from . import gguf_config, gguf_names

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
_INV_FREQ = ".rotary_emb.inv_freq"
_SIDE_TENSORS = (*SIDE_TENSORS, _INV_FREQ)
_HEAD = "lm_head.weight"
# Formats whose embedding rows ComfyUI can look up one by one.
_EMBEDDING_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", GGUF)
# Where a configuration is from, for messages.
_CONFIG_FILE = "config.json"


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
        names: name in the file -> the encoder's name ("layers.0...", "embed_tokens.weight", "lm_head.weight"), of all
            tensors that it uses.
        permuted: the rows of q and k are in llama.cpp's order.
        sizes: the encoder's sizes.
        storage: how its tensors are stored.
        head_storage: how the output head is stored; None when the file has none of its own.
        config: the text part of the `config.json` beside it, or what the metadata of a GGUF file says; {} for neither.
        config_place: where `config` is from, for messages.
    """

    checkpoint: Checkpoint
    names: Mapping[str, str]
    permuted: bool
    sizes: EncoderSizes
    storage: Storage
    head_storage: Storage | None
    config: Mapping[str, Any]
    config_place: str

    @property
    def title(self) -> str:
        """The encoder in a few words: 'Ministral-3 text encoder, 26 layers, width 3072, BF16, 7.2 GB'."""
        size = self.storage.stored_bytes
        text = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        layers, width = self.sizes.layers, self.sizes.hidden
        return f"Ministral-3 text encoder, {layers} layers, width {width}, {self.storage.title}, {text}"


@dataclass(frozen=True)
class _Part:
    """Some tensors of a checkpoint, by the names in the file without `prefix`."""

    prefix: str
    tensors: Mapping[str, TensorInfo]
    storage: Storage

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the encoder's name -> shape, packed weights counted unpacked."""
        shapes = logical_shapes(self.tensors, self.storage)
        return {self.storage.rename.get(name, name): shape for name, shape in shapes.items()}

    def names(self) -> dict[str, str]:
        """Return the whole name in the file -> the encoder's, of the tensors that are read."""
        used = (n for n in self.tensors if n not in self.storage.drop and not n.endswith((MARKER, _INV_FREQ)))
        return {self.prefix + name: self.storage.rename.get(name, name) for name in used}


def probe_text_encoder(checkpoint: Checkpoint) -> EncoderProbe:
    """Find the text encoder in a checkpoint and check that it is whole.

    Args:
        checkpoint: an open checkpoint: the encoder alone behind any prefix, with or without a vision part, an
            all-in-one file, or a GGUF file with the names of llama.cpp or of safetensors files.

    Raises: CheckpointError when it holds another model, misses tensors, or uses a format that cannot be read.
    """
    label = checkpoint.label
    prefix, permuted = _find_prefix(checkpoint)
    body = _part(checkpoint, prefix, permuted, ("layers.", "embed_tokens.", "norm."))
    _refuse_other_encoders(body, label)
    shapes = body.shapes()
    config, place = _config(checkpoint)
    sizes = _sizes(shapes, config, label, place)
    check_shapes(sizes.shapes(), shapes, label, WHAT)
    embedding = body.storage.layers.get("embed_tokens", {}).get("format")
    if embedding is not None and embedding not in _EMBEDDING_FORMATS:
        raise CheckpointError(
            f"{label}: the token embeddings are stored as {embedding}, which cannot be looked up row by row; "
            f"allowed are BF16 and {', '.join(_EMBEDDING_FORMATS)}. Use another file."
        )
    head = _head(checkpoint, prefix, permuted)
    names = body.names()
    if head is not None:
        check_shapes([(_HEAD, (sizes.vocab, sizes.hidden))], head.shapes(), label, WHAT)
        names.update(head.names())
    return EncoderProbe(checkpoint, names, permuted, sizes, body.storage, head and head.storage, config, place)


def _find_prefix(checkpoint: Checkpoint) -> tuple[str, bool]:
    """Return what stands before the encoder's names, and whether the names are llama.cpp's."""
    label = checkpoint.label
    hf = {m[1] for name in checkpoint.tensors if (m := _SIGNATURE.match(name))}
    found = {(prefix, False) for prefix in hf if not any(part in prefix for part in _VISION)}
    if checkpoint.gguf is not None:
        llama_cpp = {m[1] for name in checkpoint.tensors if (m := gguf_names.SIGNATURE.match(name))}
        found |= {(prefix, True) for prefix in llama_cpp if prefix.split(".")[0] not in gguf_names.TOWERS}
    if not found:
        architecture = checkpoint.gguf.architecture if checkpoint.gguf else None
        called = f" The file calls itself '{architecture}'." if architecture else ""
        raise CheckpointError(f"{label}: no Ministral-3 text encoder. {describe(checkpoint.tensors)}{called}")
    if len(found) > 1:
        raise CheckpointError(
            f"{label}: {len(found)} language models, behind {' and '.join(repr(p) for p, _ in sorted(found)[:3])}; one "
            "is needed. Use a file that holds the text encoder alone."
        )
    return found.pop()


def _part(checkpoint: Checkpoint, prefix: str, llama_cpp: bool, starts: tuple[str, ...]) -> _Part:
    """Return the tensors behind `prefix` whose names, in the encoder's words, start with one of `starts`."""
    inside = {n[len(prefix) :]: info for n, info in checkpoint.tensors.items() if n.startswith(prefix)}
    current = gguf_names.encoder_names(inside) if llama_cpp else {name: name for name in inside}
    current = {name: new for name, new in current.items() if new.startswith(starts)}
    tensors = {name: inside[name] for name in current}
    if checkpoint.gguf is not None:
        rename = {name: new for name, new in current.items() if name != new}
        return _Part(prefix, tensors, detect_gguf_storage(tensors, rename, expand=lambda name: False))
    # The marker of old FP8 files stands at the start of the file, before any prefix.
    markers = (checkpoint.tensors.get(p + "scaled_fp8") for p in _ancestors(prefix))
    marker = next((info for info in markers if info is not None), None)
    marked = {**tensors, "scaled_fp8": marker} if marker else tensors
    return _Part(prefix, tensors, detect_storage(checkpoint, marked, prefix))


def _head(checkpoint: Checkpoint, prefix: str, llama_cpp: bool) -> _Part | None:
    """Return the output head, which may stand before the encoder's prefix; None when the file has none."""
    for place in (prefix,) if llama_cpp else _ancestors(prefix):
        part = _part(checkpoint, place, llama_cpp, (f"{_HEAD.partition('.')[0]}.",))
        if _HEAD in part.shapes():
            return part
    return None


def _ancestors(prefix: str) -> Iterator[str]:
    """Yield 'a.b.', 'a.', '' for 'a.b.'."""
    while prefix:
        yield prefix
        prefix = prefix[: prefix.rstrip(".").rfind(".") + 1]
    yield ""


def _refuse_other_encoders(part: _Part, label: str) -> None:
    """Raise for a tensor inside a layer that Ministral-3 does not have."""
    names = dict(EncoderSizes(1, 1, 1, 1, 1, 1, 1, 1.0).shapes())
    known = {name.removeprefix("layers.0.").removesuffix(".weight") for name in names}
    old_scales = (".scale_weight", ".scale_input")
    for stored in part.tensors:
        name = part.storage.rename.get(stored, stored)
        inner = LAYER.sub("", name)
        layer, _, kind = inner.rpartition(".")
        if (kind == "weight" and layer in known) or stored.endswith((*_SIDE_TENSORS, *old_scales)):
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
            f"{label}: '{stored}' is not part of Ministral-3; this looks like {what}. "
            "ERNIE-Image needs Ministral-3 3B (ministral-3-3b.safetensors)."
        )


def _config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str]:
    """Return the model's configuration, and where it is from: a GGUF file's own metadata, else the config.json."""
    if checkpoint.gguf is not None:
        config = gguf_config.config_from_gguf(checkpoint.gguf, checkpoint.label)
        if config:
            return config, gguf_config.WHERE
    return _text_config(checkpoint), _CONFIG_FILE


def _text_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the text part of config.json; {} when it is of another model (any file in a shared folder sees it)."""
    config = checkpoint.config
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    types = (config.get("model_type"), text.get("model_type"))
    return text if any(kind in _CONFIG_TYPES for kind in types) else {}


def _sizes(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], label: str, place: str
) -> EncoderSizes:
    vocab, hidden = shape_of(shapes, "embed_tokens.weight", 2, label)
    intermediate, _ = shape_of(shapes, "layers.0.mlp.gate_proj.weight", 2, label)
    query_rows, _ = shape_of(shapes, "layers.0.self_attn.q_proj.weight", 2, label)
    key_rows, _ = shape_of(shapes, "layers.0.self_attn.k_proj.weight", 2, label)
    if hidden in _OTHER_WIDTHS:
        raise CheckpointError(
            f"{label}: width {hidden}, so this is {_OTHER_WIDTHS[hidden]}. ERNIE-Image needs Ministral-3 3B, "
            f"width {RELEASED_HIDDEN_SIZE} (ministral-3-3b.safetensors)."
        )
    source = f"{label}: {place}"
    declared = _config_int(config, "hidden_size", hidden, source)
    if declared != hidden:
        raise CheckpointError(
            f"{label}: the embeddings have width {hidden}, but {place} says hidden_size = {declared}. The two are of "
            "different models; move the config.json, if there is one, away or download the model again."
        )
    head_dim = _head_dim(config, query_rows, key_rows, label, place)
    eps = config.get("rms_norm_eps", _DEFAULT_EPS)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(f"{source} has rms_norm_eps = {eps!r:.40}; a number between 0 and 1 is needed.")
    layers = _count_layers(shapes, hidden, config, label, place)
    return EncoderSizes(
        vocab, hidden, intermediate, layers, query_rows // head_dim, key_rows // head_dim, head_dim, eps
    )


def _head_dim(config: Mapping[str, Any], query_rows: int, key_rows: int, label: str, place: str) -> int:
    """Return the size of a head. Raises CheckpointError when it does not divide the weights, or other heads are stated."""
    source = f"{label}: {place}"
    stated = {name: _config_int(config, name, 0, source) for name in ("num_attention_heads", "num_key_value_heads")}
    heads = stated["num_attention_heads"]
    from_heads = query_rows // heads if place == gguf_config.WHERE and heads else 0
    head_dim = _config_int(config, "head_dim", from_heads or _DEFAULT_HEAD_DIM, source)
    found = {"num_attention_heads": query_rows // head_dim, "num_key_value_heads": key_rows // head_dim}
    if query_rows % head_dim or key_rows % head_dim or query_rows % key_rows or head_dim % 2:
        raise CheckpointError(
            f"{label}: {query_rows} query and {key_rows} key rows do not divide into heads of {head_dim}. "
            "If the model has other heads, put its config.json with head_dim into the same folder."
        )
    wrong = [name for name, count in stated.items() if count and count != found[name]]
    if wrong:
        raise CheckpointError(
            f"{label}: the weights have {found[wrong[0]]} heads of {head_dim}, but {place} says {wrong[0]} = "
            f"{stated[wrong[0]]}. The file is damaged or of another model; download it again."
        )
    return head_dim


def _config_int(config: Mapping[str, Any], name: str, default: int, source: str) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < 1 << 24:
        raise CheckpointError(f"{source} has {name} = {value!r:.40}; a positive whole number is needed.")
    return value


def _count_layers(
    shapes: Mapping[str, tuple[int, ...]], hidden: int, config: Mapping[str, Any], label: str, place: str
) -> int:
    count = count_layers(shapes, label)
    expected = RELEASED_LAYERS if hidden == RELEASED_HIDDEN_SIZE else count
    wanted = _config_int(config, "num_hidden_layers", expected, f"{label}: {place}")
    if count != wanted or count < _MIN_LAYERS:
        raise CheckpointError(
            f"{label}: {count} layers found; {max(wanted, _MIN_LAYERS)} are needed. The file is incomplete or of "
            "another model; download it again. If it is pruned on purpose, state num_hidden_layers in a config.json beside it."
        )
    return count
