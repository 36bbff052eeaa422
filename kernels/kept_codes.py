"""The rule of `kept_scales`, the same for all formats: which groups get another scale, and which codes the weights get.

A group is what shares a scale: a tensor, a row or a block. R, C: rows and columns of the stored weight; G: groups of a row;
W: weights of a group. Codes are numbers in units of the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .rounding import (
    E2M1,
    E4M3,
    E5M2,
    NEAREST,
    SmallFloat,
    ceil_log2,
    change_threshold,
    make_generator,
    power_of_two,
    round_integer,
    round_small_float,
    upwards,
)

TILE = 128  # rows of a tile of the tensor cores' block scales: whole tiles are contiguous
_SAMPLES = 8  # tiles of rows from which the threshold of a weight is found
_CHUNK = 1 << 22  # weights at a time: ten float32 temporaries of that size are 168 MB


@dataclass(frozen=True)
class Codes:
    """The codes of a format, as numbers.

    Args:
        low, high: the range.
        slack: how far beyond the range a weight may lie before its group gets another scale.
        kind: the grid of float codes; None for whole numbers.
        doubles: True when scales grow by powers of two, so that weights that do not change stay on the grid.
    """

    low: float
    high: float
    slack: float = 0.0
    kind: SmallFloat | None = None
    doubles: bool = False

    def rounded(self, target: Tensor, up: Tensor | float = NEAREST) -> Tensor:
        """Return the codes, float32, for `target`, float32 in units of the scale; `up` as in `rounding.round_integer`."""
        codes = round_small_float(target, self.kind, up) if self.kind else round_integer(target, up)
        return codes.clamp_(self.low, self.high)


# -7, not -8, is the lowest INT4 code that comfy-kitchen's quantiser emits; INT8 goes to -128.
INT4 = Codes(-7.0, 7.0, slack=1.0)
INT8 = Codes(-128.0, 127.0, slack=1.0)
FP4 = Codes(-E2M1.maximum, E2M1.maximum, kind=E2M1)
FP8 = {
    torch.float8_e4m3fn: Codes(-E4M3.maximum, E4M3.maximum, kind=E4M3, doubles=True),
    torch.float8_e5m2: Codes(-E5M2.maximum, E5M2.maximum, kind=E5M2, doubles=True),
}

Read = Callable[[slice], tuple[Tensor, Tensor]]
"""Gives for a slice of rows the present codes and the change of the weights, both float32 (rows, C)."""
Pack = Callable[[Tensor], Tensor]
"""Turns codes, float32 (rows, C), into stored ones."""
Raise = Callable[[Tensor, Tensor, "torch.Generator | None"], tuple[Tensor, Tensor]]
"""Gives for the peaks and the present scales of groups the new scales and the tops; see `_Scales`."""


class _Scales(NamedTuple):
    """The scales of groups, float32 (rows, G), or (1, 1) for all rows.

    Args:
        present, new: the scales before and after the change.
        peak: largest magnitude of a group with a weight beyond its range; 0 for the other groups.
        top: magnitude from which the weights of a raised group are stretched, so that `peak` is stored as the largest code;
            `peak` where they are not. See `kept_scales.requantize_nvfp4`.
    """

    present: Tensor
    new: Tensor
    peak: Tensor
    top: Tensor


def store(
    qdata: Tensor, scale: Tensor, rows: int, read: Read, pack: Pack, codes: Codes, raised: Raise, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Return new stored codes like `qdata`, and the scales.

    Args:
        qdata: the stored weight (R, ...).
        scale: float, one number, or R x G in any shape.
        rows: R.
    """
    whole = scale.numel() == 1
    present = scale.float().reshape(1 if whole else rows, -1)
    generator = make_generator(seed, qdata.device)
    step = max(TILE, _CHUNK // max(1, qdata.shape[1]) // TILE * TILE)
    chunks = [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
    scales = _Scales(present, present, present, present)
    if whole:
        peak = torch.zeros_like(present)
        for chunk in chunks:
            value, change = (part.reshape(1, 1, -1) for part in read(chunk))
            peak = torch.maximum(peak, _peaks(value, change, present, codes))
        scales = _new_scales(peak, present, raised, scale.dtype, generator)
    threshold = _threshold(rows, read, present, codes) if seed else torch.full_like(present.flatten()[0], NEAREST)
    out = torch.empty_like(qdata, memory_format=torch.contiguous_format)
    new: list[Tensor] = []
    for chunk in chunks:
        value, change = (part.reshape(len(part), present.shape[1], -1) for part in read(chunk))
        if not whole:
            peak = _peaks(value, change, present[chunk], codes)
            scales = _new_scales(peak, present[chunk], raised, scale.dtype, generator)
            new.append(scales.new)
        out[chunk] = pack(_codes(value, change, scales, codes, threshold).flatten(1))
    return out, (scales.new if whole else torch.cat(new)).to(scale.dtype).reshape(scale.shape)


def doubled(peak: Tensor, scale: Tensor, high: float) -> Tensor:
    """Return `scale` times the smallest power of two with which the code of `peak` is at most `high`.

    A scale of 0 becomes that power.
    """
    base = torch.where(scale == 0, 1.0, scale)
    return base * power_of_two(ceil_log2(peak / (high * base)))


def _peaks(value: Tensor, change: Tensor, scale: Tensor, codes: Codes) -> Tensor:
    """Return the largest magnitude of each group with a weight beyond the range of its scale, and 0 for the other groups.

    Args:
        value: present codes, float32 (rows, G, W).
        change: of the weights, float32 (rows, G, W).
        scale: float32 (rows, G).

    Returns:
        float32 (rows, G).
    """
    scale = scale.unsqueeze(-1)
    target = value + change / torch.where(scale == 0, 1.0, scale)
    beyond = (target > codes.high + codes.slack) | (target < codes.low - codes.slack) | (scale == 0)
    # A weight that does not change fits, even with a code that the quantiser never emits.
    beyond &= change != 0
    return torch.where(beyond.any(-1), (value * scale + change).abs_().amax(-1), 0.0)


def _new_scales(
    peak: Tensor, present: Tensor, raised: Raise, dtype: torch.dtype, generator: torch.Generator | None
) -> _Scales:
    """Return the scales of groups; the new ones are numbers that `dtype` can store."""
    new, top = raised(peak, present, generator)
    return _Scales(present, torch.where(peak > 0, new.to(dtype).float(), present), peak, top)


def _threshold(rows: int, read: Read, present: Tensor, codes: Codes) -> Tensor:
    """Return the threshold, float32 (), for a weight, found on tiles of rows spread over it."""
    starts = range(0, rows, max(1, -(-rows // TILE // _SAMPLES)) * TILE)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in starts:
        tile = slice(start, min(start + TILE, rows))
        value, change = (part.reshape(len(part), present.shape[1], -1) for part in read(tile))
        scale = (present if len(present) == 1 else present[tile]).unsqueeze(-1).expand_as(value)
        parts.append((value, change, scale))
    value, change, scale = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    target = value + change / torch.where(scale == 0, 1.0, scale)

    def stored(threshold: Tensor) -> Tensor:
        return (codes.rounded(target, upwards(change, threshold)) - value) * scale

    return change_threshold(stored, change)


def _codes(value: Tensor, change: Tensor, scales: _Scales, codes: Codes, threshold: Tensor) -> Tensor:
    """Return the codes, float32 (rows, G, W), of weights that have the codes `value` and change by `change`."""
    scale = scales.present.unsqueeze(-1)
    # The code is not computed from the weight: that is exact only up to the last bits of float32.
    target = value + change / torch.where(scale == 0, 1.0, scale)
    out = torch.where((change == 0) | (scale == 0), value, codes.rounded(target, upwards(change, threshold)))
    raised = (scales.new != scales.present).expand(value.shape[:2])
    if raised.any():
        present, new, peak, top = (t.expand(value.shape[:2])[raised].unsqueeze(-1) for t in scales)
        weights = value[raised] * present + change[raised]
        size = weights.abs()
        stretched = top + (size - top) * ((new * codes.high - top) / (peak - top))
        target = torch.where(size > top, stretched, size).copysign(weights) / new
        # On another grid every weight lies between two numbers; only the change must not pull them all one way.
        out[raised] = codes.rounded(target, upwards(change[raised], threshold) if codes.doubles else NEAREST)
    return out
