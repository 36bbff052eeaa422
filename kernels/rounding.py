"""Rounding of float32 to whole numbers and to the grids of small floats, as often upwards as a change needs.

A weight on the grid that changes by less than half a step falls back to where it was when it is rounded to nearest, and a small change of
all weights is lost. Here a weight moves on when it has gone more than a threshold towards the next number, and the threshold is chosen so
that the stored change, projected on the wanted one, has its length. At 0.5 that is rounding to nearest. Stochastic rounding keeps small
changes too, but with an error up to 1.6 times as large (measured on the tiny checkpoint's weights).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_MANTISSA_BITS = 23  # of float32
_BIAS = 127  # of float32


class SmallFloat(NamedTuple):
    """The grid of a small float format with subnormals.

    Args:
        mantissa_bits: stored bits of the mantissa.
        min_exponent: exponent of the smallest normal number; the subnormals share its step.
        maximum: the largest finite number.
    """

    mantissa_bits: int
    min_exponent: int
    maximum: float


# OCP Microscaling Formats (MX) v1.0, section 5.3.
E2M1 = SmallFloat(1, 0, 6.0)
E4M3 = SmallFloat(3, -6, 448.0)
E5M2 = SmallFloat(2, -14, 57344.0)


NEAREST = 0.5
_BISECTIONS = 12


def make_generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a generator on `device` for a seed above 0; None for 0 and None."""
    return torch.Generator(device).manual_seed(seed) if seed else None


def upwards(change: Tensor, threshold: Tensor | float) -> Tensor:
    """Return what is added to a number before its fraction is cut off, float32 of the shape of `change`.

    Args:
        change: how far each weight moves, in any unit; only the sign counts.
        threshold: share of a step that a weight must go in its direction to arrive at the next number, above 0 and up to 0.5.
    """
    return torch.where(change > 0, 1.0 - threshold, threshold + torch.zeros_like(change))


def change_threshold(stored: Callable[[Tensor], Tensor], change: Tensor) -> Tensor:
    """Return the threshold, float32 (), with which the stored change has the length of the wanted one along it.

    Args:
        stored: gives the change that weights get, like `change`, when they are rounded with a threshold.
        change: the wanted change of weights, float32.
    """
    wanted = change.square().sum()
    # Not 0: a weight that arrives exactly at a number must stay there.
    low, high = wanted.new_full((), 1e-4), wanted.new_full((), NEAREST)

    def along(threshold: Tensor) -> Tensor:
        return (stored(threshold) * change).sum()

    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        more = along(middle) > wanted  # a lower threshold moves more weights
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return torch.where((along(low) - wanted).abs() < (along(high) - wanted).abs(), low, high)


def round_integer(x: Tensor, up: Tensor | float = NEAREST) -> Tensor:
    """Round to whole numbers.

    Args:
        x: float32, any shape.
        up: added before the fraction is cut off; see `upwards`. 0.5 rounds to nearest.

    Returns:
        float32 of the shape of `x`.
    """
    return (x + up).floor_()


def round_small_float(x: Tensor, grid: SmallFloat, up: Tensor | float = NEAREST) -> Tensor:
    """Round to numbers of a small float format; beyond its range, to its largest number.

    The step of the grid at `x` is 2^(e - mantissa_bits), with e the exponent of `x`, or of the smallest normal number if
    that is larger. In units of the step the neighbours of `x` are whole numbers, also where one lies in the next binade.

    Args:
        x: float32, any shape.
        grid: the format.
        up: added, in steps, before the fraction is cut off; see `upwards`.

    Returns:
        float32 of the shape of `x`, exactly representable in the format.
    """
    exponent = (x.abs().view(torch.int32) >> _MANTISSA_BITS) - _BIAS
    step = power_of_two(exponent.clamp_(min=grid.min_exponent) - grid.mantissa_bits)
    # Dividing and multiplying by a power of two changes no bit of the mantissa.
    return round_integer(x / step, up).mul_(step).clamp_(-grid.maximum, grid.maximum)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, for int32 exponents; those beyond the normal range -126 to 127 are cut to it."""
    return ((exponent.clamp(1 - _BIAS, _BIAS) + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def ceil_log2(x: Tensor) -> Tensor:
    """Return the smallest whole numbers n with x <= 2^n, as int32, for positive normal float32 numbers."""
    bits = x.view(torch.int32)
    # Unlike torch.log2, the bits are exact at powers of two.
    return (bits >> _MANTISSA_BITS) - _BIAS + (bits & ((1 << _MANTISSA_BITS) - 1) != 0).int()
