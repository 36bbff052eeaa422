"""Read a checkpoint's tensors the way ComfyUI reads its own files, so that its offloading can stream them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import comfy.utils
import safetensors.torch

from .checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


def read_tensors(checkpoint: Checkpoint, new_name: Callable[[str], str | None]) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, memory-mapped, under new names.

    Args:
        checkpoint: an open checkpoint.
        new_name: maps a tensor's name in the file to its name in the result; None leaves the tensor out.
    """
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
