"""What the cache may be told, checked once, and the presets that the bench chose."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from .mask import MASKS, parse_mask

FORECASTS = ("none", "taylorseer", "corrected")
CACHE_DTYPES = ("auto", "bf16", "fp8", "int8")
MASK_POLICIES = ("dynamic", "static")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The settings of one cache. Names and meanings are cache-dit's where it has them.

    `fn_compute_blocks` of 0 forecasts the model's whole output, so that a cached step runs no block; above 0, a cached step runs
    the first Fn and last Bn blocks and forecasts what those between would add. Caps of -1 are off. `attention_reuse` k computes
    attention at every k-th computed step only (1: always).

    Raises: ValueError naming the field, what was found, and what is allowed.
    """

    fn_compute_blocks: int = 0
    bn_compute_blocks: int = 0
    residual_diff_threshold: float = 0.1
    max_warmup_steps: int = 3
    warmup_interval: int = 1
    max_cached_steps: int = -1
    max_continuous_cached_steps: int = 2
    max_accumulated_residual_diff_threshold: float = -1.0
    forecast: str = "corrected"
    forecast_order: int = 1
    steps_computation_mask: str = ""
    steps_computation_policy: str = "dynamic"
    enable_separate_cfg: bool = False
    attention_reuse: int = 1
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, lowest, highest in _RANGES:
            value = getattr(self, name)
            if not lowest <= value <= highest:  # NaN is refused too
                raise ValueError(f"{name} is {value}; {lowest} to {highest} is allowed. Change it in the cache node.")
        for name, allowed in (
            ("forecast", FORECASTS), ("cache_dtype", CACHE_DTYPES), ("steps_computation_policy", MASK_POLICIES),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is '{getattr(self, name)}'; {', '.join(allowed)} are allowed. Choose one of them.")
        if self.bn_compute_blocks and not self.fn_compute_blocks:
            raise ValueError(
                f"bn_compute_blocks is {self.bn_compute_blocks} and fn_compute_blocks 0; with 0 first blocks no block runs at a "
                "cached step. Set fn_compute_blocks to 1 or more, or bn_compute_blocks to 0."
            )
        if self.steps_computation_mask not in MASKS:
            parse_mask(self.steps_computation_mask)

    @property
    def order(self) -> int:
        """Order of the forecast: 0 repeats the last value."""
        return 0 if self.forecast == "none" else self.forecast_order

    def describe(self) -> str:
        """Return the settings that differ from the defaults, in one line."""
        default = CacheConfig()
        changed = (f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name))
        return f"Fn {self.fn_compute_blocks}, forecast {self.forecast}" + "".join(
            f", {name} {getattr(self, name)}" for name in changed if name not in ("fn_compute_blocks", "forecast")
        )


_RANGES: tuple[tuple[str, Any, Any], ...] = (
    ("fn_compute_blocks", 0, 1000), ("bn_compute_blocks", 0, 1000), ("residual_diff_threshold", 0.0, 100.0),
    ("max_warmup_steps", 0, 10_000), ("warmup_interval", 1, 10_000), ("max_cached_steps", -1, 10_000),
    ("max_continuous_cached_steps", -1, 10_000), ("max_accumulated_residual_diff_threshold", -1.0, 1e6),
    ("forecast_order", 1, 3), ("attention_reuse", 1, 100),
)  # fmt: skip

_BALANCED = CacheConfig()

# Chosen with bench/quality.py; the numbers are in docs/cache.md.
PRESETS = MappingProxyType(
    {
        "off": None,
        "safe": replace(_BALANCED, max_continuous_cached_steps=1),
        "balanced": _BALANCED,
        "fast": replace(_BALANCED, max_continuous_cached_steps=3),
        "ultra": replace(_BALANCED, residual_diff_threshold=0.12, max_continuous_cached_steps=5),
        "turbo": replace(_BALANCED, max_warmup_steps=2, max_continuous_cached_steps=1),
    }
)
