"""Encode floats as GGUF weights, without an importance matrix, at the quality of llama.cpp's reference encoders.

Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 give the bytes of `gguf.quants.quantize`. The others search for the scales of the sub-blocks,
round these to the type's scale bits, and only then choose the codes, so that the codes make up for the rounded scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .codes import CHUNK, round_linear
from .fields import (
    IQ4_XS_SCALES,
    LAYOUTS,
    Q2_K_SCALES,
    Q3_K_SCALES,
    codebook,
    with_codes,
    write,
    write_half,
    write_k4,
)
from .qtypes import QTYPES
from .search import affine_scale, ratio, symmetric_scale

_HALF_MAX = 65504.0
_LARGEST = 1e9  # beyond every type: Q6_K ends at 65504 * 128 * 32; and a difference of two does not overflow


def quantize(x: Tensor, qtype: str) -> Tensor:
    """Encode `x` as blocks of the GGUF type `qtype`.

    A scale beyond float16 is cut to its largest number: values above about 65504 times the largest code are clipped.

    Args:
        x: float (rows, columns), without NaN, on any device; columns is a multiple of the type's block size.
        qtype: a linear type: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL or IQ4_XS.

    Returns:
        uint8 (rows, row_bytes) on the device of `x`.

    Raises:
        ValueError: for another type, or when `x` is not float, not of two dimensions, or not made of whole blocks.
    """
    if qtype not in ENCODERS:
        raise ValueError(f"cannot quantize to {qtype}; use one of {', '.join(ENCODERS)}")
    if not x.is_floating_point() or x.ndim != 2:
        raise ValueError(f"x must be float (rows, columns), not {x.dtype} {tuple(x.shape)}")
    kind = QTYPES[qtype]
    out = torch.empty(x.shape[0], kind.row_bytes(x.shape[1]), dtype=torch.uint8, device=x.device)
    step = max(1, CHUNK // max(1, x.shape[1]))
    for i in range(0, len(x), step):
        weights = x[i : i + step].detach().float().reshape(-1, kind.block_size)
        out[i : i + step] = encode_blocks(qtype, weights).view(-1, out.shape[1])
    return out


def encode_blocks(qtype: str, x: Tensor) -> Tensor:
    """Return new blocks, uint8 (N, type_size), of `x`, float32 (N, block_size); `qtype` is a key of ENCODERS."""
    blocks = torch.zeros(len(x), QTYPES[qtype].type_size, dtype=torch.uint8, device=x.device)
    return ENCODERS[qtype](qtype, blocks, x.clamp(-_LARGEST, _LARGEST))


def _half(value: Tensor) -> Tensor:
    """Round float32 `value` to float16, without infinities; the result is float32."""
    return value.clamp(-_HALF_MAX, _HALF_MAX).half().float()


def _peak(x: Tensor) -> Tensor:
    """Return (N, 1): the first number of largest magnitude of each row, with its sign."""
    return x.gather(1, x.abs().argmax(1, keepdim=True))


def _plain_symmetric(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q4_0 and Q5_0: the peak gets the lowest code (`quantize_row_q4_0_ref`, `quantize_row_q5_0_ref`)."""
    lowest = LAYOUTS[qtype].lowest
    d = _peak(x) / lowest
    codes = (x * ratio(torch.ones_like(d), d) + (0.5 - lowest)).trunc() + lowest
    return _plain(qtype, blocks, codes, d)


def _plain_affine(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q4_1 and Q5_1: the range from least to most is split evenly (`quantize_row_q4_1_ref`, `quantize_row_q5_1_ref`)."""
    low = x.amin(1, keepdim=True)
    d = (x.amax(1, keepdim=True) - low) / LAYOUTS[qtype].highest
    codes = ((x - low) * ratio(torch.ones_like(d), d) + 0.5).trunc()
    write_half(blocks, 2, _half(low))
    return _plain(qtype, blocks, codes, d)


def _q8_0(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q8_0: the peak gets 127 or -127; halves are rounded away from 0 (`quantize_row_q8_0_ref`)."""
    d = x.abs().amax(1, keepdim=True) / 127
    scaled = x * ratio(torch.ones_like(d), d)
    size = scaled.abs()
    whole = size.floor()
    codes = scaled.sign() * (whole + (2 * (size - whole)).floor())
    return _plain(qtype, blocks, codes, d)


def _plain(qtype: str, blocks: Tensor, codes: Tensor, d: Tensor) -> Tensor:
    """Store the scale `d` (N, 1), which is the first field of all five plain types, and the codes (N, 32)."""
    layout = LAYOUTS[qtype]
    write_half(blocks, 0, _half(d))
    return with_codes(qtype, blocks, codes.clamp(layout.lowest, layout.highest))


def _linear_scales(x: Tensor, parts: int, lowest: int) -> Tensor:
    """Return float32 (N, parts): the scales of the sub-blocks of `x` (N, 256) with codes from `lowest` to -lowest - 1."""
    peaks = [lowest - 0.1 * i for i in range(-9, 10)]
    rows = x.reshape(len(x) * parts, -1)
    return symmetric_scale(rows, lambda y: y.round().clamp(lowest, -lowest - 1), peaks).view(-1, parts)


def _codebook_scales(x: Tensor, parts: int) -> Tensor:
    """Return float32 (N, parts): the scales of the sub-blocks of `x` (`quantize_row_iq4_nl_impl`)."""
    book = codebook(x.device)
    middles = (book[1:] + book[:-1]) / 2
    lowest = int(book[0])
    peaks = [float(-lowest), *(float(lowest + i) for i in range(-7, 8))]
    rows = x.reshape(len(x) * parts, -1)
    return symmetric_scale(rows, lambda y: book[torch.bucketize(y, middles)], peaks).view(-1, parts)


def _signed_super(scales: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Split `scales` (N, parts) into a float16-exact d (N, 1) and integers from `lowest` to -lowest - 1, int16 (N, parts)."""
    d = _half(_peak(scales) / lowest)
    return d, ratio(scales, d).round().clamp(lowest, -lowest - 1).short()


def _unsigned_super(scales: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Split `scales` >= 0, (N, parts), into a float16-exact d (N, 1) and integers from 0 to `top`, uint8 (N, parts)."""
    d = _half(scales.amax(1, keepdim=True) / top)
    return d, ratio(scales, d).round().clamp(0, top).to(torch.uint8)


def _affine_super(x: Tensor, weight: Tensor, top: int, factors: list[float], sub_top: int) -> tuple[Tensor, ...]:
    """Return d, dmin (N, 1) and the integer scales and minima, uint8 (N, parts), of `x` (N, parts, n)."""
    scale, minimum = affine_scale(x.flatten(0, 1), weight.flatten(0, 1), top, factors)
    d, scales = _unsigned_super(scale.view(x.shape[:2]), sub_top)
    dmin, minima = _unsigned_super(-minimum.view(x.shape[:2]), sub_top)
    return d, dmin, scales, minima


def _relative_size(x: Tensor) -> Tensor:
    """Return |x| over the largest |x| of each sub-block, the last dimension."""
    size = x.abs()
    return ratio(size, size.amax(-1, keepdim=True))


def _q2_k(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q2_K: errors count with |x| (`quantize_row_q2_K_ref`)."""
    parts = x.view(-1, 16, 16)
    factors = [2.5 + 0.1 * i for i in range(16)]
    d, dmin, scales, minima = _affine_super(parts, _relative_size(parts), 3, factors, 15)
    write(blocks, Q2_K_SCALES, torch.cat((scales, minima), 1))
    write_half(blocks, 80, d)
    write_half(blocks, 82, dmin)
    return round_linear(qtype, blocks, x)


def _q4_k(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q4_K and Q5_K: errors count with |x| plus the root mean square (`quantize_row_q4_K_ref`, `quantize_row_q5_K_ref`)."""
    parts = x.view(-1, 8, 32)
    size = _relative_size(parts)
    weight = size + size.square().mean(-1, keepdim=True).sqrt()
    top = LAYOUTS[qtype].highest
    factors = [top - 1 + 0.1 * i for i in range(21)] if qtype == "Q4_K" else [top - 0.5 + 0.1 * i for i in range(16)]
    d, dmin, scales, minima = _affine_super(parts, weight, top, factors, 63)
    write_half(blocks, 0, d)
    write_half(blocks, 2, dmin)
    write_k4(blocks, scales, minima)
    return round_linear(qtype, blocks, x)


def _q3_k(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q3_K, with the search of `make_qx_quants` (`quantize_row_q3_K_ref` refines code by code instead)."""
    d, scales = _signed_super(_linear_scales(x, 16, -4), -32)
    write(blocks, Q3_K_SCALES, scales + 32)
    write_half(blocks, 108, d)
    return round_linear(qtype, blocks, x)


def _q6_k(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Q6_K (`quantize_row_q6_K_ref`)."""
    d, scales = _signed_super(_linear_scales(x, 16, -32), -128)
    blocks[:, 192:208] = scales.to(torch.int8).view(torch.uint8)
    write_half(blocks, 208, d)
    return round_linear(qtype, blocks, x)


def _iq4_nl(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """IQ4_NL (`quantize_row_iq4_nl_impl` with 7 tries to each side)."""
    write_half(blocks, 0, _half(_codebook_scales(x, 1)))
    return round_linear(qtype, blocks, x)


def _iq4_xs(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """IQ4_XS (`quantize_row_iq4_nl_impl` with 7 tries to each side)."""
    d, scales = _signed_super(_codebook_scales(x, 8), -32)
    write_half(blocks, 0, d)
    write(blocks, IQ4_XS_SCALES, scales + 32)
    return round_linear(qtype, blocks, x)


# Each takes the type's name, zeroed blocks uint8 (N, type_size), and the weights float32 (N, block_size).
ENCODERS: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _plain_symmetric,
    "Q4_1": _plain_affine,
    "Q5_0": _plain_symmetric,
    "Q5_1": _plain_affine,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q4_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
