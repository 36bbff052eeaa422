"""What the cache remembers of one condition of one sampling run.

Symbols: B batch, S tokens, N image tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .buffers import Stored, store
from .config import CacheConfig
from .forecast import Corrector, TaylorSeer


def relative_l1(value: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return mean|value - reference| / mean|reference|, a scalar fp32 tensor on the device (cache-dit's metric)."""
    reference = reference.float()
    return (value.float() - reference).abs().mean() / reference.abs().mean()


class Branch:
    """Cache of one condition: the forecast, its measured error, and the repair."""

    def __init__(self, config: CacheConfig) -> None:
        self.forecast = TaylorSeer(config.order, config.cache_dtype if config.fn_compute_blocks else "auto")
        self.corrector = Corrector() if config.forecast == "corrected" else None
        self.first_residual: torch.Tensor | None = None
        self._order = config.order
        self._error: torch.Tensor | None = None
        self._error_gap = 1.0
        self._shape: torch.Size | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        first = 0 if self.first_residual is None else self.first_residual.nbytes
        return self.forecast.nbytes + first + (0 if self.corrector is None else self.corrector.nbytes)

    def fits(self, shape: torch.Size) -> bool:
        """True when something of this shape is cached."""
        return self._shape == shape

    def computed(self, position: float, value: torch.Tensor, measure: bool) -> None:
        """Take the computed value of a step; with `measure`, compare it with what would have been forecast."""
        if measure and self._shape == value.shape and position > self.forecast.position:
            self._error = relative_l1(self.forecast.predict(position), value)
            self._error_gap = position - self.forecast.position
        self._shape = value.shape
        self.forecast.update(position, value)

    def expected_difference(self, error: float, position: float) -> float:
        """Scale a measured forecast error to the gap at `position`: a forecast of order n errs with gap ** (n + 1)."""
        return error * ((position - self.forecast.position) / self._error_gap) ** (self._order + 1)

    @property
    def error(self) -> torch.Tensor | None:
        """Relative L1 error of the forecast at the last computed step, on the device; None before there is one."""
        return self._error


class AttentionReuse:
    """Answers a block's attention from the last computed step at which attention ran.

    One object serves one model call layout (the same conditions in the same order).
    """

    def __init__(self, cache_dtype: str) -> None:
        self._cache_dtype = cache_dtype
        self._outputs: dict[int, Stored] = {}
        self.reuse = False
        self.age = 0  # computed steps since attention ran; 0 again when it is due

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return sum(stored.nbytes for stored in self._outputs.values())

    def __call__(self, block: int, attention: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return (B, S, D), see `AttentionHook`."""
        if self.reuse and block in self._outputs:
            return self._outputs[block].load()
        out = attention()
        self._outputs[block] = store(out, self._cache_dtype)
        return out
