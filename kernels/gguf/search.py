"""The search for the scale of a sub-block: try some, round, fit the scale to the codes, keep the least weighted error."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0 or so small that the quotient is no finite number."""
    quotient = a / b
    return torch.where(quotient.isfinite(), quotient, 0.0)


def symmetric_scale(x: Tensor, levels: Callable[[Tensor], Tensor], peaks: Iterable[float]) -> Tensor:
    """Find scales so that `scale * levels(x / scale)` is near `x`, as llama.cpp's `make_qx_quants` does.

    The error of a weight counts with its square. For a given set of levels, the best scale is the weighted least-squares fit.

    Args:
        x: float32 (M, n), a sub-block per row.
        levels: rounds to the levels that the type has.
        peaks: levels to which the weight of largest magnitude is mapped, one try each.

    Returns:
        float32 (M, 1); 0 for a row of zeros. A scale may be negative.
    """
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    # Relative to the peak, squares neither overflow nor vanish.
    u = ratio(x, peak)
    weight = u.square()
    scale = best = torch.zeros_like(peak)
    for level in peaks:
        q = levels(u * level)
        weighted = weight * q
        cross = (weighted * u).sum(1, keepdim=True)
        norm = (weighted * q).sum(1, keepdim=True)
        gain = ratio(cross.square(), norm)  # by how much the fit lowers the error below that of all zeros
        scale = torch.where(gain > best, ratio(cross, norm), scale)
        best = torch.maximum(gain, best)
    return scale * peak


def affine_scale(x: Tensor, weight: Tensor, top: int, factors: Iterable[float]) -> tuple[Tensor, Tensor]:
    """Find scales and minima so that `scale * code + minimum` is near `x`, as llama.cpp's `make_qkx2_quants` does.

    Args:
        x: float32 (M, n), a sub-block per row.
        weight: float32 (M, n), the weight of each squared error.
        top: the largest code; the smallest is 0.
        factors: codes to which the largest weight is mapped (the smallest to 0), one try each.

    Returns:
        scale >= 0 and minimum <= 0 (the type stores its negative without a sign), float32 (M, 1).
    """
    low = x.amin(1, keepdim=True).clamp(max=0)
    span = x.amax(1, keepdim=True) - low
    u = ratio(x - low, span)
    most = ratio(-low, span)  # the minimum in units of the span above `low` may not exceed this, or it were positive
    sum_w = weight.sum(1, keepdim=True)
    sum_u = (weight * u).sum(1, keepdim=True)
    scale, minimum = torch.full_like(low, 1 / top), torch.zeros_like(low)
    best = (weight * ((u * top).round() / top - u).square()).sum(1, keepdim=True)
    for factor in factors:
        q = (u * factor).round().clamp(0, top)
        weighted = weight * q
        sum_q = weighted.sum(1, keepdim=True)
        sum_qq = (weighted * q).sum(1, keepdim=True)
        sum_qu = (weighted * u).sum(1, keepdim=True)
        determinant = sum_w * sum_qq - sum_q.square()
        b = ratio(sum_qq * sum_u - sum_q * sum_qu, determinant)
        a = ratio(sum_w * sum_qu - sum_u * sum_q, determinant)
        above = b > most
        b = torch.where(above, most, b)
        a = torch.where(above, ratio(sum_qu - most * sum_q, sum_qq), a)
        error = (weight * (a * q + b - u).square()).sum(1, keepdim=True)
        better = (error < best) & (determinant > 0) & (a > 0)
        scale, minimum = torch.where(better, a, scale), torch.where(better, b, minimum)
        best = torch.where(better, error, best)
    return scale * span, low + minimum * span
