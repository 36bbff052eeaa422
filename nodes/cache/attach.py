"""Put a cache onto a clone of a MODEL. Nothing else of the model is touched; a clone without it has none."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

from comfy.patcher_extension import WrappersMP

from ..model import forward
from .config import CacheConfig
from .report import CacheReport
from .run import CacheRun

logger = logging.getLogger("ernie_fast")

KEY = "ernie_fast_cache"
_RUN = "ernie_fast_cache_run"


class Cache:
    """The cache of a MODEL and its clones: the settings, and the report of the last run."""

    def __init__(self, config: CacheConfig, blocks: int) -> None:
        self.config = config
        self.blocks = blocks
        self.report: CacheReport | None = None


def attach_cache(patcher: Any, config: CacheConfig) -> Any:
    """Return a clone of an ERNIE-Image ModelPatcher that samples with this cache, in place of one that it had.

    Raises: ValueError when the model is another kind, or has too few blocks for the settings.
    """
    blocks = forward.require_ernie(patcher)
    fixed = config.fn_compute_blocks + config.bn_compute_blocks
    if fixed >= blocks:
        raise ValueError(
            f"fn_compute_blocks {config.fn_compute_blocks} + bn_compute_blocks {config.bn_compute_blocks} leave none of the model's "
            f"{blocks} blocks to cache; together they may be at most {blocks - 1}. Lower them."
        )
    clone = patcher.clone()
    if not clone.get_wrappers(WrappersMP.APPLY_MODEL, forward.KEY):
        forward.install(clone)
    wrappers = {
        WrappersMP.OUTER_SAMPLE: _outer_sample, WrappersMP.PREDICT_NOISE: _predict_noise, WrappersMP.APPLY_MODEL: _apply_model,
    }  # fmt: skip
    forward.set_wrappers(clone, KEY, wrappers)
    clone.model_options["transformer_options"][KEY] = Cache(config, blocks)
    return clone


def cache_of(patcher: Any) -> Cache | None:
    """Return the cache of a MODEL, or None."""
    return patcher.model_options.get("transformer_options", {}).get(KEY)


def _outer_sample(executor: Any, noise: Any, latent_image: Any, sampler: Any, sigmas: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a sampling run its state, report what it did, and free it at the run's end, whatever way it ends."""
    guider = executor.class_obj
    options = guider.model_options.get("transformer_options", {})
    cache = options.get(KEY)
    levels = sigmas.tolist()
    obstacle = None if cache is None else _obstacle(options, levels)
    if cache is None or obstacle:
        if obstacle:
            logger.warning("cache: %s, so the ERNIE cache stays off", obstacle)
        return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
    run = CacheRun(cache.config, levels, cache.blocks)
    try:
        with forward.run_state(guider, _RUN, run):
            return executor(noise, latent_image, sampler, sigmas, *args, **kwargs)
    finally:
        run.free()
        cache.report = run.report
        skipped = run.report.computed < len(run.report.decisions)
        logger.log(logging.INFO if skipped or cache.config.residual_diff_threshold == 0 else logging.WARNING, run.report.line())


def _obstacle(options: dict[str, Any], sigmas: list[float]) -> str | None:
    """Return why the cache cannot work in this run, and what to do; None when it can."""
    if "easycache" in options:
        return "EasyCache or LazyCache is on this model too; remove one of them"
    if any(later > earlier for earlier, later in pairwise(sigmas)):
        return "the sigmas of this run rise; only a run from noise to picture can be cached"
    return None


def _predict_noise(executor: Any, x: Any, timestep: Any, model_options: dict[str, Any], seed: Any = None) -> Any:
    run = model_options.get("transformer_options", {}).get(_RUN)
    if run is None:
        return executor(x, timestep, model_options, seed)
    return run.evaluate(lambda: executor(x, timestep, model_options, seed), x, timestep)


def _apply_model(
    executor: Any, x: Any, t: Any, c_concat: Any, c_crossattn: Any, control: Any, transformer_options: dict[str, Any], **kwargs: Any
) -> Any:
    run = transformer_options.get(_RUN)
    if run is None:
        return executor(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)
    return run.call(
        lambda options: executor(x, t, c_concat, c_crossattn, control, options, **kwargs), x, t, transformer_options
    )
