"""ErnieFastCache: MODEL -> MODEL that skips steps. ErnieFastCacheReport: what the last run did."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from comfy_api.latest import io

from .attach import attach_cache, cache_of
from .config import CACHE_DTYPES, FORECASTS, MASK_POLICIES, PRESETS, CacheConfig
from .mask import MASKS

CUSTOM = "custom"
CATEGORY = "model/patches/ernie"
_DEFAULT = CacheConfig()
_ONLY_CUSTOM = " Used with preset custom."


def _integer(name: str, lowest: int, highest: int, tooltip: str) -> io.Int.Input:
    default = getattr(_DEFAULT, name)
    return io.Int.Input(
        name, default=default, min=lowest, max=highest, optional=True, advanced=True, tooltip=tooltip + _ONLY_CUSTOM
    )


def _number(name: str, lowest: float, step: float, tooltip: str) -> io.Float.Input:
    default = getattr(_DEFAULT, name)
    return io.Float.Input(
        name, default=default, min=lowest, max=100.0, step=step, optional=True, advanced=True, tooltip=tooltip + _ONLY_CUSTOM
    )


def _choice(name: str, options: tuple[str, ...], tooltip: str) -> io.Combo.Input:
    default = getattr(_DEFAULT, name)
    return io.Combo.Input(
        name, options=list(options), default=default, optional=True, advanced=True, tooltip=tooltip + _ONLY_CUSTOM
    )


def _custom_inputs() -> list[Any]:
    """Return the inputs for the fields of CacheConfig, in its order."""
    return [
        _integer("fn_compute_blocks", 0, 1000, "First blocks that run at every step; the cache decides by what they change. 0: "
                 "the whole output is forecast, and a cached step runs no block. 1 with forecast none is FBCache."),
        _integer("bn_compute_blocks", 0, 1000, "Last blocks that run at every step. Needs fn_compute_blocks."),
        _number("residual_diff_threshold", 0.0, 0.01, "A step is cached while its expected relative difference is below this. "
                "0 computes every step."),
        _integer("max_warmup_steps", 0, 10_000, "Steps at the start that are computed."),
        _integer("warmup_interval", 1, 10_000, "During the warm-up, compute every n-th step only."),
        _integer("max_cached_steps", -1, 10_000, "Most cached steps in a run; -1: no limit."),
        _integer("max_continuous_cached_steps", -1, 10_000, "Most cached steps in a row; -1: no limit."),
        _number("max_accumulated_residual_diff_threshold", -1.0, 0.01, "Most difference in a row of cached steps, added up; -1: "
                "no limit."),
        _choice("forecast", FORECASTS, "none repeats the last computed value; taylorseer extrapolates; corrected extrapolates and "
                "repairs the picture when the next step is computed."),
        _integer("forecast_order", 1, 3, "Order of the extrapolation."),
        io.String.Input(
            "steps_computation_mask", default="", optional=True, advanced=True,
            tooltip=f"Steps that must be computed: {', '.join(MASKS)}, or a list like 1,1,1,0,0,1. Empty: no mask." + _ONLY_CUSTOM,
        ),
        _choice("steps_computation_policy", MASK_POLICIES, "What a 0 in the mask means: dynamic may cache the step, static must."),
        io.Boolean.Input(
            "enable_separate_cfg", default=_DEFAULT.enable_separate_cfg, optional=True, advanced=True,
            tooltip="Decide for prompt and negative prompt apart. Off: one decision for both, which keeps guidance consistent."
            + _ONLY_CUSTOM,
        ),
        _integer("attention_reuse", 1, 100, "Compute attention at every n-th computed step only and reuse its output between. 1: "
                 "always compute. Loses quality and takes memory; see the help page."),
        _choice("cache_dtype", CACHE_DTYPES, "How block residuals and attention outputs are kept; auto: as computed. fp8 and int8 "
                "take half the memory of bf16."),
    ]  # fmt: skip


class ErnieFastCache(io.ComfyNode):
    """Skips steps of an ERNIE-Image sampling run by forecasting them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node to ComfyUI."""
        return io.Schema(
            node_id="ErnieFastCache",
            display_name="ERNIE Cache",
            category=CATEGORY,
            description=(
                "Makes sampling faster by computing only some of the steps: the others are forecast, and each forecast is repaired "
                "once the next step is computed. Works with any sampler and step count; the first and last steps are always computed."
            ),
            search_aliases=["ernie cache", "cache", "dbcache", "fbcache", "first block cache", "teacache", "easycache",
                            "taylorseer", "speed up", "skip steps", "scm"],
            inputs=[
                io.Model.Input("model", tooltip="An ERNIE-Image model, from any loader."),
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="At 50 steps: safe about 1.8 times less work, balanced 2.5, fast 2.9, ultra 3.5. turbo is for ERNIE-Image-"
                    "Turbo with 8 steps. off leaves the model as it is. custom uses the settings below.",
                ),
                *_custom_inputs(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model with the cache, for any sampler.")],
        )

    @classmethod
    def validate_inputs(cls, preset: str | None = None, **settings: Any) -> bool | str:
        """Check the settings before the run. Returns True or the message that the run would raise."""
        try:
            _config(preset or "off", settings)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, model: Any, preset: str, **settings: Any) -> io.NodeOutput:
        """Attach the cache. Raises ValueError with one sentence for the user."""
        config = _config(preset, settings)
        return io.NodeOutput(model if config is None else attach_cache(model, config))


def _config(preset: str, settings: dict[str, Any]) -> CacheConfig | None:
    """Return the configuration of the node's inputs; None for off. Linked inputs arrive as None before the run."""
    if preset in PRESETS:
        return PRESETS[preset]
    if preset != CUSTOM:
        raise ValueError(f"preset is '{preset}'; {', '.join(PRESETS)}, {CUSTOM} are allowed. Choose one of them.")
    names = {field.name for field in fields(CacheConfig)}
    return CacheConfig(**{name: value for name, value in settings.items() if name in names and value is not None})


class ErnieFastCacheReport(io.ComfyNode):
    """Shows what the cache did in the run that made a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describe the node to ComfyUI."""
        return io.Schema(
            node_id="ErnieFastCacheReport",
            display_name="ERNIE Cache Report",
            category=CATEGORY,
            description="Says how many steps the ERNIE cache computed and skipped in the last run, what that saved, and the memory it held.",
            search_aliases=["ernie cache report", "cache summary", "skipped steps", "speed-up"],
            inputs=[
                io.Model.Input("model", tooltip="The model that came out of ERNIE Cache."),
                io.Latent.Input("samples", tooltip="The sampler's result. It passes through, so that the report is read after the run."),
            ],
            outputs=[
                io.Latent.Output(display_name="samples", tooltip="The latent, unchanged."),
                io.String.Output(display_name="report", tooltip="Computed and skipped steps, speed-up, memory, settings."),
            ],
        )

    @classmethod
    def execute(cls, model: Any, samples: Any) -> io.NodeOutput:
        """Return the latent and the report."""
        cache = cache_of(model)
        if cache is None:
            return io.NodeOutput(samples, "cache: this model has none (preset off, or no ERNIE Cache node before it)")
        if cache.report is None:
            return io.NodeOutput(samples, "cache: no run yet with this model, or another cache was active")
        return io.NodeOutput(samples, cache.report.text())
