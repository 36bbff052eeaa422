"""New codes for a GGUF weight on the grid it has: a change is added without moving any scale.

A weight that is encoded anew from its decoded values loses as much as at its first encoding, because the encoder finds other
scales. With the scales kept, a weight that does not change stays as it is bit for bit, and the threshold of `rounding.py` keeps changes
that are smaller than a step of the grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounding import NEAREST, change_threshold
from .codes import CHUNK, beyond_range, levels_of, rounded_codes
from .encode import encode_blocks
from .fields import LAYOUTS, grid, with_codes
from .fields_iq import VECTOR_LAYOUTS, magnitudes
from .qtypes import QTYPES

_SAMPLE = 1 << 20  # weights from which the threshold is found
_DISTANCES = 1 << 25  # distances at a time: 134 MB


def requantize(data: Tensor, qtype: str, x: Tensor, seed: int | None = 0) -> Tensor:
    """Encode `x` on the grid of `data`: keep its scales and minima, choose new codes (and grid indices and signs).

    A block of a linear type with a weight more than one code beyond the range of its scales is encoded anew. IQ2 and IQ3 types take the nearest entry of their table, whatever the
    seed, and keep the present one unless another is nearer. Codes under a scale of 0 stay.

    Args:
        data: uint8 (rows, row_bytes), blocks of the type `qtype`.
        x: float (rows, columns) on the device of `data`; a NaN leaves its code as it is.
        seed: above 0, keep small changes; 0 or None, round to nearest.

    Returns:
        uint8 of the shape of `data`.

    Raises:
        ValueError: for a type without codes, or when `data` and `x` do not fit together.
    """
    allowed = (*LAYOUTS, *VECTOR_LAYOUTS)
    if qtype not in allowed:
        raise ValueError(f"cannot requantize to {qtype}; use one of {', '.join(allowed)}")
    if data.dtype != torch.uint8 or data.ndim != 2:
        raise ValueError(f"data must be uint8 (rows, bytes), not {data.dtype} {tuple(data.shape)}")
    kind = QTYPES[qtype]
    shape = (data.shape[0], kind.columns(data.shape[1]))
    if not x.is_floating_point() or tuple(x.shape) != shape:
        raise ValueError(
            f"x must be float {shape} for {qtype} data {tuple(data.shape)}, not {x.dtype} {tuple(x.shape)}"
        )
    threshold = _threshold(data, qtype, x) if seed and qtype in LAYOUTS else torch.full((), NEAREST, device=data.device)
    out = torch.empty_like(data, memory_format=torch.contiguous_format)
    step = max(1, CHUNK // max(1, shape[1]))
    for i in range(0, len(data), step):
        blocks = data[i : i + step].reshape(-1, kind.type_size)
        weights = x[i : i + step].detach().float().reshape(-1, kind.block_size)
        if qtype in LAYOUTS:
            present = grid(qtype, blocks)
            wanted = weights.view(present.codes.shape)
            new = with_codes(qtype, blocks, rounded_codes(qtype, present, wanted, threshold))
            beyond = beyond_range(qtype, present, wanted)
            if beyond.any():
                new[beyond] = encode_blocks(qtype, weights[beyond].nan_to_num(0.0))
        else:
            new = _nearest_vectors(qtype, blocks, weights)
        out[i : i + step] = new.view(-1, data.shape[1])
    return out


def _threshold(data: Tensor, qtype: str, x: Tensor) -> Tensor:
    """Return the threshold, float32 (), for a weight, found on rows spread over it."""
    kind = QTYPES[qtype]
    rows = slice(None, None, max(1, x.numel() // _SAMPLE))
    present = grid(qtype, data[rows].reshape(-1, kind.type_size))
    wanted = x[rows].detach().float().reshape(present.codes.shape)
    levels = levels_of(qtype, present.codes)
    change = torch.nan_to_num(wanted - (present.scale * levels + present.offset), 0.0, 0.0, 0.0)

    def stored(threshold: Tensor) -> Tensor:
        return (levels_of(qtype, rounded_codes(qtype, present, wanted, threshold)) - levels) * present.scale

    return change_threshold(stored, change)


def _nearest_vectors(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Return a copy of `blocks`, uint8 (N, type_size) of an IQ2 or IQ3 type, with the signs and entries nearest to `x`.

    Args:
        x: float32 (N, 256).
    """
    layout = VECTOR_LAYOUTS[qtype]
    table = magnitudes(qtype, x.device)
    present = layout.read(blocks)
    scale = present.scale.repeat_interleave(32 // present.scale.shape[1], 1).view(-1, 1)
    y = x.reshape(-1, 8) / scale  # one row per sign byte
    bits = torch.arange(8, dtype=torch.uint8, device=x.device)
    negative = y < 0
    if layout.even:
        # The weight nearest to 0 loses least by a wrong sign.
        odd = negative.sum(1, keepdim=True) % 2 == 1
        negative ^= odd & (bits == y.abs().argmin(1, keepdim=True))
    target = torch.where(negative, -y, y)
    entries = _nearest(table, target.view(-1, layout.width))
    error = (target - table[entries].view(-1, 8)).square().sum(1)

    present_entries = present.entries.reshape(-1)
    present_negative = (present.signs.reshape(-1, 1) >> bits & 1).bool()
    target = torch.where(present_negative, -y, y)
    present_error = (target - table[present_entries.int()].view(-1, 8)).square().sum(1)

    better = ((error < present_error) & (scale != 0).squeeze(1))[:, None]
    signs = torch.where(better, negative, present_negative).to(torch.uint8) << bits
    entries = torch.where(better, entries.view(-1, 8 // layout.width), present_entries.view(-1, 8 // layout.width))
    blocks = blocks.clone()
    layout.write(blocks, entries.short().view(present.entries.shape), signs.sum(1, dtype=torch.uint8).view(-1, 32))
    return blocks


def _nearest(table: Tensor, vectors: Tensor) -> Tensor:
    """Return int64 (M,): the row of `table` (entries, width) nearest to each of `vectors` (M, width), in float32."""
    norms = table.square().sum(1)
    step = _DISTANCES // len(table)
    slices = (vectors[i : i + step] for i in range(0, len(vectors), step))
    return torch.cat([torch.addmm(norms, part, table.T, alpha=-2).argmin(1) for part in slices])
