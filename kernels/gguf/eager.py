"""Decode GGUF weights in plain torch, on any device: the definition of correct for the Triton kernels.

`DECODERS` maps a type's name to its function (N, type_size) uint8 -> (N, block_size) float32. The functions here are not
checked for wrong input; `ops.py` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..fp8 import FP8_MAX, scales_of
from . import eager_iq, eager_k
from .qtypes import QTYPES

Decoder = Callable[[torch.Tensor], torch.Tensor]

DECODERS: dict[str, Decoder] = {
    "Q4_0": eager_k.q4_0,
    "Q4_1": eager_k.q4_1,
    "Q5_0": eager_k.q5_0,
    "Q5_1": eager_k.q5_1,
    "Q8_0": eager_k.q8_0,
    "Q2_K": eager_k.q2_k,
    "Q3_K": eager_k.q3_k,
    "Q4_K": eager_k.q4_k,
    "Q5_K": eager_k.q5_k,
    "Q6_K": eager_k.q6_k,
    "IQ2_XXS": eager_iq.iq2_xxs,
    "IQ2_XS": eager_iq.iq2_xs,
    "IQ3_XXS": eager_iq.iq3_xxs,
    "IQ4_NL": eager_iq.iq4_nl,
    "IQ3_S": eager_iq.iq3_s,
    "IQ2_S": eager_iq.iq2_s,
    "IQ4_XS": eager_iq.iq4_xs,
}
# Weights decoded at once. The most wasteful types take 15 bytes of temporaries a weight, so 2**23 take 126 MB.
CHUNK = 1 << 23


def _rows_in_chunks(data: torch.Tensor, qtype: str) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows, their weights as (len, columns) float32) for data (..., row_bytes), leading dimensions taken together."""
    columns = QTYPES[qtype].columns(data.shape[-1])
    flat = data.reshape(-1, data.shape[-1])
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, flat.shape[0], step):
        rows = slice(start, start + step)
        values = DECODERS[qtype](flat[rows].reshape(-1, QTYPES[qtype].type_size))
        yield rows, values.reshape(-1, columns)


def _empty(data: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*data.shape[:-1], QTYPES[qtype].columns(data.shape[-1]), dtype=dtype, device=data.device)


def dequantize(data: torch.Tensor, qtype: str, dtype: torch.dtype) -> torch.Tensor:
    """Return data (..., row_bytes) uint8 as (..., columns) of `dtype`: computed in float32, rounded once at the end."""
    out = _empty(data, qtype, dtype)
    flat = out.view(-1, out.shape[-1])
    for rows, values in _rows_in_chunks(data, qtype):
        flat[rows] = values
    return out


def row_scales(data: torch.Tensor, qtype: str) -> torch.Tensor:
    """Return amax(|row|) / 448 of data (..., row_bytes) uint8 as (rows,) float32; 1 for a row of zeros."""
    absmax = torch.zeros(data.shape[:-1].numel(), dtype=torch.float32, device=data.device)
    for rows, values in _rows_in_chunks(data, qtype):
        absmax[rows] = values.abs().amax(dim=-1)
    return scales_of(absmax)


def dequantize_fp8(data: torch.Tensor, qtype: str, scale: torch.Tensor) -> torch.Tensor:
    """Return data (..., row_bytes) uint8 as (..., columns) float8_e4m3fn: clamp(weight * (1 / scale[row]), +-448).

    Args:
        data: the blocks.
        qtype: their type.
        scale: (rows,) float32.
    """
    out = _empty(data, qtype, torch.float8_e4m3fn)
    flat = out.view(-1, out.shape[-1])
    inverse = (1.0 / scale)[:, None]
    for rows, values in _rows_in_chunks(data, qtype):
        flat[rows] = (values * inverse[rows]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return out
