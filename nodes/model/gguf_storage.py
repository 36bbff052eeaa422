"""How the tensors of a GGUF file become ComfyUI weights: which stay quantised, which are expanded at load, and reading them."""

from __future__ import annotations

import mmap
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import comfy.memory_management
import torch

from ...kernels.formats import DTYPE_BITS
from ...kernels.gguf import ops
from ...kernels.gguf.qtypes import QTYPES
from .checkpoint import Checkpoint, TensorInfo
from .gguf_file import GGUFHeader, GGUFTensor
from .storage import GGUF, Storage

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def detect_gguf_storage(
    tensors: Mapping[str, TensorInfo], rename: Mapping[str, str], expand: Callable[[str], bool]
) -> Storage:
    """Return how the tensors of one model in a GGUF file are stored.

    Args:
        tensors: the model's tensors by name without prefix.
        rename: name in the file (without prefix) -> ComfyUI's name, where they differ.
        expand: tells of a ComfyUI name whether its weight is no linear layer and is expanded at load; vectors always are.
    """
    layers: dict[str, dict[str, Any]] = {}
    dtypes: Counter[str] = Counter()
    parameters, stored_bits = 0, 0.0
    for name, info in tensors.items():
        current = rename.get(name, name)
        parameters += info.numel
        qtype = QTYPES.get(info.dtype)
        stored_bits += info.numel * (qtype.bits if qtype else DTYPE_BITS[info.dtype])
        if qtype is None:
            dtypes[info.dtype] += info.numel
        elif len(info.shape) == 2 and current.endswith(".weight") and not expand(current):
            layers[current.removesuffix(".weight")] = {"format": GGUF, "qtype": qtype.name}
        else:
            dtypes["F32"] += info.numel
    return Storage(layers, rename, frozenset(), dict(dtypes), parameters, int(stored_bits) // 8)


def read_gguf_tensors(
    checkpoint: Checkpoint, header: GGUFHeader, new_name: Callable[[str], str | None], quantised: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a GGUF file under new names, memory-mapped. Arguments as in `read_tensors`.

    A tensor that stays as stored is uint8 (rows, bytes per row); every other quantised one is expanded to float32.
    """
    bytes_of = _map_file(checkpoint)
    out: dict[str, torch.Tensor] = {}
    for name, tensor in header.tensors.items():
        renamed = new_name(name)
        if renamed is None:
            continue
        data = bytes_of(tensor)
        qtype = QTYPES.get(tensor.dtype)
        if qtype is None:
            out[renamed] = data.view(_DTYPES[tensor.dtype]).view(tensor.shape)
            continue
        rows = data.view(-1, qtype.row_bytes(tensor.row))
        if renamed in quantised:
            out[renamed] = rows
        else:
            out[renamed] = ops.dequantize(rows, qtype.name, torch.float32).view(tensor.shape)
    return out


def _map_file(checkpoint: Checkpoint) -> Callable[[GGUFTensor], torch.Tensor]:
    """Map the file into memory and return a function that gives a tensor's bytes as uint8 (size,).

    Under dynamic VRAM each tensor also says where it is in the file, as ComfyUI's own loader makes it: weights are then read from disk
    straight to the GPU.
    """
    file = checkpoint.files[0]
    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if not comfy.memory_management.aimdo_enabled:
        return lambda tensor: _from_buffer(mapped, tensor)
    import comfy_aimdo.model_mmap

    lock = threading.Lock()
    streamed = comfy_aimdo.model_mmap.ModelMMAP(str(file))
    handle = streamed.get_file_handle()

    def bytes_of(tensor: GGUFTensor) -> torch.Tensor:
        out = _from_buffer(mapped, tensor)
        storage = out.untyped_storage()
        piece = comfy.memory_management.TensorFileSlice(handle, lock, tensor.offset, tensor.size_bytes)
        setattr(storage, "_comfy_tensor_file_slice", piece)  # noqa: B010 - names that ComfyUI looks for
        setattr(storage, "_comfy_tensor_mmap_refs", (streamed, mapped))  # noqa: B010
        return out

    return bytes_of


def _from_buffer(buffer: mmap.mmap, tensor: GGUFTensor) -> torch.Tensor:
    if not tensor.size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # Read-only on purpose: ComfyUI never writes into a loaded weight.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(buffer, dtype=torch.uint8, count=tensor.size_bytes, offset=tensor.offset)
