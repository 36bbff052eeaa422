"""Read from a checkpoint's headers which ERNIE-Image transformer it holds and how it is stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from .architecture import BOUNDARY_LINEARS, ErnieArchitecture, architecture_from_shapes, find_prefix
from .checkpoint import Checkpoint, CheckpointError, TensorInfo
from .foreign import describe
from .gguf_storage import detect_gguf_storage
from .nunchaku_lite import as_comfy
from .storage import SIDE_TENSORS, Storage, detect_storage, logical_shapes

logger = logging.getLogger("ernie_fast")

CONVOLUTION = "x_embedder.proj.weight"
_CLASS_NAME = "ErnieImageTransformer2DModel"


@dataclass(frozen=True)
class ModelProbe:
    """What a checkpoint holds: the prefix of its names, the architecture, and how each weight is stored.

    `unused` names the tensors under the prefix that the architecture has no place for.
    """

    checkpoint: Checkpoint
    prefix: str
    architecture: ErnieArchitecture
    storage: Storage
    unused: tuple[str, ...]

    @property
    def title(self) -> str:
        """The model in a few words: 'ERNIE-Image, 36 layers, width 4096, text width 3072, 8.03 B parameters'."""
        a, parameters = self.architecture, self.storage.parameters
        size = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
        return f"ERNIE-Image, {a.num_layers} layers, width {a.hidden_size}, text width {a.text_dim}, {size} parameters"

    @property
    def quantised_boundary(self) -> tuple[str, ...]:
        """The quantised layers that good files keep in 16 bits (embedders, modulation, output)."""
        return tuple(name for name in BOUNDARY_LINEARS if name in self.storage.layers)


def probe_model(checkpoint: Checkpoint) -> ModelProbe:
    """Find the ERNIE-Image transformer in a checkpoint and check that it is whole.

    Args:
        checkpoint: an open checkpoint: the model alone behind any known prefix, or an all-in-one file.

    Raises: CheckpointError when it holds another model, misses tensors, or uses a format that cannot be read.
    """
    label = checkpoint.label
    prefix = find_prefix(checkpoint.tensors, label)
    if prefix is None:
        called = f" The file calls itself '{checkpoint.gguf.architecture}'." if checkpoint.gguf else ""
        raise CheckpointError(f"{label}: no ERNIE-Image diffusion model. {describe(checkpoint.tensors)}{called}")
    tensors = {n[len(prefix) :]: info for n, info in checkpoint.tensors.items() if n.startswith(prefix)}
    if checkpoint.gguf is None:
        tensors, declared = as_comfy(checkpoint, tensors, prefix)
        storage = detect_storage(checkpoint, tensors, prefix, declared)
        shapes = logical_shapes(tensors, storage)
    else:
        storage = detect_gguf_storage(tensors, {}, _is_convolution)
        shapes = {name: _unflattened(name, info.shape) for name, info in tensors.items()}
    architecture = architecture_from_shapes(shapes, label, _declared_layers(checkpoint))
    return ModelProbe(checkpoint, prefix, architecture, storage, _unused(tensors, storage, architecture, prefix))


def _is_convolution(name: str) -> bool:
    return name == CONVOLUTION


def _unflattened(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution that a GGUF converter flattened: (D, C) -> (D, C, 1, 1)."""
    return (*shape, 1, 1) if name == CONVOLUTION and len(shape) == 2 else shape


def warn_about(probe: ModelProbe) -> None:
    """Log what is odd about a checkpoint that can be loaded all the same."""
    label = probe.checkpoint.label
    if probe.unused:
        logger.warning("%s: %d tensors are not used, the first is '%s'", label, len(probe.unused), probe.unused[0])
    if probe.quantised_boundary:
        logger.warning(
            "%s: %s are quantised too; good files keep them in 16 bits. If pictures show a grid, try another file",
            label, ", ".join(probe.quantised_boundary),
        )  # fmt: skip


def _declared_layers(checkpoint: Checkpoint) -> int | None:
    """Return the layer count that the model's own configuration states, or None."""
    config, metadata = checkpoint.config, checkpoint.metadata
    from_config = config.get("num_layers")
    if config.get("_class_name", _CLASS_NAME) == _CLASS_NAME and type(from_config) is int and from_config > 0:
        return from_config
    text = metadata.get("num_layers", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def _unused(
    tensors: Mapping[str, TensorInfo], storage: Storage, architecture: ErnieArchitecture, prefix: str
) -> tuple[str, ...]:
    if not prefix:
        # Beside bare names an all-in-one file may hold anything; only what could be ours is worth a word.
        tensors = {n: i for n, i in tensors.items() if n.startswith("layers.")}
    known = {name for name, _ in architecture.shapes()}
    return tuple(
        name
        for name in sorted(tensors)
        if name not in known and name not in storage.drop and not storage.rename.get(name, name).endswith(SIDE_TENSORS)
    )
