"""The forward with hooks: equal to ComfyUI's when nothing hooks, and what ComfyUI's own nodes do with it."""

from __future__ import annotations

import comfy.memory_management
import comfy.model_management
import comfy.sample
import comfy.samplers
import pytest
import torch
from comfy.ldm.ernie.model import ErnieImageModel
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from comfy_extras.nodes_nag import NAGuidance
from comfy_extras.nodes_rope import ScaleROPE
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
from ernie_fast.nodes.model import forward as forward_module
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.positions import pad_text
from sampling import condition, core_forward, paint


def counted(model, kind=WrappersMP.DIFFUSION_MODEL):
    """A clone that counts the calls of a wrapper; returns it and the list that grows."""
    clone, calls = model.clone(), []

    def wrapper(executor, *args, **kwargs):
        calls.append(args[0].shape[0])
        return executor(*args, **kwargs)

    clone.add_wrapper_with_key(kind, "count", wrapper)
    return clone, calls


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 2}, {"batch": 3, "size": (3, 5)}, {"negative": condition(3)}, {"cfg": 1.0}, {"sampler": "heun"}, {"size": (1, 1)}],
    ids=str,
)
def test_without_hooks_bit_identical_to_comfyuis_forward(model, options):
    ours, calls = counted(model)
    result = paint(ours, **options)
    assert calls, "our forward did not run"
    assert torch.equal(result, paint(core_forward(model), **options))


@pytest.mark.parametrize("scale", [(1.0, 1.0), (2.0, 0.5)])
def test_rope_options_equal_comfyuis(model, scale):
    scaled = ScaleROPE.execute(model, scale[0], 1.5, scale[1], -1.0, 1.0, 3.0).args[0]
    result = paint(scaled)
    assert torch.equal(result, paint(core_forward(scaled)))
    assert not torch.equal(result, paint(model))


def test_every_way_through_the_forward_agrees_with_comfyui():
    assert forward_module._difference_on_a_tiny_model() < 1e-6
    assert forward_module.agrees_with_comfyui()


def test_self_check_works_where_layers_get_their_weights_late(monkeypatch):
    # With dynamic VRAM ComfyUI's linear layers have no weights until they are loaded; this check failed there once.
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    assert forward_module._difference_on_a_tiny_model() < 1e-6


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "attention-patch"])
def test_padded_batch_equals_each_picture_alone(model, hooked):
    """Prompts of 9, 4 and 1 tokens in one batch: no picture depends on its batch mates."""
    module = model.model.diffusion_model
    contexts = [condition(tokens, seed=tokens)[0][0] for tokens in (9, 4, 1)]
    x, timesteps = torch.randn(3, 128, 4, 6), torch.tensor([900.0, 500.0, 100.0])
    options = {"patches": {"attn1_patch": [lambda q, k, v, **_: {"v": v * 0.5}]}} if hooked else {}
    context, lengths = pad_text(contexts)
    context[1, 4:], context[2, 1:] = 1e3, -1e3  # what stands in the padding must not matter
    batch = forward_module.forward(module, x, timesteps, context, {**options, "text_lengths": lengths})
    for row, alone in enumerate(contexts):
        one = slice(row, row + 1)
        single = forward_module.forward(module, x[one], timesteps[one], alone, dict(options))
        torch.testing.assert_close(batch[one], single, rtol=1e-4, atol=1e-5)
    unmasked = forward_module.forward(module, x, timesteps, context, dict(options))
    assert not torch.allclose(unmasked[1], batch[1], rtol=0.01)


def test_text_lengths_that_do_not_fit_are_named(model):
    module = model.model.diffusion_model
    arguments = (torch.zeros(2, 128, 2, 2), torch.ones(2), torch.zeros(2, 5, 192))
    for lengths in ((5,), (5, 6), (0, 5)):
        with pytest.raises(ValueError, match="2 numbers from 1 to 5 are needed"):
            forward_module.forward(module, *arguments, {"text_lengths": lengths})


def test_attention_override_is_called_in_every_block_and_changes_the_picture(model):  # U02, V2
    calls = []

    def override(attention, *args, **kwargs):
        options = kwargs["transformer_options"]
        calls.append((options["block_index"], options["total_blocks"], options["img_slice"]))
        return attention(*args, **kwargs) * 0.5

    hooked = model.clone()
    hooked.model_options["transformer_options"]["optimized_attention_override"] = override
    assert not torch.equal(paint(hooked, steps=1), paint(model, steps=1))
    assert calls == [(index, 3, [0, 24]) for index in range(3)]
    calls.clear()
    paint(core_forward(hooked), steps=1)
    assert not calls, "ComfyUI's own forward calls the override now; ours may not be needed"


def test_attention_patches_are_called_with_the_image_slice(model):  # U02, V2
    seen = []

    def before(q, k, v, pe, attn_mask, extra_options):
        seen.append((q.shape, k.shape, v.shape, extra_options["img_slice"]))
        return {"v": v * 2}

    def after(out, extra_options):
        seen.append((out.shape, extra_options["n_heads"], extra_options["dim_head"]))
        return out * 0.5

    hooked = model.clone()
    hooked.set_model_attn1_patch(before)
    hooked.set_model_attn1_output_patch(after)
    shape = torch.Size([2, 2, 31, 128])
    torch.testing.assert_close(paint(hooked, steps=1), paint(model, steps=1))
    assert seen == [(shape, shape, shape, [0, 24]), (torch.Size([2, 31, 256]), 2, 128)] * 3


@pytest.mark.parametrize("kind", ["single_block", "double_block"])
def test_block_replacement_replaces_and_can_call_the_original(model, kind):  # U02, V2
    through, skipped = model.clone(), model.clone()
    through.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", kind, 1)
    skipped.set_model_patch_replace(lambda args, extra: args, "dit", kind, 1)
    plain = paint(model)
    assert torch.equal(paint(through), plain)
    assert not torch.equal(paint(skipped), plain)


def test_easycache_skips_steps(nano, caplog):  # U01, V1
    model = load_model(nano / "ernie-image-nano.safetensors")
    cached, calls = counted(EasyCacheNode.execute(model, 0.2, 0.15, 0.95, False).args[0], WrappersMP.APPLY_MODEL)
    blocks = []
    model.model.diffusion_model.layers[0].register_forward_hook(lambda *_: blocks.append(1))
    caplog.set_level("INFO")
    result = paint(cached, steps=12, size=(16, 16))
    assert torch.isfinite(result).all()
    assert len(calls) == 12
    assert 0 < len(blocks) < 12
    assert f"EasyCache - skipped {12 - len(blocks)}/12 steps" in caplog.text


def test_lazycache_skips_steps(model):  # U68
    cached, calls = counted(LazyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0])
    paint(cached, steps=12)
    assert 0 < len(calls) < 12


def test_skip_layer_guidance_has_an_effect(model):
    guided = SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "1", "1", 0.0).args[0]
    plain = paint(model)
    assert not torch.allclose(paint(guided), plain, rtol=0.01)
    torch.testing.assert_close(paint(core_forward(guided)), plain, rtol=1e-3, atol=1e-3)  # no effect but rounding


def test_nag_has_an_effect(model):
    guided = NAGuidance.execute(model, 5.0, 0.5, 1.5).args[0]
    plain = paint(model, cfg=1.0)
    assert not torch.allclose(paint(guided, cfg=1.0), plain, rtol=0.01)
    torch.testing.assert_close(paint(core_forward(guided), cfg=1.0), plain, rtol=1e-3, atol=1e-3)


def test_nag_has_an_effect_where_the_prompts_differ_in_length(model):
    """ComfyUI runs such prompts apart, and NAG does nothing then; the negative prompt is nearly always the shorter one."""
    negative = condition(2, seed=2)
    guided = NAGuidance.execute(model, 5.0, 0.5, 1.5).args[0]
    plain = paint(model, cfg=1.0, negative=negative)
    assert not torch.allclose(paint(guided, cfg=1.0, negative=negative, batch=2)[:1], plain, rtol=0.01)
    torch.testing.assert_close(paint(core_forward(guided), cfg=1.0, negative=negative), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 2])
def test_prompts_padded_into_one_forward_paint_the_same_picture(model, batch):
    negative = condition(2, seed=2)
    patched, calls = counted(model)
    patched.set_model_attn1_output_patch(lambda out, extra_options: out)
    together = paint(patched, negative=negative, batch=batch)
    assert set(calls) == {2 * batch}
    apart = paint(model, negative=negative, batch=batch)
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keys", [["diffusion_model"], [f"diffusion_model.layers.{i}" for i in range(3)]], ids=["whole", "blocks"])
@pytest.mark.usefixtures("steady_memory")
def test_compiled_model_gives_the_same_picture_and_is_compiled_once(model, keys):  # U70
    plain = paint(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, calls = counted(model)
    set_torch_compile_wrapper(compiled, backend="eager", keys=keys, options={"guard_filter_fn": skip_torch_compile_dict})
    torch.testing.assert_close(paint(compiled, steps=4), paint(model, steps=4))
    assert calls
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs
    paint(compiled, steps=4, positive=condition(7, seed=5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "compiled again for the same sizes"
    assert torch.equal(paint(model), plain)


@pytest.mark.parametrize("error", [RuntimeError("broken"), comfy.model_management.InterruptProcessingException()])
def test_nothing_stays_on_the_module_after_a_run_or_an_error(model, error):  # U64, U76
    plain = paint(model)
    module = model.model.diffusion_model
    broken = model.clone()

    def fail(args, extra):
        raise error

    broken.set_model_patch_replace(fail, "dit", "single_block", 2)
    with pytest.raises(type(error)):
        paint(broken)
    assert "forward" not in vars(module)
    assert module.forward.__func__ is ErnieImageModel.forward
    assert torch.equal(paint(model), plain)


def test_rotary_table_is_made_once_per_run_and_prompt_length(model, monkeypatch):
    made = []
    embed = type(model.model.diffusion_model.pos_embed).forward
    monkeypatch.setattr(
        type(model.model.diffusion_model.pos_embed), "forward", lambda self, ids: made.append(ids.shape) or embed(self, ids)
    )
    paint(model, steps=5)
    assert made == [(2, 31, 3)]
    made.clear()
    paint(model, steps=5, negative=condition(3))
    assert sorted(made) == [(1, 27, 3), (1, 31, 3)]
    assert "ernie_fast_rope" not in model.model_options["transformer_options"]


def test_text_encoder_of_another_width_is_named(model):  # U25
    with pytest.raises(ValueError, match=r"encoded with width 3072, but this ERNIE-Image model needs width 192"):
        paint(model, positive=condition(7, width=3072), negative=condition(7, width=3072))


def test_changed_comfyui_is_warned_about_once_and_runs_its_own_forward(model, monkeypatch, caplog):  # U04, U73
    original = ErnieImageModel.forward

    def changed(self, *args, **kwargs):
        return original(self, *args, **kwargs) * 0.5

    monkeypatch.setattr(ErnieImageModel, "forward", changed)
    forward_module.agrees_with_comfyui.cache_clear()
    try:
        ours, calls = counted(model)
        results = [paint(ours), paint(ours)]
        assert not calls
        assert torch.equal(results[0], paint(core_forward(model)))
        assert torch.equal(results[1], results[0])
        assert caplog.text.count("computes something else") == 1
    finally:
        forward_module.agrees_with_comfyui.cache_clear()


def test_changed_structure_is_warned_about(monkeypatch, caplog):  # U73
    monkeypatch.setattr(ErnieImageModel, "__init__", lambda self, **sizes: torch.nn.Module.__init__(self))
    forward_module.agrees_with_comfyui.cache_clear()
    try:
        assert not forward_module.agrees_with_comfyui()
        assert "is not the expected one" in caplog.text
    finally:
        forward_module.agrees_with_comfyui.cache_clear()
