"""The cache at work in one sampling run: ComfyUI's wrappers around the sampler, one evaluation, and one model call.

One evaluation is one call of the sampler for a prediction; it makes one or more model calls (cond and uncond together or
apart, and more with guidance nodes). The decision is made once per evaluation, at its first model call, which has the cond in it:
ComfyUI runs it first. The host waits for the device once per evaluation, to read the sigma and the difference together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model.blocks import ATTENTION_HOOK, BLOCK_HOOK, Blocks
from .config import CacheConfig
from .policy import CachePolicy, position_of
from .report import CacheReport
from .state import AttentionReuse, Branch, relative_l1

# Rounding stays below 1e-4 of a step; the step of any other sampler differs by more than 5e-2.
_EULER_MISS = 1e-2

Key = tuple[Any, int]  # (uuid of the condition, how often it was evaluated before in this evaluation)


class CacheRun:
    """State of one sampling run. `sigmas` are the run's falling sigmas; `blocks` the number of the model's blocks."""

    def __init__(self, config: CacheConfig, sigmas: Sequence[float], blocks: int) -> None:
        self.config = config
        self.report = CacheReport(config.describe())
        self._sigmas = sigmas
        self._blocks = blocks
        self._policy = CachePolicy(config, len(sigmas) - 1)
        self._separate: dict[Key, CachePolicy] = {}
        self.branches: dict[Key, Branch] = {}
        self._attention: dict[tuple[Key, ...], AttentionReuse] = {}
        self._seen: set[Key] = set()
        self._euler = config.forecast == "corrected"
        self._before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.euler_miss: torch.Tensor | None = None
        self._sigma = float("inf")
        self.position = -1.0
        self._computed: bool | None = None
        self.fresh = True

    def evaluate(self, predict: Callable[[], torch.Tensor], x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Run one evaluation (PREDICT_NOISE): x (B, C, height, width), sigma (B,) -> the guided denoised latent."""
        # A condition that the evaluation before did not use is stale: guidance was off, or its time range ended.
        for keyed in (self.branches, self._separate):
            for key in set(keyed) - self._seen:
                del keyed[key]
        for keys in [keys for keys in self._attention if not self._seen.issuperset(keys)]:
            del self._attention[keys]
        self._seen, self._computed, self.fresh = set(), None, True
        if self._euler and self._before is not None:
            self.euler_miss = euler_miss(*self._before, x, sigma)
        out = predict()
        self._before = (x, sigma, out) if self._euler else None
        held = sum(branch.nbytes for branch in self.branches.values())
        held += sum(reuse.nbytes for reuse in self._attention.values())
        self.report.peak_bytes = max(self.report.peak_bytes, held)
        return out

    def call(self, model: Callable[[dict[str, Any]], torch.Tensor], x: torch.Tensor, sigma: torch.Tensor,
             options: dict[str, Any]) -> torch.Tensor:  # fmt: skip
        """Run one model call (APPLY_MODEL).

        Args:
            model: runs the call with the given transformer options and returns the denoised latent.
            x: (B, C, height, width), the conditions of the call one after another.
            sigma: (B,).
            options: the call's transformer options.
        """
        keys = self._keys(options)
        self.report.blocks_total += self._blocks
        call = _Call(self, keys, options.get("cond_or_uncond", []), sigma)
        options = {**options, **self._attention_hook(call)}
        if self.config.fn_compute_blocks:
            out = model({**options, BLOCK_HOOK: call.run_blocks})
            if not call.decided:  # something inside answered without running the blocks
                return out
        else:
            call.decide(x.shape, None)
            if not call.computed:
                pieces = [self.branches[key].forecast.predict(self.position) for key in keys]
                return self._repair(call, torch.cat(pieces))
            out = model(options)
            self.report.blocks_run += self._blocks
            for key, piece in zip(keys, out.chunk(len(keys)), strict=True):
                self.branch(key).computed(self.position, piece, measure=True)
        return self._repair(call, out)

    def free(self) -> None:
        """Drop every tensor."""
        self.branches.clear()
        self._attention.clear()
        self._before = None

    def branch(self, key: Key) -> Branch:
        """Return the branch of a condition, new where there is none."""
        return self.branches.setdefault(key, Branch(self.config))

    @property
    def settled(self) -> bool:
        """True when an earlier call of this evaluation decided for all."""
        return self._computed is not None and not self.config.enable_separate_cfg

    def _keys(self, options: dict[str, Any]) -> tuple[Key, ...]:
        keys = []
        for uuid in options["uuids"]:
            count = 0
            while (uuid, count) in self._seen:
                count += 1
            keys.append((uuid, count))
            self._seen.add(keys[-1])
        return tuple(keys)

    def enter(self, sigma: float, miss: float) -> None:
        """Place the evaluation by its sigma; `miss` tells whether the sampler's last step was an Euler step."""
        position = position_of(sigma, self._sigmas)
        if sigma > self._sigma:  # the sampler went back: what is cached lies in the future
            self.branches.clear()
            self._separate.clear()
            self._policy = CachePolicy(self.config, len(self._sigmas) - 1)
        # The repair knows what an Euler step did with a forecast, and only that.
        self._euler = self._euler and miss < _EULER_MISS
        self.euler_miss = None
        self._sigma, self.position, self.fresh = sigma, position, False

    def decide(self, keys: tuple[Key, ...], difference: float | None) -> bool:
        """Decide for a call. All calls of an evaluation share the decision unless `enable_separate_cfg`."""
        if not self.config.enable_separate_cfg:
            if self._computed is None:
                self._computed = self._decision(self._policy, difference)
            return self._computed
        policy = self._separate.setdefault(keys[0], CachePolicy(self.config, len(self._sigmas) - 1))
        return self._decision(policy, difference)

    def _decision(self, policy: CachePolicy, difference: float | None) -> bool:
        decisions = self.report.decisions
        known = decisions[-1] if decisions and decisions[-1][0] == self.position else None
        if known and policy is self._policy:
            return known[1] or difference is None
        computed = policy.compute(self.position, difference)
        if known:  # of several decisions the report shows a step as computed when one was
            decisions[-1] = (self.position, known[1] or computed)
        else:
            decisions.append((self.position, computed))
        return computed

    def expected_difference(self, keys: tuple[Key, ...], errors: list[float]) -> float:
        """Return the mean difference that forecasts of these conditions are expected to make at this position."""
        pairs = zip(keys, errors, strict=True)
        expected = [self.branches[key].expected_difference(error, self.position) for key, error in pairs]
        return sum(expected) / len(expected)

    def known(self, keys: tuple[Key, ...]) -> list[Branch]:
        """Return the branches of these conditions that exist."""
        return [self.branches[key] for key in keys if key in self.branches]

    def errors(self, keys: tuple[Key, ...] | None) -> dict[Key, torch.Tensor]:
        """Return the last forecast errors, on the device, of these conditions or of all; only those that have one."""
        found = {key: self.branches[key].error for key in keys or self.branches if key in self.branches}
        return {key: error for key, error in found.items() if error is not None}

    def _attention_hook(self, call: _Call) -> dict[str, Any]:
        """Return the options that make this call's blocks reuse their attention outputs, where it is asked for."""
        every = self.config.attention_reuse
        if every == 1:
            return {}
        reuse = self._attention.setdefault(call.keys, AttentionReuse(self.config.cache_dtype))
        call.attention = reuse
        return {ATTENTION_HOOK: reuse}

    def age_attention(self, call: _Call) -> None:
        """Before the blocks of a computed call: reuse attention unless it is old, or the step must be exact."""
        reuse = call.attention
        if reuse is None:
            return
        exact = self._policy.is_warmup(self.position) or self._policy.is_last(self.position)
        reuse.reuse = not exact and reuse.age > 0
        self.report.attention_reused += reuse.reuse and call.keys[0][1] == 0 and call.first
        reuse.age = (reuse.age + 1) % self.config.attention_reuse if reuse.reuse else 1

    def _repair(self, call: _Call, out: torch.Tensor) -> torch.Tensor:
        """Remember a forecast output, or repair earlier ones with a computed output."""
        if self.config.forecast != "corrected":
            return out
        index = int(self.position)
        sigma, next_sigma = self._sigmas[index], self._sigmas[min(index + 1, len(self._sigmas) - 1)]
        pieces = []
        for key, piece in zip(call.keys, out.chunk(len(call.keys)), strict=True):
            corrector = self.branch(key).corrector
            assert corrector is not None  # the forecast is "corrected"
            if not self._euler:
                corrector.forget_forecasts()
            elif call.computed:
                piece = corrector.correct(self.position, sigma, next_sigma, piece)
            else:
                corrector.forecasted(self.position, sigma, next_sigma, piece)
            pieces.append(piece)
        return torch.cat(pieces)


def euler_miss(
    x: torch.Tensor, sigma: torch.Tensor, denoised: torch.Tensor, next_x: torch.Tensor, next_sigma: torch.Tensor
) -> torch.Tensor:
    """Return how far a sampler's step was from an Euler step, relative to its length: a scalar fp32 tensor on the device."""
    shape = (-1,) + (1,) * (x.dim() - 1)
    expected = x + (next_sigma / sigma - 1.0).reshape(shape) * (x - denoised)
    return ((next_x - expected).abs().mean() / (next_x - x).abs().mean()).float()


class _Call:
    """One model call: its conditions, and what was decided for it."""

    def __init__(self, run: CacheRun, keys: tuple[Key, ...], cond_or_uncond: Sequence[int], sigma: torch.Tensor) -> None:
        self.keys = keys
        self.attention: AttentionReuse | None = None
        self.decided = False
        self.computed = True
        self.first = False
        self._run = run
        self._sigma = sigma
        # The metric looks at the conds alone, so that it is the same whether the unconds share the call or not.
        self._cond_rows = [index for index, kind in enumerate(cond_or_uncond) if kind == 0] or list(range(len(keys)))

    def decide(self, shape: torch.Size, difference: torch.Tensor | None) -> None:
        """Decide, reading the device once: sigma, and the given difference or else the branches' last errors."""
        run = self._run
        rows = shape[0] // len(self.keys)
        piece = torch.Size((rows, *shape[1:]))
        branches = run.known(self.keys)
        complete = len(branches) == len(self.keys) and all(branch.fits(piece) for branch in branches)
        for key in self.keys:
            if key in run.branches and not run.branches[key].fits(piece):
                del run.branches[key]
        self.first = run.fresh
        values = [difference] if difference is not None else []
        keys: tuple[Key, ...] = ()
        if difference is None and not run.config.fn_compute_blocks:
            errors = run.errors(self.keys if run.config.enable_separate_cfg else None)
            keys, values = tuple(errors), list(errors.values())
        if run.fresh:
            sigma_now = self._sigma[0].float()
            miss = torch.zeros_like(sigma_now) if run.euler_miss is None else run.euler_miss
            read = [one.to(sigma_now.device) for one in (sigma_now, miss, *values)]
            sigma, missed, *numbers = torch.stack(read).tolist()
            run.enter(sigma, missed)
        elif run.config.enable_separate_cfg and values:
            numbers = torch.stack(values).tolist()
        else:
            numbers = []
        expected = None
        if complete and numbers:
            expected = numbers[0] if difference is not None else run.expected_difference(keys, numbers)
        self.computed = run.decide(self.keys, expected) or not complete
        self.decided = True
        if self.computed:
            run.age_attention(self)

    def run_blocks(self, blocks: Blocks, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run the first blocks, decide, and run or forecast the middle ones (`BlockHook`)."""
        run, config = self._run, self._run.config
        first, last = config.fn_compute_blocks, len(blocks) - config.bn_compute_blocks
        if self.attention is not None:
            self.attention.reuse = False
        before = hidden_states[:, : blocks.image_tokens]
        hidden_states = blocks.run(hidden_states, 0, first)
        residuals = (hidden_states[:, : blocks.image_tokens] - before).chunk(len(self.keys))
        self.decide(hidden_states.shape, None if run.settled else self._difference(residuals))
        if self.computed:
            out = blocks.run(hidden_states, first, last)
            middle = (out - hidden_states).chunk(len(self.keys))
            for key, residual, value in zip(self.keys, residuals, middle, strict=True):
                branch = run.branch(key)
                # Not smaller: rounding here would look like a difference and cost computed steps.
                branch.first_residual = residual.clone()
                branch.computed(run.position, value.clone(), measure=False)
            run.report.blocks_run += len(blocks)
        else:
            pieces = [run.branch(key).forecast.predict(run.position) for key in self.keys]
            out = hidden_states + torch.cat(pieces)
            run.report.blocks_run += first + config.bn_compute_blocks
        return blocks.run(out, last, len(blocks))

    def _difference(self, residuals: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Relative L1 distance of the conds' first residuals to those of their last computed step."""
        branches = [self._run.branches.get(self.keys[row]) for row in self._cond_rows]
        kept = [branch.first_residual for branch in branches if branch is not None and branch.first_residual is not None]
        if len(kept) != len(self._cond_rows) or any(
            one.shape != residuals[row].shape for one, row in zip(kept, self._cond_rows, strict=True)
        ):
            return None
        now = torch.stack([residuals[row] for row in self._cond_rows])
        return relative_l1(now, torch.stack(kept))
