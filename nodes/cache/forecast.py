"""What stands in for a value that is not computed: a forecast from earlier steps, and its later correction.

Positions are step indices (see `policy.py`). Tensors may have any shape; all calls of one object use the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .buffers import Stored, store


class TaylorSeer:
    """Forecast by a Taylor series of backward differences.

    At a computed step Y: d_0 = Y, d_(i+1) = (d_i - previous d_i) / gap; forecast k steps later: sum of d_i * k**i / i!.
    Source: TaylorSeer (arXiv 2503.06923), with the gap between computed steps as in cache-dit 1.5.3. Order 0 repeats Y.
    """

    def __init__(self, order: int, cache_dtype: str = "auto") -> None:
        self._order = order
        self._cache_dtype = cache_dtype
        self._derivatives: list[Stored] = []
        self.position = -1.0

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return sum(stored.nbytes for stored in self._derivatives)

    def update(self, position: float, value: torch.Tensor) -> None:
        """Take a computed value. A second one at the same position takes the place of the first."""
        gap = position - self.position
        if gap <= 0:
            previous: list[Stored] = []
            derivatives = [value, *(stored.load() for stored in self._derivatives[1:])]
        else:
            previous = self._derivatives
            derivatives = [value]
        for stored in previous[: self._order]:
            derivatives.append((derivatives[-1] - stored.load()) / gap)
        self._derivatives = [store(derivative, self._cache_dtype) for derivative in derivatives]
        self.position = position

    def predict(self, position: float) -> torch.Tensor:
        """Return the forecast at a later position, with as many orders as there are computed values."""
        distance = position - self.position
        out = self._derivatives[0].load()
        for order, stored in enumerate(self._derivatives[1:], 1):
            out = out + stored.load() * (distance**order / math.factorial(order))
        return out


class Corrector:
    """Repair of the steps that were taken with forecasts, once the next computed value is there.

    A forecast looks forward from the last computed values; when the next one arrives, the values between are known much better by
    interpolation. The difference, weighted by what each step did with it, is added to the computed step, as in a
    predictor-corrector method for differential equations (Adams-Bashforth-Moulton; FoCa, arXiv 2508.16211, does it for features).

    With the denoised output D, an Euler step from sigma_j to sigma_(j+1) adds (1 - sigma_(j+1) / sigma_j) * D. An error e_j in D is,
    at sigma_i further on, c = sigma_i * (1 / sigma_(j+1) - 1 / sigma_j) * e_j. The computed step at sigma_i moves the picture by
    the sum of c on top of its own velocity. (Scaling c by sigma_(i+1) / sigma_i, as for a D that does not depend on the picture,
    lost 1 dB on the bench.)
    """

    def __init__(self, order: int = 2) -> None:
        self._points = order + 1
        self._computed: list[tuple[float, torch.Tensor]] = []
        self._forecasts: list[tuple[float, float, float, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return sum(value.nbytes for *_, value in (*self._computed, *self._forecasts))

    def forecasted(self, position: float, sigma: float, next_sigma: float, denoised: torch.Tensor) -> None:
        """Remember the forecast that a step was taken with."""
        self._forecasts.append((position, sigma, next_sigma, denoised))

    def correct(self, position: float, sigma: float, next_sigma: float, denoised: torch.Tensor) -> torch.Tensor:
        """Take a computed value and return it with the repair of the forecasts before it."""
        self._computed = [*self._computed, (position, denoised)][-self._points :]
        forecasts, self._forecasts = self._forecasts, []
        if not forecasts or sigma <= next_sigma:
            return denoised
        repair = torch.zeros_like(denoised)
        positions = [at for at, _ in self._computed]
        values = [value for _, value in self._computed]
        for at, sigma_then, next_then, forecast in forecasts:
            difference = interpolate(positions, values, at) - forecast
            repair += difference * (sigma * (1.0 / next_then - 1.0 / sigma_then))
        return denoised + repair * (sigma / (sigma - next_sigma))

    def forget_forecasts(self) -> None:
        """Drop what was remembered, for a sampler whose steps are not known."""
        self._forecasts = []


def interpolate(positions: Sequence[float], values: Sequence[torch.Tensor], at: float) -> torch.Tensor:
    """Evaluate the polynomial through all points (Lagrange)."""
    out = torch.zeros_like(values[0])
    for i, value in enumerate(values):
        weight = math.prod((at - p) / (positions[i] - p) for j, p in enumerate(positions) if j != i)
        out += value * weight
    return out
