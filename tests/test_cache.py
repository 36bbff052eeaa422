"""ErnieFastCache through ComfyUI's real samplers: what it skips, what it leaves alone, and what it frees."""

from __future__ import annotations

import gc
import re
import weakref

import comfy.model_management
import comfy.samplers
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from ernie_fast.nodes.cache import run as run_module
from ernie_fast.nodes.cache.attach import attach_cache, cache_of
from ernie_fast.nodes.cache.config import PRESETS, CacheConfig
from ernie_fast.nodes.cache.node import ErnieFastCache, ErnieFastCacheReport
from ernie_fast.nodes.model import forward as forward_module
from ernie_fast.nodes.model.build import load_model
from sampling import condition, core_forward, paint

# Always caches what the caps allow, so that a test knows which steps are skipped.
EAGER = CacheConfig(residual_diff_threshold=100.0, max_warmup_steps=2, max_continuous_cached_steps=1)
FIRST_BLOCK = CacheConfig(
    fn_compute_blocks=1, residual_diff_threshold=100.0, max_warmup_steps=2, max_continuous_cached_steps=1, forecast="none"
)
BOTH = pytest.mark.parametrize("config", [EAGER, FIRST_BLOCK], ids=["whole-output", "first-block"])


def calls_of(module):
    """Return a list that grows by the batch size at each call of a module."""
    calls = []
    module.register_forward_hook(lambda _module, args, _out: calls.append(args[0].shape[0]))
    return calls


def report_of(model):
    cache = cache_of(model)
    assert cache
    assert cache.report
    return cache.report


def strip_of(model):
    return "".join("#" if computed else "." for _, computed in report_of(model).decisions)


@BOTH
def test_skips_steps_and_counts_what_ran(model, config):
    blocks = model.model.diffusion_model.layers
    first, last = calls_of(blocks[0]), calls_of(blocks[-1])
    cached = attach_cache(model, config)
    result = paint(cached, steps=8)
    assert torch.isfinite(result).all()
    assert strip_of(cached) == "##.#.#.#"
    assert len(last) == 5
    assert len(first) == (8 if config.fn_compute_blocks else 5)
    ran = 8 * 1 + 5 * 2 if config.fn_compute_blocks else 5 * 3
    assert report_of(cached).compute_ratio == pytest.approx(8 * 3 / ran)
    assert not torch.equal(result, paint(model, steps=8))


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "off"},
        {"preset": "custom", "residual_diff_threshold": 0.0},
        {"preset": "custom", "residual_diff_threshold": 0.0, "fn_compute_blocks": 1, "bn_compute_blocks": 1},
        {"preset": "custom", "max_cached_steps": 0},
        {"preset": "custom", "max_warmup_steps": 100},
    ],
    ids=str,
)
def test_off_and_threshold_zero_are_bit_identical_to_no_node(model, settings):  # U63
    plain = paint(model, steps=6)
    assert torch.equal(paint(ErnieFastCache.execute(model, **settings).args[0], steps=6), plain)


def test_a_run_of_another_size_follows_without_error(model):  # U61, U69
    cached = attach_cache(model, EAGER)
    first = paint(cached, steps=6)
    paint(cached, steps=6, size=(6, 4))
    paint(cached, steps=9, size=(2, 2))
    assert torch.equal(paint(cached, steps=6), first)


@BOTH
def test_two_samplers_in_one_graph_do_not_share_state(model, config):  # U61, U69, U71
    cached = attach_cache(model, config)
    first = paint(cached, steps=6)
    second = paint(cached, steps=6, positive=condition(7, seed=9))
    assert not torch.equal(first, second)
    alone = paint(attach_cache(model, config), steps=6, positive=condition(7, seed=9))
    assert torch.equal(second, alone)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_needs_no_step_count_and_computes_first_and_last(model, steps):  # U62, U72
    cached = attach_cache(model, EAGER)
    paint(cached, steps=steps)
    strip = strip_of(cached)
    assert len(strip) == steps
    assert strip[0] == strip[-1] == "#"


def test_original_model_is_unchanged_and_a_removed_node_leaves_nothing(model):  # U63, U64
    plain = paint(model, steps=6)
    cached = attach_cache(model, EAGER)
    paint(cached, steps=6)
    assert torch.equal(paint(model, steps=6), plain)
    assert cache_of(model) is None
    assert "forward" not in vars(model.model.diffusion_model)
    assert not any(key.startswith("ernie_fast_cache") for key in model.model_options["transformer_options"])


def test_no_external_cache_library_is_imported():  # U65
    import sys

    assert "cache_dit" not in sys.modules
    assert "diffusers" not in sys.modules


def test_nothing_skipped_is_a_warning(model, caplog):  # U65, U74
    cached = attach_cache(model, CacheConfig(residual_diff_threshold=1e-9))
    paint(cached, steps=6)
    records = [one for one in caplog.records if one.name == "ernie_fast" and "cache:" in one.message]
    assert [one.levelname for one in records] == ["WARNING"]
    assert "computed 6 of 6 steps, 1.00x, 0 skipped" in records[0].message


def test_each_run_logs_one_line_with_steps_and_speed_up(model, caplog):  # U74
    caplog.set_level("INFO", "ernie_fast")
    cached = attach_cache(model, EAGER)
    paint(cached, steps=8)
    lines = [one.message for one in caplog.records if one.message.startswith("cache:")]
    assert len(lines) == 1
    assert lines[0].startswith("cache: computed 5 of 8 steps, 1.60x, 3 skipped, at most 0.")


@BOTH
def test_equal_and_unequal_prompt_lengths_give_the_same_decisions(model, config):  # U66, V4
    cached = attach_cache(model, config)
    strips, calls = [], calls_of(model.model.diffusion_model.layers[-1])
    for negative in (condition(7, seed=2), condition(3, seed=2), condition(7, seed=2)):
        calls.clear()
        paint(cached, steps=8, negative=negative)
        strips.append((strip_of(cached), set(calls)))
    assert strips == [("##.#.#.#", {2}), ("##.#.#.#", {1}), ("##.#.#.#", {2})]


@pytest.mark.parametrize("fn_compute_blocks", [0, 1])
def test_batched_and_separate_guidance_decide_alike_at_a_real_threshold(nano, monkeypatch, fn_compute_blocks):  # U66
    """The same prompts in one forward or in two: same decisions, same picture but for rounding."""
    model = load_model(nano / "ernie-image-nano.safetensors")
    config = CacheConfig(
        fn_compute_blocks=fn_compute_blocks, residual_diff_threshold=0.12, max_continuous_cached_steps=-1,
        forecast="none" if fn_compute_blocks else "corrected",
    )  # fmt: skip
    cached = attach_cache(model, config)
    together = paint(cached, steps=12, size=(8, 8))
    strip = strip_of(cached)
    monkeypatch.setattr(comfy.samplers, "can_concat_cond", lambda a, b: a is b)
    apart = paint(cached, steps=12, size=(8, 8))
    assert strip_of(cached) == strip
    assert "#." in strip
    assert ".#" in strip
    torch.testing.assert_close(apart, together, rtol=1e-3, atol=1e-3)


@BOTH
@pytest.mark.parametrize("batches", [(1, 2, 3), (3, 1, 2)])
def test_batch_sizes_and_their_change_between_runs(model, config, batches):  # U67
    cached = attach_cache(model, config)
    for batch in batches:
        result = paint(cached, steps=6, batch=batch)
        assert result.shape[0] == batch
        assert strip_of(cached) == "##.#.#"


def test_pictures_of_a_batch_equal_those_of_the_whole_output_cache_alone(model):  # U67
    """With caps alone deciding, a batch's picture is the picture of its own noise."""
    cached = attach_cache(model, EAGER)
    latent = torch.zeros(2, 128, 4, 6)
    noise = torch.randn(2, 128, 4, 6)

    def sample(noise):
        return comfy.sample.sample(
            cached, noise, 6, 1.0, "euler", "simple", condition(7), condition(7), latent[: len(noise)], disable_pbar=True, seed=0
        )

    torch.testing.assert_close(sample(noise)[1:], sample(noise[1:]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("other", [EasyCacheNode, LazyCacheNode])
def test_another_cache_on_the_model_is_warned_about_and_ours_stays_off(model, caplog, other):  # U01, U68
    alone = other.execute(model, 0.2, 0.15, 0.95, False).args[0]
    both = other.execute(attach_cache(model, EAGER), 0.2, 0.15, 0.95, False).args[0]
    assert torch.equal(paint(both, steps=8), paint(alone, steps=8))
    assert "the ERNIE cache stays off" in caplog.text


def test_rising_sigmas_are_sampled_without_cache(model, caplog):
    """Inversion runs from picture to noise: a step's place in the run means nothing there."""
    latent = torch.randn(1, 128, 4, 6)
    sigmas = torch.tensor([0.1, 0.3, 0.6, 0.9])

    def sample(patcher):
        guider = comfy.samplers.CFGGuider(patcher)
        guider.set_conds(condition(7), condition(7, seed=2))
        guider.set_cfg(1.0)
        return guider.sample(torch.zeros(1, 128, 4, 6), latent, comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True)

    assert torch.equal(sample(attach_cache(model, EAGER)), sample(model))
    assert "the sigmas of this run rise" in caplog.text


@BOTH
@pytest.mark.usefixtures("steady_memory")
def test_compiled_blocks_decide_outside_of_the_graph(model, config):  # U70
    cached = attach_cache(model, config)
    plain = paint(cached, steps=8)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = attach_cache(model, config)
    keys = [f"diffusion_model.layers.{i}" for i in range(3)]
    set_torch_compile_wrapper(compiled, backend="eager", keys=keys, options={"guard_filter_fn": skip_torch_compile_dict})
    torch.testing.assert_close(paint(compiled, steps=8), plain)
    assert strip_of(compiled) == "##.#.#.#"
    stats = torch._dynamo.utils.counters
    graphs = stats["stats"]["unique_graphs"]
    assert graphs
    paint(compiled, steps=8, positive=condition(7, seed=5))
    assert stats["stats"]["unique_graphs"] == graphs


def test_lora_change_between_runs_takes_effect(model):  # U70, U71, U72
    cached = attach_cache(model, EAGER)
    first = paint(cached, steps=6)
    patched = cached.clone()
    name = "diffusion_model.layers.1.mlp.linear_fc2.weight"
    weight = model.model.diffusion_model.layers[1].mlp.linear_fc2.weight
    patched.add_patches({name: ("diff", (torch.ones_like(weight),))}, 0.5)
    second = paint(patched, steps=6)
    assert not torch.allclose(second, first)
    without = model.clone()
    without.add_patches({name: ("diff", (torch.ones_like(weight),))}, 0.5)
    assert torch.equal(paint(attach_cache(without, EAGER), steps=6), second)
    assert torch.equal(paint(cached, steps=6), first)


def test_a_changed_seed_changes_the_picture(model):  # U71
    cached = attach_cache(model, EAGER)
    latent = torch.zeros(1, 128, 4, 6)
    pictures = []
    for seed in (0, 1):
        noise = comfy.sample.prepare_noise(latent, seed)
        pictures.append(
            comfy.sample.sample(cached, noise, 6, 4.0, "euler", "simple", condition(7), condition(7, seed=2), latent, disable_pbar=True, seed=seed)
        )
    assert not torch.allclose(pictures[0], pictures[1])


def test_works_on_a_model_of_comfyuis_own_loader(model, monkeypatch):  # U73
    """A MODEL without our forward gets it; where ComfyUI's module is not the expected one, the whole-output cache still works."""
    cached = attach_cache(core_forward(model), FIRST_BLOCK)
    paint(cached, steps=6)
    assert strip_of(cached) == "##.#.#"
    monkeypatch.setattr(forward_module, "agrees_with_comfyui", lambda: False)
    whole = attach_cache(model, EAGER)
    paint(whole, steps=6)
    assert strip_of(whole) == "##.#.#"
    blocks = attach_cache(model, FIRST_BLOCK)
    assert torch.equal(paint(blocks, steps=6), paint(model, steps=6)), "no hook: every step is computed"


@BOTH
@pytest.mark.parametrize(
    ("sampler", "evaluations"), [("heun", 11), ("dpmpp_sde", 11), ("dpm_2", 11), ("euler_ancestral", 6), ("res_multistep", 6), ("uni_pc", 6)]
)
def test_multi_evaluation_samplers_count_steps_by_sigma(model, config, sampler, evaluations):  # U75
    calls = []
    counted = model.clone()

    def count(executor, *args, **kwargs):
        calls.append(1)
        return executor(*args, **kwargs)

    counted.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "count", count)
    cached = attach_cache(counted, config)
    result = paint(cached, steps=6, sampler=sampler)
    assert torch.isfinite(result).all()
    assert len(calls) == evaluations or sampler == "uni_pc"
    decisions = report_of(cached).decisions
    positions = [position for position, _ in decisions]
    assert positions == sorted(set(positions)), "one decision per sigma"
    assert decisions[0][1]
    assert decisions[-1][1]
    assert positions[-1] == 5
    assert any(not computed for _, computed in decisions)


def test_repair_is_off_for_samplers_whose_steps_are_not_single(model):  # U75
    """Heun with the repair equals heun with the plain forecast of the same order."""
    plain = attach_cache(model, CacheConfig(**{**settings(EAGER), "forecast": "taylorseer"}))
    assert torch.equal(paint(attach_cache(model, EAGER), steps=6, sampler="heun"), paint(plain, steps=6, sampler="heun"))
    assert not torch.equal(paint(attach_cache(model, EAGER), steps=6), paint(plain, steps=6))


def settings(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@BOTH
@pytest.mark.parametrize("error", [RuntimeError("broken"), comfy.model_management.InterruptProcessingException()])
def test_interrupt_or_error_in_mid_run_frees_everything(model, monkeypatch, config, error):  # U76
    plain = paint(model, steps=6)
    kept = []
    original = run_module.Branch.computed

    def remember(self, position, value, measure):
        kept.append(weakref.ref(value))
        original(self, position, value, measure)

    monkeypatch.setattr(run_module.Branch, "computed", remember)
    cached = attach_cache(model, config)
    broken = cached.clone()

    def fail(args, extra):
        if len(kept) >= 4:
            raise error
        return extra["original_block"](args)

    broken.set_model_patch_replace(fail, "dit", "single_block", 1)
    with pytest.raises(type(error)):
        paint(broken, steps=6)
    error.__traceback__ = None
    gc.collect()
    assert len(kept) >= 4
    assert not any(reference() is not None for reference in kept)
    assert "forward" not in vars(model.model.diffusion_model)
    assert torch.equal(paint(model, steps=6), plain)
    assert torch.isfinite(paint(cached, steps=6)).all()


@BOTH
def test_img2img_starts_at_its_own_sigma(model, config):  # U77
    cached = attach_cache(model, config)
    latent = torch.randn(1, 128, 4, 6)
    noise = comfy.sample.prepare_noise(latent, 0)
    comfy.sample.sample(
        cached, noise, 5, 4.0, "euler", "simple", condition(7), condition(7, seed=2), latent, denoise=0.3, disable_pbar=True, seed=0
    )
    assert [position for position, _ in report_of(cached).decisions] == [0, 1, 2, 3, 4]
    assert strip_of(cached) == "##.##"


def test_turbo_preset_with_eight_steps(model):  # U72, U77
    cached = attach_cache(model, PRESETS["turbo"])
    paint(cached, steps=8, cfg=1.0)
    strip = strip_of(cached)
    assert strip[:2] == "##"
    assert strip[-1] == "#"
    assert ".." not in strip


def test_a_step_without_negative_pass_drops_its_state(model):
    """Guidance off for two steps in the middle: the negative pass starts anew, and no old forecast is used for it."""
    cached = attach_cache(model, EAGER)
    lengths = []
    cfg = {2: 1.0, 3: 1.0}
    guider = comfy.samplers.CFGGuider(cached)
    guider.set_conds(condition(7), condition(3, seed=2))
    calls = []

    def predict(executor, x, timestep, model_options, seed):
        guider.set_cfg(cfg.get(len(calls), 4.0))
        calls.append(1)
        out = executor(x, timestep, model_options, seed)
        run = model_options["transformer_options"]["ernie_fast_cache_run"]
        lengths.append(len(run.branches))
        return out

    cached.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "schedule", predict)
    latent = torch.zeros(1, 128, 4, 6)
    layer = calls_of(model.model.diffusion_model.layers[0])
    guider.model_options = cached.model_options
    guider.sample(comfy.sample.prepare_noise(latent, 0), latent, comfy.samplers.sampler_object("euler"),
                  torch.linspace(1, 0, 7), disable_pbar=True, seed=0)  # fmt: skip
    assert lengths == [2, 2, 2, 1, 2, 2]
    assert len(layer) == 2 + 2 + 0 + 1 + 1 + 2


def test_skip_layer_guidance_has_a_state_of_its_own(model):
    """The third pass evaluates the same condition with a block left out; it must not get the first pass's cache."""
    guided = attach_cache(SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "1", "1", 0.0).args[0], EAGER)
    plain = attach_cache(model, EAGER)
    assert not torch.allclose(paint(guided, steps=6), paint(plain, steps=6), rtol=0.01)
    assert report_of(guided).blocks_total == 6 * 3 * 2


def test_two_clones_with_different_caches_and_a_replaced_cache(model):
    first, second = attach_cache(model, EAGER), attach_cache(model, CacheConfig(residual_diff_threshold=0.0))
    paint(first, steps=6)
    paint(second, steps=6)
    assert (strip_of(first), strip_of(second)) == ("##.#.#", "######")
    replaced = attach_cache(first, CacheConfig(residual_diff_threshold=0.0))
    paint(replaced, steps=6)
    assert strip_of(replaced) == "######"
    paint(first, steps=6)
    assert strip_of(first) == "##.#.#"


@pytest.mark.parametrize("forecast", ["none", "taylorseer"])
@pytest.mark.parametrize("cache_dtype", ["auto", "bf16", "fp8", "int8"])
def test_dbcache_first_and_last_blocks_with_every_buffer_type(nano, forecast, cache_dtype):
    model = load_model(nano / "ernie-image-nano.safetensors")
    settings = {"fn_compute_blocks": 2, "bn_compute_blocks": 1, "residual_diff_threshold": 100.0, "forecast": forecast}
    cached = attach_cache(model, CacheConfig(**settings, cache_dtype=cache_dtype))
    layers = [calls_of(model.model.diffusion_model.layers[index]) for index in (0, 1, 2, 10, 11)]
    result = paint(cached, steps=7, size=(8, 8))
    assert strip_of(cached) == "###..##"
    assert [len(calls) for calls in layers] == [7, 7, 5, 5, 7]
    exact = paint(attach_cache(model, CacheConfig(**settings)), steps=7, size=(8, 8))
    assert (result - exact).norm() / exact.norm() < {"auto": 1e-9, "bf16": 0.02, "fp8": 0.1, "int8": 0.1}[cache_dtype]
    per_number = {"auto": 4, "bf16": 2, "fp8": 1, "int8": 1}[cache_dtype]
    forecast_numbers = 2 * (64 + 7) * 256 * (2 if forecast == "taylorseer" else 1)
    metric_bytes = 2 * 64 * 256 * 4
    assert report_of(cached).peak_bytes == pytest.approx(forecast_numbers * per_number + metric_bytes, rel=0.03)


def test_attention_is_reused_between_computed_steps(nano):
    model = load_model(nano / "ernie-image-nano.safetensors")
    config = CacheConfig(residual_diff_threshold=0.0, max_warmup_steps=2, attention_reuse=2)
    attention, mlp = (calls_of(part) for part in (model.model.diffusion_model.layers[3].self_attention.to_q, model.model.diffusion_model.layers[3].mlp))
    cached = attach_cache(model, config)
    result = paint(cached, steps=8, size=(8, 8))
    assert len(mlp) == 8
    assert len(attention) == 5
    assert report_of(cached).attention_reused == 3
    assert "attention was reused at 3 computed steps" in report_of(cached).text()
    plain = paint(model, steps=8, size=(8, 8))
    assert 0 < (result - plain).norm() / plain.norm() < 0.5


def test_separate_decisions_for_prompt_and_negative(model, monkeypatch):
    config = CacheConfig(**{**settings(FIRST_BLOCK), "enable_separate_cfg": True, "residual_diff_threshold": 0.5})
    original = run_module.relative_l1

    def metric(value, reference):  # the negative pass (three text tokens) seems to change a lot
        return original(value, reference) * 0 + next(differences)

    monkeypatch.setattr(run_module, "relative_l1", metric)
    differences = iter([0.1, 0.9] * 20)
    cached = attach_cache(model, config)
    calls = calls_of(model.model.diffusion_model.layers[-1])
    paint(cached, steps=6, negative=condition(3, seed=2))
    assert len(calls) == 6 + 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "fastest"}, "preset is 'fastest'; off, safe"),
        ({"preset": "custom", "steps_computation_mask": "quick"}, "steps_computation_mask holds 'q'"),
        ({"preset": "custom", "fn_compute_blocks": 5000}, "fn_compute_blocks is 5000"),
    ],
    ids=str,
)
def test_bad_settings_give_the_same_text_before_and_at_the_run(model, values, message):
    text = ErnieFastCache.validate_inputs(**values)
    assert isinstance(text, str)
    assert message in text
    with pytest.raises(ValueError, match=re.escape(text)):
        ErnieFastCache.execute(model, **values)
    assert ErnieFastCache.validate_inputs(preset=None, fn_compute_blocks=None) is True


def test_too_many_first_and_last_blocks_and_other_models_are_named(model):
    with pytest.raises(ValueError, match=r"leave none of the model's 3 blocks to cache; together they may be at most 2"):
        attach_cache(model, CacheConfig(fn_compute_blocks=2, bn_compute_blocks=1))

    class Other(torch.nn.Module):
        pass

    other = model.clone()
    other.model = torch.nn.Module()
    other.model.diffusion_model = Other()
    with pytest.raises(ValueError, match="this model is Other, not ERNIE-Image"):
        attach_cache(other, EAGER)


def test_report_node_passes_the_latent_and_tells_the_last_run(model):
    samples = {"samples": torch.zeros(1)}
    assert ErnieFastCacheReport.execute(model, samples).args == (samples, "cache: this model has none (preset off, or no ERNIE Cache node before it)")
    cached = attach_cache(model, EAGER)
    assert "no run yet" in ErnieFastCacheReport.execute(cached, samples).args[1]
    paint(cached.clone(), steps=8)
    latent, text = ErnieFastCacheReport.execute(cached, samples).args
    assert latent is samples
    assert text.splitlines()[:2] == [report_of(cached).line(), "steps: ##.#.#.#"]
