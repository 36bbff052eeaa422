"""The LoRA loader: every trainer's names, the exact change of the weights, and its refusals."""

from __future__ import annotations

import logging

import comfy.lora
import comfy.model_detection
import lora_files
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfy.utils import get_attr
from ernie_fast.nodes.loaders.lora_keys import model_aliases, text_encoder_aliases
from ernie_fast.nodes.loaders.lora_loader import ErnieFastLoRALoader
from ernie_fast.nodes.model.checkpoint import CheckpointError
from ernie_files import SIZES, ernie_state_dict, quantised, save
from lora_files import FORMS, MODULE, MODULES, RANK, ROOT, TEXT_FORMS, factors, kohya, lora, patched, peft
from safetensors.torch import load_file

import nodes as core_nodes

TEXT_ROOT, TEXT_MODULE = "ministral3_3b.transformer.model.", "layers.2.self_attn.q_proj"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():  # the matrices are small: on a busy machine threads would wait for each other ten times as long
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(nano):
    """The weights of the bundled model."""
    return {k: v.float() for k, v in load_file(nano / "ernie-image-nano.safetensors").items()}


@pytest.fixture(scope="module")
def model(base):
    """The bundled model in ComfyUI's classes. Shared: a test that left it changed would fail the next."""
    return lora_files.nano_model(base)


@pytest.fixture(scope="module")
def clip(nano):
    return lora_files.nano_clip(nano / "ministral-nano.safetensors")


@pytest.fixture
def apply(models, model):
    """Write a LoRA file and run the node on it."""

    def run(sd, strength=1.0, on=None, name="style.safetensors", **inputs):
        save(models / "loras" / name, sd)
        return ErnieFastLoRALoader.execute(model if on is None else on, name, strength, **inputs).args

    return run


@pytest.mark.parametrize("write", [kohya, peft, lora_files.peft_default])
@pytest.mark.parametrize("form", FORMS)
def test_every_name_form_changes_the_weights_exactly(apply, base, form, write):  # V14
    sd, deltas = lora(base, form=FORMS[form], write=write)
    patcher, clip, report = apply(sd, strength=0.75)
    lora_files.assert_changed_by(patcher, base, {module: 0.75 * delta for module, delta in deltas.items()})
    assert clip is None
    assert report == "style.safetensors: 4 of 4 modules matched; model 4 (strength 0.75)"


@pytest.mark.parametrize("form", FORMS)
def test_to_out_without_its_index_matches(apply, base, form):  # V14
    module = "layers.0.self_attention.to_out"
    up, down = factors(base[f"{module}.0.weight"].shape)
    patcher, _, _ = apply(kohya(FORMS[form](module), up, down, RANK))
    lora_files.assert_changed_by(patcher, base, {f"{module}.0": up @ down})


@pytest.mark.parametrize("ending", ["_lora.{}.weight", ".lora.{}.weight", ".lora_linear_layer.{}.weight"])
def test_older_diffusers_endings_are_read(apply, base, ending):
    up, down = factors(base[f"{MODULE}.weight"].shape)
    patcher, _, _ = apply({MODULE + ending.format("up"): up, MODULE + ending.format("down"): down})
    lora_files.assert_changed_by(patcher, base, {MODULE: up @ down})


def test_aliases_contain_every_form_of_comfyui(model, clip):
    weights = [name for name, _ in model.model.named_parameters()]
    core = {k: v for k, v in comfy.lora.model_lora_keys_unet(model.model, {}).items() if v.endswith(".weight")}
    assert core.items() <= model_aliases(weights).items()
    text = [name for name, _ in clip.cond_stage_model.named_parameters()]
    assert text_encoder_aliases(text)["lora_te_layers_0_mlp_up_proj"] == f"{TEXT_ROOT}layers.0.mlp.up_proj.weight"


def test_convolution_and_linears_around_the_blocks_match(apply, base):
    up, down = torch.randn(256, RANK, 1, 1), torch.randn(RANK, 128, 1, 1)
    patcher, _, _ = apply(peft("transformer.x_embedder.proj", up, down, RANK))
    lora_files.assert_changed_by(patcher, base, {"x_embedder.proj": (up.flatten(1) @ down.flatten(1))[:, :, None, None]})


def test_lokr_changes_the_weight_by_the_kronecker_product(apply, base):
    w1, a, b = torch.randn(8, 8) * 0.1, torch.randn(32, RANK) * 0.1, torch.randn(RANK, 32) * 0.1
    name = FORMS["simpletuner lycoris"](MODULE)
    sd = {f"{name}.lokr_w1": w1, f"{name}.lokr_w2_a": a, f"{name}.lokr_w2_b": b, f"{name}.alpha": torch.tensor(lora_files.ALPHA)}
    lora_files.assert_changed_by(apply(sd)[0], base, {MODULE: torch.kron(w1, a @ b) * (lora_files.ALPHA / RANK)})


def test_loha_changes_the_weight_by_the_product_of_products(apply, base):
    (a1, b1), (a2, b2) = factors(base[f"{MODULE}.weight"].shape), factors(base[f"{MODULE}.weight"].shape)
    name = FORMS["kohya"](MODULE)
    sd = {f"{name}.hada_w1_a": a1, f"{name}.hada_w1_b": b1, f"{name}.hada_w2_a": a2, f"{name}.hada_w2_b": b2}
    sd[f"{name}.alpha"] = torch.tensor(lora_files.ALPHA)
    lora_files.assert_changed_by(apply(sd)[0], base, {MODULE: (a1 @ b1) * (a2 @ b2) * (lora_files.ALPHA / RANK)})


def test_oft_rotates_blocks_of_rows(apply, base):
    blocks = torch.randn(8, 32, 32) * 0.02
    q = blocks - blocks.transpose(1, 2)
    rotation = (torch.eye(32) + q) @ (torch.eye(32) - q).inverse() - torch.eye(32)
    delta = torch.einsum("knm,kni->kmi", rotation, base[f"{MODULE}.weight"].view(8, 32, 256)).reshape(256, 256)
    lora_files.assert_changed_by(apply({f"lycoris_{MODULE.replace('.', '_')}.oft_blocks": blocks})[0], base, {MODULE: delta})


@pytest.mark.parametrize("ending", ["dora_scale", "lora_magnitude_vector.weight", "lora_magnitude_vector.default.weight"])
def test_dora_of_kohya_and_peft_is_the_same(apply, base, ending):
    weight = base[f"{MODULE}.weight"]
    norm = weight.norm(dim=1, keepdim=True)
    up, down = factors(weight.shape)
    scale = norm * 1.5
    sd = {**peft(MODULE, up, down, RANK), f"{MODULE}.{ending}": scale if ending == "dora_scale" else scale.flatten()}
    wanted = (weight + up @ down) * scale / norm
    lora_files.assert_changed_by(apply(sd)[0], base, {MODULE: wanted - weight})


def test_full_differences_norms_and_biases_are_added(apply, base):
    diff, bias, norm = torch.randn(128, 256), torch.randn(128), torch.randn(128)
    sd = {
        "diffusion_model.final_linear.diff": diff,
        "diffusion_model.final_linear.diff_b": bias,
        "lora_unet_layers_0_self_attention_norm_q.w_norm": norm,
        "diffusion_model.layers.0.adaLN_sa_ln.set_weight": torch.full((256,), 3.0),
    }
    patcher, _, report = apply(sd)
    assert "3 of 3 modules matched" in report
    with patched(patcher) as weight:
        torch.testing.assert_close(weight("diffusion_model.final_linear.weight"), base["final_linear.weight"] + diff)
        torch.testing.assert_close(weight("diffusion_model.final_linear.bias"), base["final_linear.bias"] + bias)
        name = "layers.0.self_attention.norm_q.weight"
        torch.testing.assert_close(weight(ROOT + name), base[name] + norm)
        assert torch.equal(weight("diffusion_model.layers.0.adaLN_sa_ln.weight"), torch.full((256,), 3.0))


def test_partial_match_is_counted_and_warned_of(apply, base, caplog):
    sd, deltas = lora(base)
    sd |= kohya("lora_unet_layers_0_self_attention_qkv", torch.randn(768, 4), torch.randn(4, 256), lora_files.ALPHA)
    sd["lora_unet_layers_0_mlp_up_proj.lora_up.bias"] = torch.zeros(768)
    with caplog.at_level(logging.INFO, "ernie_fast"):
        patcher, _, report = apply(sd)
    lora_files.assert_changed_by(patcher, base, deltas)
    first, second = report.splitlines()
    assert "4 of 6 modules matched" in first
    assert "lora_unet_layers_0_self_attention_qkv" in second
    assert "lora_up.bias" in second
    records = [r for r in caplog.records if r.name == "ernie_fast"]
    lines = [("INFO", first), ("WARNING", f"style.safetensors: {second}")]
    assert [(r.levelname, r.getMessage()) for r in records] == lines


def test_no_match_is_an_error_that_names_the_accepted_forms(apply, base):  # U15
    sd, _ = lora(base, form=lambda module: f"my_trainer.{module}")
    message = lora_files.refusal(apply, sd)
    assert message.startswith("style.safetensors: none of its 4 modules")
    assert "'my_trainer.layers.1.self_attention.to_q'" in message
    assert "trained for" not in message
    for prefix in ("lora_unet_", "lora_transformer_", "lycoris_", "base_model.model.", "transformer.", "unet."):
        assert f"'{prefix}'" in message


@pytest.mark.parametrize(
    ("module", "origin"),
    [
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "SDXL"),
        ("lora_unet_double_blocks_0_img_attn_qkv", "Flux"),
        ("transformer.single_transformer_blocks.0.attn.to_q", "Flux"),
        ("transformer.transformer_blocks.0.attn.to_q", "Qwen-Image"),
        ("diffusion_model.joint_blocks.0.x_block.attn.qkv", "Stable Diffusion 3"),
        ("diffusion_model.blocks.0.self_attn.q", "Wan"),
        ("lora_unet_blocks_0_cross_attn_k", "Wan"),
        ("diffusion_model.layers.0.attention.qkv", "Z-Image"),
        ("base_model.model.model.layers.0.self_attn.q_proj", "language model"),
    ],
)
def test_lora_of_another_model_is_named(apply, module, origin):
    assert origin in lora_files.refusal(apply, kohya(module, torch.randn(64, 4), torch.randn(4, 64), lora_files.ALPHA))


def test_lora_of_another_size_is_an_error_before_sampling(apply):
    message = lora_files.refusal(apply, kohya(FORMS["kohya"](MODULE), torch.randn(4096, 16), torch.randn(16, 4096), 16.0))
    assert "lora_down.weight [16, 4096], lora_up.weight [4096, 16]" in message
    assert "does not fit this model's weight [256, 256]" in message


@pytest.mark.parametrize(
    "held",
    {
        "same_size_other_shape": {"lora_up.weight": (128, 4), "lora_down.weight": (4, 512)},
        "ranks_differ": {"lora_up.weight": (256, 4), "lora_down.weight": (8, 256)},
        "rank_zero": {"lora_up.weight": (256, 0), "lora_down.weight": (0, 256), "alpha": ()},
        "scalar": {"lora_up.weight": (), "lora_down.weight": ()},
        "many_alphas": {"lora_up.weight": (256, 4), "lora_down.weight": (4, 256), "alpha": (2,)},
        "dora": {"lora_up.weight": (256, 4), "lora_down.weight": (4, 256), "dora_scale": (64, 1)},
        "kernel": {"lora_up.weight": (256, 4), "lora_down.weight": (4, 256), "lora_mid.weight": (4, 4, 3, 3)},
        "loha": {"hada_w1_a": (256, 4), "hada_w1_b": (4, 256), "hada_w2_a": (256, 4), "hada_w2_b": (4, 128)},
        "lokr": {"lokr_w1": (8, 8), "lokr_w2": (32, 64)},
        "oft": {"oft_blocks": (4, 32, 32)},
        "oft_without_blocks": {"oft_blocks": (256, 256)},
        "diff": {"diff": (256, 128)},
        "no_bias_there": {"diff_b": (256,)},
    }.items(),
    ids=lambda item: item[0],
)
def test_tensors_that_do_not_fit_are_an_error(apply, held):
    message = lora_files.refusal(apply, {f"{MODULE}.{kind}": torch.ones(shape) for kind, shape in held[1].items()})
    assert f"module '{MODULE}' holds" in message
    assert "does not fit" in message


@pytest.mark.parametrize("kind", ["lora_up.weight", "lora_down.weight", "hada_w1_a", "lokr_w1", "alpha", "dora_scale"])
def test_incomplete_module_is_an_error(apply, kind):
    shape = {"lora_up.weight": (256, 4), "lora_down.weight": (4, 256), "dora_scale": (256, 1), "alpha": ()}.get(kind, (8, 8))
    assert "is missing. The file is incomplete" in lora_files.refusal(apply, {f"{MODULE}.{kind}": torch.ones(shape)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_that_is_not_finite_is_an_error(apply, base, value, dtype):
    sd, _ = lora(base)
    name = f"{FORMS['kohya'](MODULE)}.lora_down.weight"
    sd[name] = sd[name].to(dtype)
    sd[name][1, 2] = value
    assert "NaN or infinity in lora_down.weight" in lora_files.refusal(apply, sd)


def test_two_adapters_or_two_loras_in_one_file_are_an_error(apply, base):
    up, down = factors(base[f"{MODULE}.weight"].shape)
    first, copies = peft(MODULE, up, down, RANK), (up.clone(), down.clone())
    assert "two adapters" in lora_files.refusal(apply, first | lora_files.peft_default(MODULE, *copies, RANK))
    assert "two LoRAs" in lora_files.refusal(apply, first | kohya(f"unet.{MODULE}", *copies, RANK))


def test_two_loras_add_up(apply, base):
    (first, delta), (second, delta_2) = lora(base), lora(base, form=FORMS["bare"], write=peft)
    patcher, _, _ = apply(first)
    stacked, _, _ = apply(second, strength=-0.5, on=patcher, name="two.safetensors")
    lora_files.assert_changed_by(stacked, base, {m: delta[m] - 0.5 * delta_2[m] for m in MODULES})
    lora_files.assert_changed_by(patcher, base, delta)


def test_strength_change_and_removal_restore_the_weights_exactly(apply, base, model):
    sd, deltas = lora(base)
    lora_files.assert_changed_by(apply(sd)[0], base, deltas)
    lora_files.assert_changed_by(apply(sd, strength=2.0)[0], base, {m: 2 * d for m, d in deltas.items()})
    with patched(model) as weight:
        assert all(torch.equal(weight(ROOT + name), tensor) for name, tensor in base.items())


def test_given_model_is_not_changed(apply, base, model):
    before = model.patches_uuid
    patcher, _, _ = apply(lora(base)[0])
    assert patcher is not model
    assert patcher.model is model.model
    assert not model.patches
    assert model.patches_uuid == before


def test_strength_zero_returns_the_same_objects_and_reads_nothing(model, clip, models):
    out = ErnieFastLoRALoader.execute(model, "absent.safetensors", 0.0, clip, 0.0).args
    assert out[:2] == (model, clip)
    assert "not loaded" in out[2]
    assert ErnieFastLoRALoader.execute(model, "absent.safetensors", 0.0).args[0] is model


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_text_encoder_is_changed_too(apply, base, clip, form):
    sd, deltas = lora(base)
    name = f"{TEXT_ROOT}{TEXT_MODULE}.weight"
    original = get_attr(clip.cond_stage_model, name).detach().float().clone()
    up, down = factors(original.shape)
    sd |= kohya(TEXT_FORMS[form](TEXT_MODULE), up, down, RANK)
    patcher, clip_out, report = apply(sd, clip=clip, strength_clip=0.5)
    assert "5 of 5 modules matched; model 4 (strength 1), text encoder 1 (strength 0.5)" in report
    lora_files.assert_changed_by(patcher, base, deltas)
    with patched(clip_out.patcher) as weight:
        torch.testing.assert_close(weight(name), original + 0.5 * up @ down, rtol=0.02, atol=1e-3)  # kept in fp16
    assert not clip.patcher.patches


def test_changed_text_encoder_encodes_differently(apply, clip):
    up, down = factors(torch.Size((256, 192)))
    sd = kohya(TEXT_FORMS["kohya"](TEXT_MODULE), up * 5, down, RANK)
    model_out, clip_out, _ = apply(sd, clip=clip)
    tokens = clip.tokenize("a red apple")
    plain = clip.encode_from_tokens(tokens)
    assert not torch.allclose(clip_out.encode_from_tokens(tokens), plain)
    assert torch.equal(clip.encode_from_tokens(tokens), plain)
    assert not model_out.patches


def test_text_encoder_modules_without_clip_are_reported_or_refused(apply, base):
    up, down = factors(torch.Size((256, 192)))
    text = kohya(TEXT_FORMS["kohya"](TEXT_MODULE), up, down, RANK)
    _, _, report = apply({**lora(base)[0], **text})
    assert "4 of 4 modules matched" in report
    assert "1 for the text encoder not used, as no CLIP is connected" in report
    assert "Connect a CLIP" in lora_files.refusal(apply, text)


# ComfyUI rounds stochastically: for FP8 that is 1.41 times the error of rounding to nearest, for NVFP4 1.83 times (measured).
@pytest.mark.parametrize(("format_name", "bound"), [("float8_e4m3fn", 1.6), ("nvfp4", 2.2)])
def test_change_survives_on_a_quantised_weight(apply, base, format_name, bound):  # U47, U48, U49
    sd, deltas = lora(base, modules=MODULES[:3], scale=3.0)
    patcher, _, _ = apply(sd, on=lora_files.nano_model(quantised(base, format_name)))
    layout = QUANT_ALGOS[format_name]["comfy_tensor_layout"]

    def error_of(weight):
        return (QuantizedTensor.from_float(weight, layout).dequantize() - weight).norm()

    for module, delta in deltas.items():
        stored = get_attr(patcher.model, f"{ROOT}{module}.weight").dequantize().float()
        with patched(patcher) as weight:
            found = weight(f"{ROOT}{module}.weight")
        assert (found - stored - delta).norm() < bound * error_of(stored + delta)
        assert ((found - stored) * delta).sum() / delta.square().sum() == pytest.approx(1, abs=0.1)  # its full strength
        after = get_attr(patcher.model, f"{ROOT}{module}.weight").dequantize().float()
        assert torch.equal(after, stored)


def test_model_of_comfyui_own_loader_works(apply, models, monkeypatch):
    detect = comfy.model_detection.detect_unet_config
    # ComfyUI's detection knows the released size only; the small sizes are put into what it returns.
    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", lambda *a, **k: {**detect(*a, **k), **SIZES})
    sd = ernie_state_dict()
    save(models / "diffusion_models" / "tiny.safetensors", sd)
    model = core_nodes.UNETLoader().load_unet("tiny.safetensors", "default")[0]
    base = {k: v.float() for k, v in sd.items()}
    content, deltas = lora(base, modules=("layers.0.mlp.up_proj",), form=lora_files.dotted("base_model.model."), write=peft)
    patcher, _, _ = apply(content, on=model)
    with patched(patcher) as weight:
        found = weight("diffusion_model.layers.0.mlp.up_proj.weight")
    torch.testing.assert_close(found, base["layers.0.mlp.up_proj.weight"] + deltas["layers.0.mlp.up_proj"], rtol=0.02, atol=2e-3)


def test_model_of_another_kind_is_refused(apply, base, clip):
    with pytest.raises(ValueError, match="an ERNIE-Image model is needed"):
        apply(lora(base)[0], on=clip.patcher)


def test_missing_broken_and_foreign_files_are_refused_before_and_at_run_time(models, model, base):
    loras = models / "loras"
    (loras / "cut.safetensors").write_bytes(save(loras / "whole.safetensors", lora(base)[0]).read_bytes()[:-40])
    (loras / "pickle.pt").write_bytes(b"PK\x03\x04")
    save(loras / "model.safetensors", base)
    expected = {
        "absent.safetensors": "not found in ComfyUI's folder 'loras'",
        "../loras/whole.safetensors": "not found in ComfyUI's folder 'loras'",
        "cut.safetensors": "incomplete",
        "pickle.pt": "can run code when opened",
        "model.safetensors": "this is no LoRA. It looks like an ERNIE-Image diffusion model",
    }
    for name, text in expected.items():
        with pytest.raises(CheckpointError) as error:
            ErnieFastLoRALoader.execute(model, name, 1.0)
        assert text in str(error.value)
        assert ErnieFastLoRALoader.validate_inputs(lora_name=name) == str(error.value)
    assert ErnieFastLoRALoader.validate_inputs(lora_name="whole.safetensors") is True
    assert ErnieFastLoRALoader.validate_inputs(lora_name=None) is True


def test_list_offers_safetensors_files_only(models, base):
    save(models / "loras" / "one" / "style.safetensors", lora(base)[0])
    (models / "loras" / "old.pt").write_bytes(b"")
    schema = ErnieFastLoRALoader.GET_SCHEMA()
    by_id = {i.id: i for i in schema.inputs}
    assert [o.replace("\\", "/") for o in by_id["lora_name"].options] == ["one/style.safetensors"]
    assert list(by_id) == ["model", "lora_name", "strength_model", "clip", "strength_clip"]
    assert all(i.tooltip for i in (*schema.inputs, *schema.outputs))


def test_fingerprint_follows_file_and_strengths(models, base):
    fingerprint = ErnieFastLoRALoader.fingerprint_inputs
    file = save(models / "loras" / "a.safetensors", lora(base)[0])
    first = fingerprint(lora_name="a.safetensors", strength_model=1.0)
    assert first == fingerprint(lora_name="a.safetensors", strength_model=1.0, model=None, clip=None, strength_clip=1.0)
    assert first != fingerprint(lora_name="a.safetensors", strength_model=0.5)
    assert first != fingerprint(lora_name="a.safetensors", strength_model=1.0, strength_clip=0.5)
    save(file, lora(base, modules=(MODULE,))[0])
    assert first != fingerprint(lora_name="a.safetensors", strength_model=1.0)
    assert fingerprint(lora_name=None, strength_model=None)
