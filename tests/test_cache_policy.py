"""The cache's decisions, masks, forecasts and buffers: plain code on small numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ernie_fast.nodes.cache.buffers import store
from ernie_fast.nodes.cache.config import PRESETS, CacheConfig
from ernie_fast.nodes.cache.forecast import Corrector, TaylorSeer, interpolate
from ernie_fast.nodes.cache.mask import MASKS, parse_mask, steps_mask
from ernie_fast.nodes.cache.policy import CachePolicy, position_of

# cache-dit's own settings, nothing capped.
PLAIN = CacheConfig(residual_diff_threshold=0.1, max_warmup_steps=2, max_continuous_cached_steps=-1, forecast="none")


def strip(config, differences, steps=None):
    """Decide for positions 0, 1, ...; "#" computed, "." cached."""
    policy = CachePolicy(config, steps or len(differences))
    return "".join("#" if policy.compute(float(at), one) else "." for at, one in enumerate(differences))


@pytest.mark.parametrize(
    ("changes", "differences", "expected"),
    [
        ({}, [None, 0.01, 0.01, 0.01, 0.2, 0.01, 0.01], "##..#.#"),
        ({"residual_diff_threshold": 0.0}, [0.0] * 5, "#####"),
        ({"max_warmup_steps": 0}, [None, 0.01, 0.01, 0.01], "#..#"),
        ({"max_warmup_steps": 4, "warmup_interval": 2}, [0.0] * 7, "#.#...#"),
        ({"max_cached_steps": 2}, [0.0] * 8, "##..####"),
        ({"max_continuous_cached_steps": 2}, [0.0] * 10, "##..#..#.#"),
        ({"max_continuous_cached_steps": 0}, [0.0] * 4, "####"),
        ({"max_accumulated_residual_diff_threshold": 0.1}, [0.04] * 9, "##..#..##"),
        ({"steps_computation_mask": "1,1,1,0,0,1,0"}, [0.0] * 8, "###..#.#"),
        ({"steps_computation_mask": "1100010"}, [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0], "###..##"),
        ({"steps_computation_mask": "1100010", "steps_computation_policy": "static"}, [0.5] * 7, "##...##"),
        ({}, [float("nan")] * 4, "####"),
        ({}, [None] * 4, "####"),
    ],
    ids=str,
)
def test_decisions(changes, differences, expected):
    assert strip(replace(PLAIN, **changes), differences) == expected


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 20, 50])
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "off"])
def test_presets_compute_the_first_and_the_last_step(preset, steps):  # U72
    decisions = strip(PRESETS[preset], [0.0] * steps)
    assert decisions[0] == decisions[-1] == "#"
    longest = PRESETS[preset].max_continuous_cached_steps
    assert "." * (longest + 1) not in decisions


def test_positions_between_sigmas_are_fractions_of_a_step():  # U62, U75, U77
    sigmas = [0.68, 0.5, 0.3, 0.1, 0.0]
    assert [position_of(s, sigmas) for s in sigmas] == [0, 1, 2, 3, 4]
    assert position_of(0.4, sigmas) == pytest.approx(1.5)
    assert position_of(1.0, sigmas) == 0
    assert position_of(-0.1, sigmas) == 4
    assert position_of(float(torch.tensor(0.3)), sigmas) == 2  # fp32 rounding


def test_cap_counts_steps_and_not_the_samplers_calls():  # U75
    policy = CachePolicy(replace(PLAIN, max_warmup_steps=1, max_continuous_cached_steps=1), 6)
    positions = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0]
    # Warm-up covers 0 and 0.5; then what lies within one step of the last computed position is cached.
    assert [policy.compute(at, 0.0) for at in positions] == [True, True, False, False, True, False, False, True]


@pytest.mark.parametrize(("mask", "counts"), [(name, dict(points)) for name, points in MASKS.items()])
def test_masks_compute_as_many_steps_as_documented(mask, counts):
    for steps, count in counts.items():
        flags = steps_mask(mask, steps)
        assert flags is not None
        assert (len(flags), sum(flags)) == (steps, count)
        assert flags[0]
        assert flags[-1]
    for steps in range(1, 120):
        flags = steps_mask(mask, steps)
        assert flags is not None
        assert len(flags) == steps
        assert flags[0]
        assert flags[-1]


def test_explicit_mask_computes_the_steps_after_its_end_and_the_last():
    assert steps_mask("0 1,0", 5) == (False, True, False, True, True)
    assert steps_mask("00000000", 3) == (False, False, True)
    assert steps_mask("", 3) is None
    assert parse_mask("1, 0\n1") == (True, False, True)
    with pytest.raises(ValueError, match="holds '2'"):
        parse_mask("1,2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fn_compute_blocks": -1}, "fn_compute_blocks is -1; 0 to 1000"),
        ({"residual_diff_threshold": math.nan}, "residual_diff_threshold is nan"),
        ({"warmup_interval": 0}, "warmup_interval is 0; 1 to"),
        ({"forecast": "magic"}, "forecast is 'magic'; none, taylorseer, corrected"),
        ({"forecast_order": 4}, "forecast_order is 4; 1 to 3"),
        ({"cache_dtype": "int4"}, "cache_dtype is 'int4'"),
        ({"steps_computation_policy": "x"}, "steps_computation_policy is 'x'"),
        ({"steps_computation_mask": "fastest"}, "holds 'f'"),
        ({"bn_compute_blocks": 1}, "fn_compute_blocks 0"),
        ({"attention_reuse": 0}, "attention_reuse is 0"),
    ],
    ids=str,
)
def test_bad_settings_are_named_with_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**settings)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_taylorseer_forecasts_by_backward_differences(order):
    """The series as published, computed by hand for computed values at 0, 1, 3, 4 and a forecast at 6."""
    values = {0.0: 2.0, 1.0: 3.0, 3.0: -1.0, 4.0: 5.0}
    forecast = TaylorSeer(order)
    for at, value in values.items():
        forecast.update(at, torch.full((2, 3), value, dtype=torch.float64))
    d1 = {1.0: 1.0, 3.0: -2.0, 4.0: 6.0}
    d2 = {3.0: -3.0 / 2, 4.0: 8.0}
    d3 = {4.0: 9.5}
    series = [5.0, 6.0 * 2, d2[4.0] * 4 / 2, d3[4.0] * 8 / 6]
    assert d1[4.0] == 6.0
    torch.testing.assert_close(forecast.predict(6.0), torch.full((2, 3), sum(series[: order + 1]), dtype=torch.float64))


def test_taylorseer_starts_with_what_it_has_and_a_second_value_replaces_the_first():
    forecast = TaylorSeer(3)
    forecast.update(0.0, torch.tensor([1.0]))
    assert forecast.predict(5.0) == 1.0
    forecast.update(1.0, torch.tensor([2.0]))
    assert forecast.predict(2.0) == 3.0
    forecast.update(1.0, torch.tensor([4.0]))
    assert forecast.predict(1.0) == 4.0


def test_interpolation_goes_through_its_points_and_is_exact_for_a_parabola():
    positions = [0.0, 1.0, 4.0]
    values = [torch.tensor([3 * at * at - at + 2], dtype=torch.float64) for at in positions]
    for at in (0.0, 1.0, 2.5, 4.0, 6.0):
        assert interpolate(positions, values, at) == pytest.approx(3 * at * at - at + 2)


def test_repair_moves_the_picture_to_where_computed_steps_would_have_brought_it():
    """Euler steps with a denoised output quadratic in the step: the repair is exactly what the forecasts missed."""
    sigmas = [1.0, 0.9, 0.75, 0.6, 0.5, 0.35, 0.2, 0.1, 0.0]
    outputs = [torch.tensor([0.3 * at * at - at + 2], dtype=torch.float64) for at in range(8)]

    def euler(x: torch.Tensor, denoised: torch.Tensor, i: int) -> torch.Tensor:
        return x + (sigmas[i + 1] - sigmas[i]) * (x - denoised) / sigmas[i]

    exact = cached = torch.tensor([1.5], dtype=torch.float64)
    forecast, corrector = TaylorSeer(1), Corrector()
    for i in range(5):
        exact = euler(exact, outputs[i], i)
        if i < 3:
            forecast.update(float(i), outputs[i])
            assert corrector.correct(float(i), sigmas[i], sigmas[i + 1], outputs[i]) is outputs[i]
            cached = euler(cached, outputs[i], i)
        else:
            guess = forecast.predict(float(i))
            corrector.forecasted(float(i), sigmas[i], sigmas[i + 1], guess)
            cached = euler(cached, guess, i)
    missed = exact - cached
    assert abs(missed) > 0.05
    repaired = euler(cached, corrector.correct(5.0, sigmas[5], sigmas[6], outputs[5]), 5)
    torch.testing.assert_close(repaired - euler(cached, outputs[5], 5), missed)
    assert corrector.correct(6.0, sigmas[6], sigmas[7], outputs[6]) is outputs[6], "repaired twice"


@pytest.mark.parametrize(("cache_dtype", "sqnr_db", "bytes_per_number"), [("auto", 300, 4), ("bf16", 45, 2), ("fp8", 28, 1), ("int8", 38, 1)])
def test_buffers_keep_what_their_type_can(cache_dtype, sqnr_db, bytes_per_number):
    tensor = torch.randn(2, 64, 256) * torch.logspace(-3, 3, 64).view(1, 64, 1)
    stored = store(tensor, cache_dtype)
    noise = (stored.load() - tensor).norm()
    found = 300 if noise == 0 else 20 * math.log10(float(tensor.norm() / noise))
    assert found >= sqnr_db
    scales = 4 * 2 * 64 if bytes_per_number == 1 else 0
    assert stored.nbytes == tensor.numel() * bytes_per_number + scales
    assert stored.load().dtype == tensor.dtype


@pytest.mark.parametrize("cache_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_buffers_survive_zeros_and_large_numbers(cache_dtype, dtype):
    tensor = torch.tensor([[0.0, 0.0], [60000.0, -1.0]], dtype=dtype)
    loaded = store(tensor, cache_dtype).load()
    assert loaded.dtype == dtype
    assert torch.isfinite(loaded).all()
    assert loaded[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(loaded[1, 0], tensor[1, 0])
