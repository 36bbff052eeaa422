"""Real GGUF files of small models, written with gguf-py; K types are encoded with `kernels/gguf/encode.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from ernie_fast.kernels.gguf.encode import quantize
from ernie_files import is_block_linear

FLOATS = ("F32", "F16", "BF16")


def block_linears_as(qtype: str) -> Callable[[str], str]:
    """Return name -> type: the linear layers of the blocks in `qtype`, all else as a converter leaves it."""
    return lambda name: qtype if is_block_linear(name) else "F32"


def stored(tensor: torch.Tensor, qtype: str) -> np.ndarray:
    """Return a tensor's bytes in a GGUF type: an array of that type, or uint8 (..., bytes per row)."""
    if qtype == "F32":
        return tensor.float().numpy()
    if qtype == "F16":
        return tensor.half().numpy()
    if qtype == "BF16":
        return tensor.bfloat16().view(torch.uint8).numpy()
    return quantize(tensor.float().reshape(-1, tensor.shape[-1]), qtype).reshape(*tensor.shape[:-1], -1).numpy()


def write_gguf(
    path: Path,
    sd: Mapping[str, torch.Tensor],
    type_of: Callable[[str], str] | None = None,
    architecture: str | None = "wan",
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """Write a GGUF file.

    Args:
        path: the file; its folder is made.
        sd: name in the file -> tensor.
        type_of: name -> GGUF type; default: Q8_0 for the blocks' linear layers.
        architecture: `general.architecture`; None leaves it out, as sd.cpp does.
        fields: more key-value data, from python numbers, texts and lists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), architecture or "none")
    if architecture is None:
        writer.kv_data[0].pop("general.architecture")
    for key, value in (fields or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in sd.items():
        qtype = (type_of or block_linears_as("Q8_0"))(name)
        data = stored(tensor, qtype)
        raw = None if qtype in ("F32", "F16") else gguf.GGMLQuantizationType[qtype]
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
