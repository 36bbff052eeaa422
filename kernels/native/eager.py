"""Decode NVFP4, MXFP8 and INT8 weights in plain torch, on any device: the definition of correct for the Triton kernels.

Weights are those that comfy-kitchen's eager functions give, bit for bit: `dequantize_nvfp4` computes in the result's dtype, with a
rounding at each product, `dequantize_mxfp8` and `dequantize_int8_simple_dtype` in float32, with one rounding at the end. FP8 and the row
scales are made of the float32 weight. Nothing here checks for wrong input; `ops.py` does that.

Symbols: O, I rows and columns of the weight; R >= O, C >= I as stored, with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..fp8 import FP8_MAX, scales_of

# Weights that share a block scale: OCP Microscaling Formats (MX) v1.0, section 5.2, and NVIDIA's NVFP4. An INT8 weight has none.
GROUPS = {"nvfp4": 16, "mxfp8": 32}
# Rows and columns of a tile of block scales.
TILE_ROWS, TILE_COLUMNS = 128, 4
# Weights decoded at once. NVFP4 takes 20 bytes of temporaries a weight, so 2**23 take 168 MB.
CHUNK = 1 << 23
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # MX v1.0, section 5.3.3; the codes from 8 on are negative


class Weight(NamedTuple):
    """A stored weight; its tensors are contiguous and on one device.

    Args:
        format: what `data` holds.
        data: NVFP4: uint8 (R, C / 2), the even column in the high half. MXFP8: float8_e4m3fn (R, C). INT8: int8 (O, I).
        scale: float32. NVFP4: (1,), of the whole weight. INT8: (1,), or (O,) of the rows. MXFP8: None.
        block_scale: uint8, the bytes of the tiled scales: E4M3 per 16 columns of NVFP4, E8M0 per 32 of MXFP8. INT8: None.
        shape: (O, I).
    """

    format: Literal["nvfp4", "mxfp8", "int8"]
    data: Tensor
    scale: Tensor | None
    block_scale: Tensor | None
    shape: tuple[int, int]


def stored_columns(weight: Weight) -> int:
    """Return C."""
    return weight.data.shape[1] * (2 if weight.format == "nvfp4" else 1)


def _untiled(weight: Weight) -> Tensor:
    """Return the block scales as uint8 (O, C / group).

    A tile of 128 x 4 scales is stored as 32 x 4 x 4: row modulo 32, row / 32, column. See "1D Block Scaling Factors Layout" in
    NVIDIA's documentation of cuBLAS.
    """
    assert weight.block_scale is not None
    groups = stored_columns(weight) // GROUPS[weight.format]
    across = -(-groups // TILE_COLUMNS)
    tiles = weight.block_scale.reshape(-1, across, 32, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1, across * TILE_COLUMNS)[: weight.shape[0], :groups]


def unpack_e2m1(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers (rows, C) of E2M1 codes, uint8 (rows, C / 2), the even column in the high half, in `dtype`."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=dtype, device=data.device)
    return table[torch.stack([data >> 4, data & 15], dim=-1).flatten(1).int()]


def _per_group(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply (rows, C) by the scales (rows, groups) of its groups."""
    groups = values.view(*scales.shape, -1)
    return (groups * scales[:, :, None]).view(values.shape)


def _chunks(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their weights (len, I)): in float32, or for NVFP4 in `dtype`."""
    data, scale, (rows, columns) = weight.data, weight.scale, weight.shape
    blocks = _untiled(weight) if weight.block_scale is not None else None
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        if weight.format == "nvfp4":
            assert scale is not None
            assert blocks is not None
            values = _per_group(unpack_e2m1(data[part], dtype), scale.to(dtype) * blocks[part].view(torch.float8_e4m3fn).to(dtype))
        elif weight.format == "mxfp8":
            assert blocks is not None
            # The byte is a float32's exponent. So 0 stands for 0, and 255 for infinity, where MX has 2**-127 and NaN.
            values = _per_group(data[part].float(), (blocks[part].int() << 23).view(torch.float32))
        else:
            assert scale is not None
            values = data[part].float() * (scale if scale.numel() == 1 else scale[part])[:, None]
        yield part, values[:, :columns]


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight as (O, I) of `dtype`: float32, float16 or bfloat16."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    for rows, values in _chunks(weight, dtype):
        out[rows] = values
    return out


def row_scales(weight: Weight) -> Tensor:
    """Return amax(|row|) / 448 of the float32 weight as (O,) float32; 1 for a row of zeros."""
    absmax = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.data.device)
    for rows, values in _chunks(weight, torch.float32):
        absmax[rows] = values.abs().amax(dim=-1)
    return scales_of(absmax)


def to_fp8(weight: Weight, row_scale: Tensor) -> Tensor:
    """Return the weight as (O, I) float8_e4m3fn: clamp(float32 weight * (1 / row_scale[row]), +-448).

    Args:
        weight: what to decode.
        row_scale: (O,) float32.
    """
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.data.device)
    inverse = (1.0 / row_scale)[:, None]
    for rows, values in _chunks(weight, torch.float32):
        out[rows] = (values * inverse[rows]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return out
