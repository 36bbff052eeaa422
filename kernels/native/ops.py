"""ComfyUI's own NVFP4, MXFP8 and INT8 weights to floats or row-wise FP8, as torch custom operators that torch.compile sees through.

So a file in one of these formats is computed in FP8 on a GPU without FP4 units, at a scale per row found once when it is loaded.

The eager functions define the result. Triton's give the same bits and are taken where Triton works and the weight is on a
CUDA device, or where TRITON_INTERPRET=1 is set (tests). `backend` says which, and why.

Symbols: O, I rows and columns of the weight; R >= O, C >= I as stored, with padding.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from ..backend import FLOAT_DTYPES, check_row_scale, choose, failure_of, register
from . import eager
from .eager import GROUPS, TILE_COLUMNS, TILE_ROWS, Weight

Shape = tuple[int, int]


@functools.cache
def _triton_failure(device: torch.device) -> str:
    """Import Triton and decode one row on `device`; return why that failed, or "". Tried once per device."""

    def launch() -> None:
        from . import triton_ops

        data, scale = torch.zeros(1, 16, dtype=torch.int8, device=device), torch.ones(1, device=device)
        triton_ops.dequantize(Weight("int8", data, scale, None, (1, 16)), torch.float32)

    return failure_of(launch, "NVFP4, MXFP8 and INT8")


def backend(data: Tensor) -> tuple[Literal["triton", "eager"], str]:
    """Return the implementation that a weight is decoded with, and the reason."""
    return choose(data, _triton_failure)


def _implementation(data: Tensor) -> Any:
    """Return the module whose functions decode `data`."""
    if backend(data)[0] == "eager":
        return eager
    from . import triton_ops

    return triton_ops


# The operators take the fields of a `Weight`.
_FIELDS = "str format, Tensor data, Tensor? scale, Tensor? block_scale, int[] shape"


def _weight(format: Any, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int]) -> Weight:
    return Weight(format, data, scale, block_scale, (shape[0], shape[1]))


def _dequantize(
    format: str, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return _implementation(data).dequantize(_weight(format, data, scale, block_scale, shape), dtype)


def _dequantize_fake(
    format: str, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return data.new_empty(shape, dtype=dtype)


def _row_scales(
    format: str, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int]
) -> Tensor:
    return _implementation(data).row_scales(_weight(format, data, scale, block_scale, shape))


def _row_scales_fake(
    format: str, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int]
) -> Tensor:
    return data.new_empty(shape[:1], dtype=torch.float32)


def _to_fp8(
    format: str, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int], row_scale: Tensor
) -> Tensor:
    return _implementation(data).to_fp8(_weight(format, data, scale, block_scale, shape), row_scale)


def _to_fp8_fake(
    format: str, data: Tensor, scale: Tensor | None, block_scale: Tensor | None, shape: list[int], row_scale: Tensor
) -> Tensor:
    return data.new_empty(shape, dtype=torch.float8_e4m3fn)


register("native_dequantize", f"({_FIELDS}, ScalarType dtype) -> Tensor", _dequantize, _dequantize_fake)
register("native_row_scales", f"({_FIELDS}) -> Tensor", _row_scales, _row_scales_fake)
register("native_to_fp8", f"({_FIELDS}, Tensor row_scale) -> Tensor", _to_fp8, _to_fp8_fake)


def _found(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _check_data(name: str, data: Tensor, dtype: torch.dtype, columns: int, group: int, shape: Shape) -> None:
    """Raise ValueError unless `data` is a matrix of `dtype` whose `columns` are whole groups that hold `shape`."""
    if data.dtype != dtype or data.dim() != 2 or columns % group:
        needed = f"{dtype} of two dimensions" + (f" with whole groups of {group} columns" if group > 1 else "")
        raise ValueError(f"{name} data is {_found(data)}; needed: {needed}")
    if not (0 < shape[0] <= data.shape[0] and 0 < shape[1] <= columns):
        raise ValueError(f"the {name} data holds {(data.shape[0], columns)} weights; shape {shape} is not part of that")


def _check_block_scale(name: str, data: Tensor, columns: int, block_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the block scales as bytes. Raises ValueError unless they are whole tiles of `dtype`, or of its bytes."""
    groups = columns // GROUPS[name.lower()]
    shape = (-(-data.shape[0] // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_COLUMNS) * TILE_COLUMNS)
    fits = block_scale.dtype in (dtype, torch.uint8) and block_scale.numel() == shape[0] * shape[1]
    if not fits or block_scale.device != data.device:
        raise ValueError(
            f"the {name} block scale is {_found(block_scale)}; needed: {dtype}, or its bytes, {shape} on {data.device}"
        )
    return block_scale.contiguous().view(torch.uint8)


def _check_scale(name: str, data: Tensor, scale: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return the scale as float32 (n,). Raises ValueError unless it is floats, and n one of `counts`."""
    if not scale.is_floating_point() or scale.numel() not in counts or scale.device != data.device:
        raise ValueError(
            f"the {name} scale is {_found(scale)}; needed: {' or '.join(map(str, counts))} floats on {data.device}"
        )
    return scale.float().reshape(-1).contiguous()


def _nvfp4(data: Tensor, block_scale: Tensor, scale: Tensor, shape: Shape) -> Weight:
    columns = data.shape[-1] * 2 if data.dim() else 0
    _check_data("NVFP4", data, torch.uint8, columns, GROUPS["nvfp4"], shape)
    blocks = _check_block_scale("NVFP4", data, columns, block_scale, torch.float8_e4m3fn)
    return Weight("nvfp4", data.contiguous(), _check_scale("NVFP4", data, scale, (1,)), blocks, shape)


def _mxfp8(data: Tensor, block_scale: Tensor, shape: Shape) -> Weight:
    columns = data.shape[-1] if data.dim() else 0
    _check_data("MXFP8", data, torch.float8_e4m3fn, columns, GROUPS["mxfp8"], shape)
    blocks = _check_block_scale("MXFP8", data, columns, block_scale, torch.float8_e8m0fnu)
    return Weight("mxfp8", data.contiguous(), None, blocks, shape)


def _int8(data: Tensor, scale: Tensor) -> Weight:
    shape = (data.shape[0], data.shape[1]) if data.dim() == 2 else (0, 0)
    _check_data("INT8", data, torch.int8, shape[1], 1, shape)
    return Weight("int8", data.contiguous(), _check_scale("INT8", data, scale, (1, shape[0])), None, shape)


def _to_float(weight: Weight, dtype: torch.dtype) -> Tensor:
    if dtype not in FLOAT_DTYPES:
        allowed = ", ".join(map(str, FLOAT_DTYPES))
        raise ValueError(f"{weight.format.upper()} cannot be decoded to {dtype}; allowed: {allowed}")
    return torch.ops.ernie_fast.native_dequantize(*weight, dtype)


def _scaled(weight: Weight, row_scale: Tensor) -> Tensor:
    return torch.ops.ernie_fast.native_to_fp8(*weight, check_row_scale(weight.data, row_scale, weight.shape[0]))


def dequantize_nvfp4(data: Tensor, block_scale: Tensor, scale: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Decode NVFP4, computed in `dtype`: code * (scale * block scale), rounded at both products as comfy-kitchen does.

    Args:
        data: (R, C / 2) uint8, two E2M1 codes per byte, the even column in the high half.
        block_scale: float8_e4m3fn, or its bytes as uint8, one per 16 columns, in the tensor cores' tiled order.
        scale: one float, that of the weight.
        shape: (O, I), the weight without padding.
        dtype: float32, float16 or bfloat16.

    Returns:
        (O, I) of `dtype`, on the device of `data`.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    return _to_float(_nvfp4(data, block_scale, scale, shape), dtype)


def nvfp4_row_scales(data: Tensor, block_scale: Tensor, scale: Tensor, shape: Shape) -> Tensor:
    """Return amax(|row|) / 448 of the float32 weight as (O,) float32; 1 for a row of zeros. As `dequantize_nvfp4`."""
    return torch.ops.ernie_fast.native_row_scales(*_nvfp4(data, block_scale, scale, shape))


def nvfp4_to_fp8(data: Tensor, block_scale: Tensor, scale: Tensor, shape: Shape, row_scale: Tensor) -> Tensor:
    """Decode NVFP4 to FP8: clamp(float32 weight * (1 / row_scale[row]), -448, 448), rounded to float8_e4m3fn.

    Args:
        data, block_scale, scale, shape: as for `dequantize_nvfp4`.
        row_scale: (O,) float32 on the same device.

    Returns:
        (O, I) float8_e4m3fn.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    return _scaled(_nvfp4(data, block_scale, scale, shape), row_scale)


def dequantize_mxfp8(data: Tensor, block_scale: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Decode MXFP8: code * block scale in float32, then rounded to `dtype`.

    Args:
        data: (R, C) float8_e4m3fn.
        block_scale: float8_e8m0fnu, or its bytes as uint8, one per 32 columns, in the tensor cores' tiled order. As in
            comfy-kitchen, byte 0 stands for 0 and 255 for infinity.
        shape: (O, I), the weight without padding.
        dtype: float32, float16 or bfloat16.

    Returns:
        (O, I) of `dtype`, on the device of `data`.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    return _to_float(_mxfp8(data, block_scale, shape), dtype)


def mxfp8_row_scales(data: Tensor, block_scale: Tensor, shape: Shape) -> Tensor:
    """Return amax(|row|) / 448 of the weight as (O,) float32; 1 for a row of zeros. As `dequantize_mxfp8`."""
    return torch.ops.ernie_fast.native_row_scales(*_mxfp8(data, block_scale, shape))


def mxfp8_to_fp8(data: Tensor, block_scale: Tensor, shape: Shape, row_scale: Tensor) -> Tensor:
    """Decode MXFP8 to row-wise FP8: (O, I) float8_e4m3fn. As `dequantize_mxfp8` and `nvfp4_to_fp8`."""
    return _scaled(_mxfp8(data, block_scale, shape), row_scale)


def dequantize_int8(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode INT8 that is not rotated: code * scale in float32, then rounded to `dtype`.

    Args:
        data: (O, I) int8.
        scale: floats, one for the weight or one per row.
        dtype: float32, float16 or bfloat16.

    Returns:
        (O, I) of `dtype`, on the device of `data`.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    return _to_float(_int8(data, scale), dtype)


def int8_row_scales(data: Tensor, scale: Tensor) -> Tensor:
    """Return amax(|row|) / 448 of the weight as (O,) float32; 1 for a row of zeros. As `dequantize_int8`."""
    return torch.ops.ernie_fast.native_row_scales(*_int8(data, scale))


def int8_to_fp8(data: Tensor, scale: Tensor, row_scale: Tensor) -> Tensor:
    """Decode INT8 to row-wise FP8: (O, I) float8_e4m3fn. As `dequantize_int8` and `nvfp4_to_fp8`."""
    return _scaled(_int8(data, scale), row_scale)
