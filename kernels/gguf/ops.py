"""GGUF weights to floats or FP8: the public functions, as torch custom operators that torch.compile and fake tensors see through.

The eager functions define the result. Triton's give the same bits and are taken where Triton works and the weight is on a
CUDA device, or where TRITON_INTERPRET=1 is set (tests). `backend` says which, and why.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from ..backend import FLOAT_DTYPES, check_row_scale, choose, failure_of, register
from . import eager
from .qtypes import QTYPES


@functools.cache
def _triton_failure(device: torch.device) -> str:
    """Import Triton and run one block on `device`; return why that failed, or "". Tried once per device."""

    def launch() -> None:
        from . import triton_ops

        triton_ops.dequantize(torch.zeros(1, 34, dtype=torch.uint8, device=device), "Q8_0", torch.float32)

    return failure_of(launch, "GGUF")


def backend(data: torch.Tensor) -> tuple[Literal["triton", "eager"], str]:
    """Return the implementation that a weight is decoded with, and the reason."""
    return choose(data, _triton_failure)


def _implementation(data: torch.Tensor) -> Any:
    """Return the module whose functions decode `data`."""
    # A kernel cannot be launched for no weights.
    if data.numel() == 0 or backend(data)[0] == "eager":
        return eager
    from . import triton_ops

    return triton_ops


def _check(data: torch.Tensor, qtype: str) -> torch.Tensor:
    """Return `data` contiguous. Raises ValueError for a type or a tensor that cannot be decoded."""
    if qtype not in QTYPES:
        raise ValueError(f"unknown GGUF type {qtype!r}; known: {', '.join(QTYPES)}")
    if data.dtype != torch.uint8 or data.dim() == 0:
        raise ValueError(
            f"{qtype} data is {data.dtype} of shape {tuple(data.shape)}; needed: torch.uint8 of shape (..., row bytes)"
        )
    QTYPES[qtype].columns(data.shape[-1])
    return data.contiguous()


def _decoded(data: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    return data.new_empty((*data.shape[:-1], QTYPES[qtype].columns(data.shape[-1])), dtype=dtype)


def _dequantize(data: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    return _implementation(data).dequantize(data, qtype, dtype)


def _row_scales(data: torch.Tensor, qtype: str) -> torch.Tensor:
    return _implementation(data).row_scales(data, qtype)


def _row_scales_fake(data: torch.Tensor, qtype: str) -> torch.Tensor:
    return data.new_empty((data.shape[:-1].numel(),), dtype=torch.float32)


def _dequantize_fp8(data: torch.Tensor, qtype: str, scale: torch.Tensor) -> torch.Tensor:
    return _implementation(data).dequantize_fp8(data, qtype, scale)


def _dequantize_fp8_fake(data: torch.Tensor, qtype: str, scale: torch.Tensor) -> torch.Tensor:
    return _decoded(data, qtype, torch.float8_e4m3fn)


register("gguf_dequantize", "(Tensor data, str qtype, ScalarType dtype) -> Tensor", _dequantize, _decoded)
register("gguf_row_scales", "(Tensor data, str qtype) -> Tensor", _row_scales, _row_scales_fake)
register(
    "gguf_dequantize_fp8", "(Tensor data, str qtype, Tensor scale) -> Tensor", _dequantize_fp8, _dequantize_fp8_fake
)


def dequantize(data: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    """Decode GGUF blocks: computed in float32 as gguf-py does, then rounded to `dtype`.

    Args:
        data: (..., row_bytes) uint8, rows of whole blocks.
        qtype: a name in `QTYPES`.
        dtype: float32, float16 or bfloat16.

    Returns:
        (..., columns) of `dtype`, on the device of `data`.

    Raises:
        ValueError: unknown type, or wrong data or dtype.
    """
    data = _check(data, qtype)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{qtype} cannot be decoded to {dtype}; allowed: {', '.join(map(str, FLOAT_DTYPES))}")
    return torch.ops.ernie_fast.gguf_dequantize(data, qtype, dtype)


def row_scales(data: torch.Tensor, qtype: str) -> torch.Tensor:
    """Return the scale of each row for FP8: amax(|row|) / 448, and 1 for a row of zeros.

    Args:
        data: (..., row_bytes) uint8, rows of whole blocks; leading dimensions count together as rows.
        qtype: a name in `QTYPES`.

    Returns:
        (rows,) float32.

    Raises:
        ValueError: unknown type, or wrong data.
    """
    return torch.ops.ernie_fast.gguf_row_scales(_check(data, qtype), qtype)


def dequantize_fp8(data: torch.Tensor, qtype: str, scale: torch.Tensor) -> torch.Tensor:
    """Decode GGUF blocks to FP8: clamp(weight * (1 / scale[row]), -448, 448), rounded to float8_e4m3fn.

    Args:
        data: (..., row_bytes) uint8, rows of whole blocks; leading dimensions count together as rows.
        qtype: a name in `QTYPES`.
        scale: (rows,) float32 on the same device.

    Returns:
        (..., columns) float8_e4m3fn.

    Raises:
        ValueError: unknown type, or wrong data or scale.
    """
    data = _check(data, qtype)
    return torch.ops.ernie_fast.gguf_dequantize_fp8(data, qtype, check_row_scale(data, scale, data.shape[:-1].numel()))
