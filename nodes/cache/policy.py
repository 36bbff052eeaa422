"""The decision, as plain code: positions and differences in, "compute" or "cache" out. No tensors, no ComfyUI.

A position is a step's index in the run's own sigmas, counted from 0; a sampler that calls the model between two sigmas gives a
fraction. The order of the tests is cache-dit 1.5.3's: warm-up, mask, caps, accumulated difference, difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from .config import CacheConfig
from .mask import steps_mask

_ON_GRID = 1e-4  # of a step


def position_of(sigma: float, sigmas: Sequence[float]) -> float:
    """Return where sigma stands in the run's falling sigmas: 2.0 at sigmas[2], 2.5 halfway to sigmas[3].

    Values beyond the ends are placed at the ends.
    """
    ascending = [-value for value in sigmas]
    index = bisect_left(ascending, -sigma)
    if index == 0:
        return 0.0
    if index == len(sigmas):
        return float(len(sigmas) - 1)
    high, low = sigmas[index - 1], sigmas[index]
    position = index - 1 + (high - sigma) / (high - low)
    return float(round(position)) if abs(position - round(position)) < _ON_GRID else position


class CachePolicy:
    """Decides for each position of one sampling run; counts what it decided."""

    def __init__(self, config: CacheConfig, steps: int) -> None:
        self.config = config
        self.steps = steps
        self._mask = steps_mask(config.steps_computation_mask, steps)
        self._cached = 0
        self._accumulated = 0.0
        self._last_computed = -1.0

    def compute(self, position: float, difference: float | None) -> bool:
        """Decide and remember.

        Args:
            position: at least that of the call before.
            difference: relative L1 difference that a cached step is expected to make; None when nothing is cached.

        Returns: True when the step must be computed.
        """
        computed = self._must_compute(position, difference)
        if computed:
            self._last_computed, self._accumulated = position, 0.0
        else:
            self._cached += 1
            self._accumulated += difference or 0.0
        return computed

    def is_warmup(self, position: float) -> bool:
        """True while the run is in its warm-up."""
        return position < self.config.max_warmup_steps

    def is_last(self, position: float) -> bool:
        """True at the last sigma that the model is called at, and beyond."""
        return position >= self.steps - 1

    def _must_compute(self, position: float, difference: float | None) -> bool:
        config = self.config
        if difference is None or position <= 0 or self.is_last(position) or config.residual_diff_threshold <= 0:
            return True
        if self.is_warmup(position):
            return int(position) % config.warmup_interval == 0
        if self._mask is not None:
            if self._mask[int(position)]:
                return True
            if config.steps_computation_policy == "static":
                return False
        if 0 <= config.max_cached_steps <= self._cached:
            return True
        longest = config.max_continuous_cached_steps
        if longest >= 0 and position - self._last_computed > longest + _ON_GRID:
            return True
        limit = config.max_accumulated_residual_diff_threshold
        if 0 <= limit < self._accumulated + difference:
            return True
        return not difference < config.residual_diff_threshold  # NaN computes
