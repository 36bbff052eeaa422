"""The rule of `kept_scales`, the same for all formats: which groups get another scale, and which codes the weights get.

A group is what shares a scale: a tensor, a row or a block. R, C: rows and columns of the stored weight; G: groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .rounding import (
    E2M1,
    E4M3,
    E5M2,
    SmallFloat,
    ceil_log2,
    make_generator,
    power_of_two,
    round_integer,
    round_small_float,
)

TILE = 128  # rows of a tile of the tensor cores' block scales: whole tiles are contiguous
_CHUNK = 1 << 22  # weights at a time: ten float32 temporaries of that size are 168 MB

Read = Callable[[slice], tuple[Tensor, Tensor]]
Pack = Callable[[Tensor], Tensor]
Raise = Callable[[Tensor, Tensor, torch.Generator | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Codes:
    """The codes of a format, as numbers.

    Args:
        low, high: the range.
        slack: how far beyond the range a weight may lie before its group gets another scale.
        kind: the grid of float codes; None for whole numbers.
    """

    low: float
    high: float
    slack: float
    kind: SmallFloat | None = None

    def rounded(self, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the codes for `target`, which is given in units of the scale."""
        codes = round_small_float(target, self.kind, generator) if self.kind else round_integer(target, generator)
        return codes.clamp_(self.low, self.high)


# -7, not -8, is the lowest INT4 code that comfy-kitchen's quantiser emits; INT8 goes to -128.
INT4 = Codes(-7.0, 7.0, 1.0)
INT8 = Codes(-128.0, 127.0, 1.0)
FP4 = Codes(-E2M1.maximum, E2M1.maximum, 0.0, E2M1)
FP8 = {
    torch.float8_e4m3fn: Codes(-E4M3.maximum, E4M3.maximum, 0.0, E4M3),
    torch.float8_e5m2: Codes(-E5M2.maximum, E5M2.maximum, 0.0, E5M2),
}


def store(
    qdata: Tensor, scale: Tensor, rows: int, read: Read, pack: Pack, codes: Codes, raised: Raise, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Return new stored codes like `qdata`, and the scales, chunk by chunk.

    Args:
        qdata: the stored weight (R, ...).
        scale: float, one number, or R x G in any shape.
        read: gives for a slice of rows the present codes as numbers and the change of the weights, both float32 (rows, C).
        pack: turns codes float32 (rows, C) into stored ones.
        raised: see `Raise`.
    """
    whole = scale.numel() == 1
    present = scale.float().reshape(1 if whole else rows, -1)
    new = present.clone()
    out = torch.empty_like(qdata, memory_format=torch.contiguous_format)
    generator = make_generator(seed, qdata.device)
    step = max(TILE, _CHUNK // max(1, qdata.shape[1]) // TILE * TILE)
    chunks = [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
    peak = torch.zeros_like(present)
    top = torch.zeros_like(present)

    def raise_(part: slice) -> None:
        scales, tops = raised(peak[part], present[part], generator)
        beyond = peak[part] > 0
        new[part] = torch.where(beyond, scales.to(scale.dtype).float(), present[part])
        top[part] = tops

    if whole:
        for chunk in chunks:
            value, change = read(chunk)
            peak = torch.maximum(peak, _peaks(value.reshape(1, 1, -1), change.reshape(1, 1, -1), present, codes))
        raise_(slice(None))
    for chunk in chunks:
        part = slice(None) if whole else chunk
        value, change = read(chunk)
        groups = (len(value), present.shape[1], -1)
        value, change = value.reshape(groups), change.reshape(groups)
        if not whole:
            peak[part] = _peaks(value, change, present[part], codes)
            raise_(part)
        result = _kept(value, change, present[part].unsqueeze(-1), codes, generator)
        moved = (new[part] != present[part]).expand(groups[:2])
        if moved.any():
            a, b, c, d = (t[part].expand(groups[:2])[moved].unsqueeze(-1) for t in (present, new, peak, top))
            result[moved] = _anew(value[moved] * a + change[moved], b, c, d, codes, generator)
        out[chunk] = pack(result.flatten(1))
    return out, new.to(scale.dtype).view(scale.shape)


def _kept(value, change, scale, codes, generator):
    target = value + change / torch.where(scale == 0, 1.0, scale)
    return torch.where((change == 0) | (scale == 0), value, codes.rounded(target, generator))


def _anew(weights, scale, peak, top, codes, generator):
    size = weights.abs()
    end = scale * codes.high
    size = torch.where(size > top, top + (size - top) * (end - top) / (peak - top), size)
    return codes.rounded(size.copysign(weights) / scale, generator)


def _peaks(value: Tensor, change: Tensor, scale: Tensor, codes: Codes) -> Tensor:
    """Return the largest magnitude of each group that leaves the range of its scale, and 0 for the other groups.

    Args:
        value, change: float32 (rows, G, weights of a group).
        scale: float32 (rows, G).

    Returns:
        float32 (rows, G).
    """
    scale = scale.unsqueeze(-1)
    target = value + change / torch.where(scale == 0, 1.0, scale)
    beyond = (target > codes.high + codes.slack) | (target < codes.low - codes.slack) | (scale == 0)
    # A weight that does not change fits, even with a code that the quantiser never emits.
    beyond &= change != 0
    peak = (value * scale + change).abs_().amax(-1)
    return torch.where(beyond.any(-1), peak, 0.0)


def doubled(peak: Tensor, scale: Tensor, high: float) -> tuple[Tensor, Tensor]:
    """Return `scale` times the smallest power of two with which the code of `peak` is at most `high`; for scale 0, that power."""
    base = torch.where(scale == 0, 1.0, scale)
    return base * power_of_two(ceil_log2(peak / (high * base))), peak
