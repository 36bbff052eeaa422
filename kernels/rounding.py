"""Stochastic and nearest rounding of float32 to whole numbers and to the grids of small floats.

Stochastic rounding goes to one of the two neighbours with a probability proportional to the nearness, so that its expected
value is the number itself (Croci et al., "Stochastic rounding: implementation, error analysis and applications", 2022).
A number on the grid stays, whatever the random numbers are.
"""

from __future__ import annotations

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


def make_generator(seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return a generator on `device` for a seed above 0; None, which means rounding to nearest, for 0 and None."""
    return torch.Generator(device).manual_seed(seed) if seed else None


def round_integer(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Round to whole numbers.

    Args:
        x: float32, any shape.
        generator: rounds stochastically; None: to nearest, halves to even.

    Returns:
        float32 of the shape of `x`.
    """
    if generator is None:
        return x.round()
    return torch.rand(x.shape, generator=generator, device=x.device).add_(x).floor_()


def round_small_float(x: Tensor, grid: SmallFloat, generator: torch.Generator | None) -> Tensor:
    """Round to numbers of a small float format; beyond its range, to its largest number.

    The step of the grid at `x` is 2^(e - mantissa_bits), with e the exponent of `x`, or of the smallest normal number if
    that is larger. In units of the step the neighbours of `x` are whole numbers, also where one lies in the next binade.

    Args:
        x: float32, any shape.
        grid: the format.
        generator: rounds stochastically; None: to nearest, halves to even.

    Returns:
        float32 of the shape of `x`, exactly representable in the format.
    """
    exponent = (x.abs().view(torch.int32) >> _MANTISSA_BITS) - _BIAS
    step = power_of_two(exponent.clamp_(min=grid.min_exponent) - grid.mantissa_bits)
    # Dividing and multiplying by a power of two changes no bit of the mantissa.
    return round_integer(x / step, generator).mul_(step).clamp_(-grid.maximum, grid.maximum)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32, for int32 exponents; those beyond the normal range -126 to 127 are cut to it."""
    return ((exponent.clamp(1 - _BIAS, _BIAS) + _BIAS) << _MANTISSA_BITS).view(torch.float32)


def ceil_log2(x: Tensor) -> Tensor:
    """Return the smallest whole numbers n with x <= 2^n, as int32, for positive normal float32 numbers."""
    bits = x.view(torch.int32)
    # Unlike torch.log2, the bits are exact at powers of two.
    return (bits >> _MANTISSA_BITS) - _BIAS + (bits & ((1 << _MANTISSA_BITS) - 1) != 0).int()
