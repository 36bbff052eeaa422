# Triton reads these functions as a language of its own, which its annotations do not describe.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Triton kernels that decode GGUF weights to floats or FP8, and their launchers. Imported by `ops.py` only where Triton works.

The launchers take data (..., row_bytes) uint8, contiguous and not empty, and give the results of the functions of the same
name in `eager.py`, bit for bit. Rows are whole blocks, so a weight is a flat list of groups (see `triton_decode`); a program
decodes a run of them. Group numbers are 32-bit (2**31 groups are 34 billion weights), addresses 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..fp8 import scales_of
from ..triton_rounding import round_to, target_of
from .eager_iq import TABLES, table
from .qtypes import QTYPES
from .triton_decode import GROUP_16, decode

# Eight weights per thread of four warps: a 16-byte store of bf16, and the widest that loads and stores agree on.
WEIGHTS_PER_PROGRAM = 1024


@triton.jit
def _dequantize_kernel(
    data: tl.tensor,
    numbers: tl.tensor,
    out: tl.tensor,
    inverse_scale: tl.tensor,
    groups: int,
    groups_per_row: int,
    qtype: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    scaled: tl.constexpr,
    rounding: tl.constexpr,
):
    """Decode `rows` groups of `width` weights; scale them per row of the weight; round; store.

    Args:
        data: uint8 blocks.
        numbers: the type's table, int8.
        out: `groups * width` weights. For the roundings by integers: int16 or uint8 of the same size.
        inverse_scale: (rows of the weight,) float32, read where `scaled`.
        groups: groups of the weight; `groups_per_row`: of one of its rows.
        rounding: "native", or "bfloat16" or "float8_e4m3fn" by integers.
    """
    first = tl.program_id(0) * rows
    # A program past the end decodes the last group again, so that only the store needs a mask.
    group = tl.minimum(first + tl.arange(0, rows), groups - 1)
    values = tl.reshape(decode(data, numbers, group, qtype), (rows, width))
    if scaled:
        inverse = tl.load(inverse_scale + group // groups_per_row)[:, None]
        values = tl.clamp(values * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    stored = round_to(values, out.dtype.element_ty, rounding)
    # A store of the tile's own shape: the compiler then lets each thread load the run of weights that it stores.
    row = tl.arange(0, rows)[:, None]
    start = tl.program_id(0).to(tl.int64) * (rows * width)
    tl.store(out + start + row * width + tl.arange(0, width)[None, :], stored, mask=first + row < groups)


@triton.jit
def _absmax_kernel(
    data: tl.tensor,
    numbers: tl.tensor,
    out: tl.tensor,
    groups_per_row: int,
    qtype: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
):
    """Store the largest magnitude of one row of the weight: out (rows of the weight,) float32."""
    row = tl.program_id(0)
    largest = tl.zeros((rows, width), tl.float32)
    for start in range(0, groups_per_row, rows):
        # Past the end the last group is read again, which changes no maximum.
        group = row * groups_per_row + tl.minimum(start + tl.arange(0, rows), groups_per_row - 1)
        values = tl.reshape(decode(data, numbers, group, qtype), (rows, width))
        largest = tl.maximum(largest, tl.abs(values))
    tl.store(out + row, tl.max(tl.reshape(largest, (rows * width,)), axis=0))


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Copy a view at an odd address, where 16-bit loads would fault."""
    return data.clone() if data.data_ptr() % 2 else data


def _numbers(qtype: str, data: torch.Tensor) -> torch.Tensor:
    """Return the type's table, or any tensor where the kernel reads none."""
    return table(qtype, data.device) if qtype in TABLES else data


def _width(qtype: str) -> int:
    return 16 if qtype in GROUP_16 else 32


def _launch(data: torch.Tensor, qtype: str, dtype: torch.dtype, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    columns = QTYPES[qtype].columns(data.shape[-1])
    out = torch.empty(*data.shape[:-1], columns, dtype=dtype, device=data.device)
    target, rounding = target_of(out)
    width = _width(qtype)
    rows = WEIGHTS_PER_PROGRAM // width
    groups = out.numel() // width
    _dequantize_kernel[(triton.cdiv(groups, rows),)](
        _aligned(data),
        _numbers(qtype, data),
        target,
        data if inverse_scale is None else inverse_scale,
        groups,
        columns // width,
        qtype=qtype,
        rows=rows,
        width=width,
        scaled=inverse_scale is not None,
        rounding=rounding,
        enable_fp_fusion=False,
    )
    return out


def dequantize(data: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    """Return (..., columns) of `dtype`: float32, float16 or bfloat16."""
    with torch.cuda.device_of(data):
        return _launch(data, qtype, dtype, None)


def row_scales(data: torch.Tensor, qtype: str) -> torch.Tensor:
    """Return amax(|row|) / 448 as (rows,) float32; 1 for a row of zeros."""
    width = _width(qtype)
    absmax = torch.empty(data.shape[:-1].numel(), dtype=torch.float32, device=data.device)
    with torch.cuda.device_of(data):
        _absmax_kernel[(absmax.numel(),)](
            _aligned(data),
            _numbers(qtype, data),
            absmax,
            QTYPES[qtype].columns(data.shape[-1]) // width,
            qtype=qtype,
            rows=WEIGHTS_PER_PROGRAM // width,
            width=width,
            enable_fp_fusion=False,
        )
    return scales_of(absmax)


def dequantize_fp8(data: torch.Tensor, qtype: str, scale: torch.Tensor) -> torch.Tensor:
    """Return (..., columns) float8_e4m3fn: clamp(weight * (1 / scale[row]), +-448)."""
    # The division is done here, because Triton's rounds differently.
    with torch.cuda.device_of(data):
        return _launch(data, qtype, torch.float8_e4m3fn, 1.0 / scale)
