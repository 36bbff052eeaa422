"""Read a checkpoint's tensors the way ComfyUI reads its own files, so that its offloading can stream them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable

import comfy.utils
import safetensors.torch
import torch
from comfy.quant_ops import QUANT_ALGOS

from .checkpoint import Checkpoint, CheckpointError
from .gguf_storage import read_gguf_tensors
from .operations import OWN_FORMATS
from .storage import MARKER, Storage


def read_tensors(
    checkpoint: Checkpoint, new_name: Callable[[str], str | None], quantised: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, memory-mapped, under new names.

    Args:
        checkpoint: an open checkpoint.
        new_name: maps a tensor's name in the file to its name in the result; None leaves the tensor out.
        quantised: for a GGUF file, the new names that stay as stored, uint8 (rows, bytes per row); others become float32.
    """
    if checkpoint.gguf is not None:
        return read_gguf_tensors(checkpoint, checkpoint.gguf, new_name, quantised)
    out: dict[str, torch.Tensor] = {}
    for file in checkpoint.files:
        dtypes = {info.dtype for info in checkpoint.tensors.values() if info.file == file}
        # ComfyUI's streaming reader knows fewer dtypes than the library (F8_E8M0 is missing in 0.30.0); it would stop
        # with a KeyError. Such a file is mapped by the library instead.
        if dtypes <= set(getattr(comfy.utils, "_TYPES", {})):
            tensors = comfy.utils.load_torch_file(str(file))
        else:
            tensors = safetensors.torch.load_file(str(file))
        for name, tensor in tensors.items():
            renamed = new_name(name)
            if renamed is not None:
                out[renamed] = tensor
    return out


def require_formats(label: str, names: Iterable[str]) -> None:
    """Raise CheckpointError when the installed ComfyUI lacks one of the storage formats.

    Args:
        label: the file, for messages.
        names: the formats used in it.
    """
    lacking = sorted(set(names) - set(QUANT_ALGOS) - set(OWN_FORMATS))
    if lacking:
        raise CheckpointError(
            f"{label}: stored as {', '.join(lacking)}, which this ComfyUI does not know "
            f"(it knows {', '.join(QUANT_ALGOS)}). Update ComfyUI."
        )


def add_markers(sd: dict[str, torch.Tensor], storage: Storage, parent: str = "") -> None:
    """Write the `comfy_quant` marker of every quantised layer into a state dict; `parent` stands before the names."""
    for layer, config in storage.layers.items():
        text = json.dumps(dict(config)).encode()
        sd[f"{parent}{layer}{MARKER}"] = torch.tensor(list(text), dtype=torch.uint8)
