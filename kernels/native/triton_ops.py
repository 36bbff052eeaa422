# Triton reads these functions as a language of its own, which its annotations do not describe.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Triton kernels that decode NVFP4, MXFP8 and INT8 weights, and their launchers. Imported by `ops.py` only where Triton works.

The launchers give the results of the functions of the same name in `eager.py`, bit for bit, but for the scale of a row with NaN.
A program decodes a tile of rows and columns, in groups of columns that share a block scale. Row and column numbers are 32-bit,
addresses 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..fp8 import scales_of
from ..triton_rounding import bfloat16_bits, casts_natively, round_to, target_of
from .eager import GROUPS, TILE_COLUMNS, Weight, stored_columns

# Sixteen weights per thread of four warps. Rows of 256 columns are whole 128-byte lines, even of NVFP4.
ROWS, COLUMNS = 8, 256
# A row's largest magnitude is found by one program, in steps of as many columns.
ABSMAX_COLUMNS = 2048


@triton.jit
def _e2m1(codes: tl.tensor) -> tl.tensor:
    """Return the float32 numbers of E2M1 codes, int32 below 16."""
    # In the fields of a float16 they are 2**14 times too small, which is exact for subnormals too; so in `_e4m3`.
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _e4m3(codes: tl.tensor, native: tl.constexpr) -> tl.tensor:
    """Return the float32 numbers of E4M3 codes, uint8."""
    if native:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        values = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def _through(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to `dtype` and back."""
    if dtype == "bfloat16":
        return (bfloat16_bits(values).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif dtype == "float16":
        return values.to(tl.float16).to(tl.float32)
    else:
        return values


@triton.jit
def _tiled(row: tl.tensor, group: tl.tensor, tiles: int) -> tl.tensor:
    """Return where the block scales (rows, groups) are, with `tiles` tiles of 128 x 4 side by side: see `eager._untiled`."""
    row, group = row[:, None], group[None, :]
    tile = (row // 128).to(tl.int64) * tiles + group // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


@triton.jit
def _decode(
    data: tl.tensor,
    scale: tl.tensor,
    scale_step: int,
    blocks: tl.tensor,
    tiles: int,
    row: tl.tensor,
    group: tl.tensor,
    columns: int,
    stride: int,
    form: tl.constexpr,
    dtype: tl.constexpr,
    native: tl.constexpr,
    width: tl.constexpr,
) -> tl.tensor:
    """Decode rows (r,) and groups of columns (g,) to float32 (r, g, width).

    Args:
        data: bytes, `stride` per row; int8 for INT8. Groups past the `columns` of the weight are not read.
        scale: float32, of the weight (`scale_step` 0) or of its rows (1); NVFP4: rounded to `dtype`.
        blocks: bytes of the block scales, `tiles` tiles side by side.
        form: the format; `dtype`: that in which NVFP4 is computed.
        native: whether the hardware reads E4M3.
        width: columns of a group, and so of a block scale.
    """
    start = data + row.to(tl.int64)[:, None, None] * stride
    if form == "int8":
        column = group[:, None] * width + tl.arange(0, width)[None, :]
        # No padding is stored: the last group of the last row can end past the tensor.
        codes = tl.load(start + column[None, :, :], mask=(column < columns)[None, :, :], other=0)
        return codes.to(tl.float32) * tl.load(scale + row * scale_step)[:, None, None]
    else:
        inside = (group * width < columns)[None, :]
        block = tl.load(blocks + _tiled(row, group, tiles), mask=inside, other=0)
        if form == "mxfp8":
            at = group[:, None] * width + tl.arange(0, width)[None, :]
            codes = tl.load(start + at[None, :, :], mask=inside[:, :, None], other=0)
            return _e4m3(codes, native) * (block.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, :, None]
        else:
            at = group[:, None] * (width // 2) + tl.arange(0, width // 2)[None, :]
            codes = tl.load(start + at[None, :, :], mask=inside[:, :, None], other=0).to(tl.int32)
            halves = tl.reshape(tl.join(codes >> 4, codes & 15), (codes.shape[0], codes.shape[1], width))
            total = _through(tl.load(scale) * _e4m3(block, native), dtype)
            return _e2m1(halves) * total[:, :, None]


@triton.jit
def _dequantize_kernel(
    data: tl.tensor,
    scale: tl.tensor,
    scale_step: int,
    blocks: tl.tensor,
    tiles: int,
    out: tl.tensor,
    inverse_scale: tl.tensor,
    rows: int,
    columns: int,
    stride: int,
    form: tl.constexpr,
    dtype: tl.constexpr,
    native: tl.constexpr,
    scaled: tl.constexpr,
    rounding: tl.constexpr,
    row_count: tl.constexpr,
    group_count: tl.constexpr,
    width: tl.constexpr,
):
    """Decode a tile of `row_count` rows and `group_count` groups; scale the rows; round; store.

    Args:
        out: (rows, columns), or integers in its place: see `triton_rounding.target_of`, also for `rounding`.
        inverse_scale: (rows,) float32, read where `scaled`.
        scaled: whether the rows are scaled and clamped. The others are those of `_decode`.
    """
    across = tl.cdiv(columns, group_count * width)
    row = tl.program_id(0) // across * row_count + tl.arange(0, row_count)
    group = tl.program_id(0) % across * group_count + tl.arange(0, group_count)
    # Rows past the end decode the last row again, so that only the store needs a mask.
    read = tl.minimum(row, rows - 1)
    values = _decode(data, scale, scale_step, blocks, tiles, read, group, columns, stride, form, dtype, native, width)
    if scaled:
        values = values * tl.load(inverse_scale + read)[:, None, None]
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    column = (group[:, None] * width + tl.arange(0, width)[None, :])[None, :, :]
    at = row.to(tl.int64)[:, None, None] * columns + column
    stored = round_to(values, out.dtype.element_ty, rounding)
    tl.store(out + at, stored, mask=(row < rows)[:, None, None] & (column < columns))


@triton.jit
def _absmax_kernel(
    data: tl.tensor,
    scale: tl.tensor,
    scale_step: int,
    blocks: tl.tensor,
    tiles: int,
    out: tl.tensor,
    columns: int,
    stride: int,
    form: tl.constexpr,
    native: tl.constexpr,
    group_count: tl.constexpr,
    width: tl.constexpr,
):
    """Store the largest magnitude of one row: out (rows,) float32. The arguments are those of `_dequantize_kernel`."""
    row = tl.program_id(0) + tl.arange(0, 1)
    largest = tl.zeros((1, group_count, width), tl.float32)
    for start in range(0, columns, group_count * width):
        group = start // width + tl.arange(0, group_count)
        values = _decode(
            data, scale, scale_step, blocks, tiles, row, group, columns, stride, form, "float32", native, width
        )
        column = (group[:, None] * width + tl.arange(0, width)[None, :])[None, :, :]
        largest = tl.maximum(largest, tl.where(column < columns, tl.abs(values), 0.0))
    tl.store(out + tl.program_id(0), tl.max(tl.reshape(largest, (group_count * width,)), axis=0))


def _arguments(weight: Weight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, int]:
    """Return the first arguments of the kernels: data, scale, scale_step, blocks, tiles. A tensor that is not read is `data`."""
    data = weight.data if weight.format == "int8" else weight.data.view(torch.uint8)
    scale, blocks, tiles = data, data, 0
    if weight.scale is not None:
        scale = weight.scale.to(dtype).float() if weight.format == "nvfp4" else weight.scale
    if weight.block_scale is not None:
        blocks = weight.block_scale
        tiles = triton.cdiv(stored_columns(weight) // GROUPS[weight.format], TILE_COLUMNS)
    return data, scale, int(scale.numel() > 1), blocks, tiles


def _launch(weight: Weight, dtype: torch.dtype, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    rows, columns = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    target, rounding = target_of(out)
    computed = torch.float32 if inverse_scale is not None else dtype
    width = GROUPS.get(weight.format, 16)
    _dequantize_kernel[(triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)](
        *_arguments(weight, computed),
        target,
        weight.data if inverse_scale is None else inverse_scale,
        rows,
        columns,
        weight.data.shape[1],
        form=weight.format,
        dtype=str(computed).removeprefix("torch."),
        native=casts_natively(out.device),
        scaled=inverse_scale is not None,
        rounding=rounding,
        row_count=ROWS,
        group_count=COLUMNS // width,
        width=width,
        enable_fp_fusion=False,
    )
    return out


def dequantize(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight as (O, I) of `dtype`: float32, float16 or bfloat16."""
    with torch.cuda.device_of(weight.data):
        return _launch(weight, dtype, None)


def row_scales(weight: Weight) -> torch.Tensor:
    """Return amax(|row|) / 448 of the float32 weight as (O,) float32; 1 for a row of zeros."""
    absmax = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.data.device)
    width = GROUPS.get(weight.format, 16)
    with torch.cuda.device_of(weight.data):
        _absmax_kernel[(absmax.numel(),)](
            *_arguments(weight, torch.float32),
            absmax,
            weight.shape[1],
            weight.data.shape[1],
            form=weight.format,
            native=casts_natively(absmax.device),
            group_count=ABSMAX_COLUMNS // width,
            width=width,
            enable_fp_fusion=False,
        )
    return scales_of(absmax)


def to_fp8(weight: Weight, row_scale: torch.Tensor) -> torch.Tensor:
    """Return the weight as (O, I) float8_e4m3fn: clamp(float32 weight * (1 / row_scale[row]), +-448)."""
    # The division is done here, because Triton's rounds differently.
    with torch.cuda.device_of(weight.data):
        return _launch(weight, torch.float8_e4m3fn, 1.0 / row_scale)
