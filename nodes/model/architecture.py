"""The ERNIE-Image diffusion transformer as a list of tensors: names, shapes, and the sizes read back from them.

Symbols: D hidden size, F feed-forward size, T text width, C latent channels, P patch size, L layers, H head size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import CheckpointError
from .shapes import Shape, check_shapes, count_layers, shape_of

# The released model (and its Turbo variant): 36 layers of width 4096.
RELEASED_HIDDEN_SIZE = 4096
RELEASED_LAYERS = 36

BLOCK_LINEARS = (
    "self_attention.to_q", "self_attention.to_k", "self_attention.to_v", "self_attention.to_out.0",
    "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2",
)  # fmt: skip
BOUNDARY_LINEARS = (
    "x_embedder.proj", "text_proj", "time_embedding.linear_1", "time_embedding.linear_2", "adaLN_modulation.1",
    "final_norm.linear", "final_linear",
)  # fmt: skip

# Prefixes that loaders, trainers and converters put before every name, longest first.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "unet.", "net.", "")
_SIGNATURE = re.compile(r"^(.*?)layers\.\d+\.(?:adaLN_sa_ln|adaLN_mlp_ln|mlp\.linear_fc2|self_attention\.norm_q)\.weight$")


@dataclass(frozen=True, slots=True)
class ErnieArchitecture:
    """The sizes of one ERNIE-Image transformer.

    `text_dim` is the width of the text encoder's hidden states; `rope_axes` the rotary sizes of (text index, y, x).
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    in_channels: int
    out_channels: int
    patch_size: int
    text_dim: int
    rope_axes: tuple[int, int, int]

    def unet_config(self) -> dict[str, Any]:
        """Return the configuration that ComfyUI's `supported_models.ErnieImage` builds the module from."""
        return {
            "image_model": "ernie",
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_layers": self.num_layers,
            "ffn_hidden_size": self.ffn_size,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "patch_size": self.patch_size,
            "text_in_dim": self.text_dim,
            "rope_axes_dim": self.rope_axes,
        }

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of every tensor that the module needs."""
        d, f, head = self.hidden_size, self.ffn_size, self.hidden_size // self.num_heads
        yield "x_embedder.proj.weight", (d, self.in_channels, self.patch_size, self.patch_size)
        yield "x_embedder.proj.bias", (d,)
        if self.text_dim != d:
            yield "text_proj.weight", (d, self.text_dim)
        for name, rows in (("time_embedding.linear_1", d), ("time_embedding.linear_2", d), ("adaLN_modulation.1", 6 * d),
                           ("final_norm.linear", 2 * d), ("final_linear", self.patch_size**2 * self.out_channels)):  # fmt: skip
            yield f"{name}.weight", (rows, d)
            yield f"{name}.bias", (rows,)
        for layer in range(self.num_layers):
            base = f"layers.{layer}."
            for norm in ("adaLN_sa_ln", "adaLN_mlp_ln"):
                yield f"{base}{norm}.weight", (d,)
            for norm in ("norm_q", "norm_k"):
                yield f"{base}self_attention.{norm}.weight", (head,)
            for name in BLOCK_LINEARS[:4]:
                yield f"{base}{name}.weight", (d, d)
            yield f"{base}mlp.gate_proj.weight", (f, d)
            yield f"{base}mlp.up_proj.weight", (f, d)
            yield f"{base}mlp.linear_fc2.weight", (d, f)


def find_prefix(names: Mapping[str, Any], label: str) -> str | None:
    """Return what stands before every ERNIE tensor name, or None when this is no ERNIE transformer.

    Raises: CheckpointError when the names are ERNIE's behind a prefix that is not known.
    """
    found = {match[1] for name in names if (match := _SIGNATURE.match(name))}
    for prefix in PREFIXES:
        if prefix in found:
            return prefix
    if found:
        known = ", ".join(f"'{p}'" for p in PREFIXES if p)
        raise CheckpointError(
            f"{label}: ERNIE-Image tensors behind the unknown prefix '{min(found)}'; known are none, {known}. "
            "Rename the tensors, or report the file so that the prefix can be added."
        )
    return None


def _count_layers(shapes: Mapping[str, Shape], hidden_size: int, declared: int | None, label: str) -> int:
    count = count_layers(shapes, label)
    wanted = declared if declared is not None else (RELEASED_LAYERS if hidden_size == RELEASED_HIDDEN_SIZE else count)
    if count < wanted:
        raise CheckpointError(
            f"{label}: {count} of {wanted} layers found. The file is incomplete; download it again. If the model is "
            f"pruned on purpose, say so: a config.json beside it, or safetensors metadata, with num_layers = {count}."
        )
    return count


def rope_axes(head_size: int, label: str) -> tuple[int, int, int]:
    """Split a head into the rotary sizes of (text index, y, x): 2/8, 3/8, 3/8, as 32, 48, 48 of the released 128.

    Raises: CheckpointError when the head size is no multiple of 16 (each part must be even).
    """
    if head_size % 16:
        raise CheckpointError(f"{label}: head size {head_size}; a multiple of 16 is needed to split it for RoPE.")
    return head_size // 4, head_size * 3 // 8, head_size * 3 // 8


def architecture_from_shapes(
    shapes: Mapping[str, Shape], label: str, declared_layers: int | None = None
) -> ErnieArchitecture:
    """Read the sizes from the tensors' logical shapes, then check that every tensor is there and fits them.

    Args:
        shapes: tensor name (without prefix) -> logical shape (4-bit weights already counted unpacked).
        label: the file, for messages.
        declared_layers: the number of layers that the file's own configuration states, where it states one.

    Raises: CheckpointError naming the first tensor that is missing or has a wrong shape.
    """
    hidden_size, in_channels, patch_size, _ = shape_of(shapes, "x_embedder.proj.weight", 4, label)
    (head_size,) = shape_of(shapes, "layers.0.self_attention.norm_q.weight", 1, label)
    ffn_size, _ = shape_of(shapes, "layers.0.mlp.gate_proj.weight", 2, label)
    final_rows, _ = shape_of(shapes, "final_linear.weight", 2, label)
    text_dim = shape_of(shapes, "text_proj.weight", 2, label)[1] if "text_proj.weight" in shapes else hidden_size
    if hidden_size % head_size:
        raise CheckpointError(f"{label}: hidden size {hidden_size} is no multiple of the head size {head_size}.")
    if "text_proj.weight" in shapes and text_dim == hidden_size:
        raise CheckpointError(
            f"{label}: text width and hidden size are both {hidden_size} and the file has a text_proj; "
            "ComfyUI builds no text_proj then, so this model cannot run."
        )
    architecture = ErnieArchitecture(
        hidden_size=hidden_size,
        num_layers=_count_layers(shapes, hidden_size, declared_layers, label),
        num_heads=hidden_size // head_size,
        ffn_size=ffn_size,
        in_channels=in_channels,
        out_channels=final_rows // patch_size**2,
        patch_size=patch_size,
        text_dim=text_dim,
        rope_axes=rope_axes(head_size, label),
    )
    check_shapes(architecture.shapes(), shapes, label, "ERNIE-Image")
    return architecture
