"""The model loader against ComfyUI's own loader, on every storage format, and its refusals."""

from __future__ import annotations

import asyncio
import json

import comfy.model_detection
import comfy.sample
import comfy.supported_models
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from ernie_fast.kernels import fp8
from ernie_fast.nodes.loaders.model_loader import ErnieFastModelLoader
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.probe import probe_model
from ernie_files import (
    ernie_state_dict,
    is_block_linear,
    old_scaled_fp8,
    quantised,
    save,
    save_sharded,
    with_prefix,
)

import nodes as core_nodes

FORMATS = {
    "float8_e4m3fn": {},
    "float8_e5m2": {},
    "nvfp4": {},
    "mxfp8": {},
    "int8_tensorwise": {},
    "int8_convrot": {"per_channel": True, "convrot": True},
    "convrot_w4a4": {},
}


@pytest.fixture(scope="module")
def sd():
    return ernie_state_dict()


def ours(name: str, compute: str = "auto"):
    return ErnieFastModelLoader.execute(unet_name=name, compute=compute).result


def paint(model, steps: int = 3) -> torch.Tensor:
    """Sample a small latent through ComfyUI's own sampler."""
    generator = torch.Generator().manual_seed(1)
    positive = [[torch.randn(1, 7, 192, generator=generator), {}]]
    negative = [[torch.randn(1, 3, 192, generator=generator), {}]]
    latent = torch.zeros(1, 128, 4, 6)
    noise = comfy.sample.prepare_noise(latent, 0)
    return comfy.sample.sample(
        model, noise, steps, 4.0, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=0
    )


def format_state_dict(sd, name):
    return quantised(sd, "int8_tensorwise" if name == "int8_convrot" else name, **FORMATS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn])
def test_plain_weights_sample_bit_identically_to_cores_loader(models, core_loader, dtype):
    save(models / "diffusion_models" / "m.safetensors", ernie_state_dict(dtype))
    result = paint(ours("m.safetensors")[0])
    assert torch.isfinite(result).all()
    assert torch.equal(result, paint(core_loader("m.safetensors")))


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_sample_bit_identically_to_cores_loader(models, core_loader, sd, name):
    save(models / "diffusion_models" / "m.safetensors", format_state_dict(sd, name))
    model, line = ours("m.safetensors")
    assert isinstance(model.model.diffusion_model.layers[0].mlp.up_proj.weight, QuantizedTensor)
    result = paint(model)
    assert torch.isfinite(result).all()
    assert torch.equal(result, paint(core_loader("m.safetensors")))
    assert "2 layers, width 256" in line


@pytest.mark.parametrize("elements", [0, 2])
def test_old_scaled_fp8_notation_equals_the_new_one(models, core_loader, sd, elements):  # V9
    save(models / "diffusion_models" / "old.safetensors", old_scaled_fp8(sd, elements))
    model, line = ours("old.safetensors")
    assert "scaled FP8 (E4M3)" in line
    assert torch.equal(paint(model), paint(core_loader("old.safetensors")))
    assert model.model.diffusion_model.layers[0].mlp.up_proj._full_precision_mm_config is (elements == 2)


def test_header_metadata_notation_equals_the_markers(models, core_loader, sd):  # V9
    layers = {n.removesuffix(".weight"): {"format": "float8_e4m3fn"} for n in sd if is_block_linear(n)}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save(models / "diffusion_models" / "new.safetensors", quantised(sd, "float8_e4m3fn"))
    save(models / "diffusion_models" / "m.safetensors", quantised(sd, "float8_e4m3fn", marker=False), metadata)
    result = paint(ours("m.safetensors")[0])
    assert torch.equal(result, paint(ours("new.safetensors")[0]))
    assert torch.equal(result, paint(core_loader("m.safetensors")))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("scale_name", ["weight_scale", "scale_weight"])
def test_scales_without_a_marker_are_used(models, sd, name, scale_name):  # U45, V9
    unmarked = quantised(sd, name, marker=False)
    unmarked = {k.replace(".weight_scale", f".{scale_name}") if k.endswith(".weight_scale") else k: v for k, v in unmarked.items()}
    save(models / "diffusion_models" / "marked.safetensors", quantised(sd, name))
    save(models / "diffusion_models" / "unmarked.safetensors", unmarked)
    assert torch.equal(paint(ours("unmarked.safetensors")[0]), paint(ours("marked.safetensors")[0]))


def test_mxfp8_block_scales_may_be_stored_as_bytes(models, sd):
    new = quantised(sd, "mxfp8")
    save(models / "diffusion_models" / "e8m0.safetensors", new)
    as_bytes = {k: v.view(torch.uint8) if v.dtype == torch.float8_e8m0fnu else v for k, v in new.items()}
    save(models / "diffusion_models" / "u8.safetensors", as_bytes)
    assert torch.equal(paint(ours("u8.safetensors")[0]), paint(ours("e8m0.safetensors")[0]))


def test_int8_without_a_marker_is_refused(tmp_path, sd):
    file = save(tmp_path / "m.safetensors", quantised(sd, "int8_tensorwise", marker=False))
    with pytest.raises(CheckpointError, match=r"layers\.\d\..*I8 weight.*no format marker"):
        probe_model(open_checkpoint(file))


@pytest.mark.parametrize("unknown", ["int8_blockwise", "float8_e4m3fn_blockwise", "hybrid_mxfp8", "", None, 3])
def test_unknown_format_names_the_layer_and_the_known_ones(tmp_path, sd, unknown):  # U46, V9
    broken = quantised(sd, "int8_tensorwise")
    text = json.dumps({"format": unknown}).encode()
    broken["layers.1.mlp.up_proj.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    file = save(tmp_path / "m.safetensors", broken)
    with pytest.raises(CheckpointError, match=rf"'layers\.1\.mlp\.up_proj' is stored as '{unknown}'; known formats are.*nvfp4"):
        probe_model(open_checkpoint(file))


def test_int8_rowwise_is_int8_with_a_scale_per_row(models, sd):  # U46
    rowwise = quantised(sd, "int8_tensorwise", per_channel=True)
    save(models / "diffusion_models" / "int8.safetensors", rowwise)
    text = torch.tensor(list(json.dumps({"format": "int8_rowwise"}).encode()), dtype=torch.uint8)
    renamed = {name: text.clone() if name.endswith(".comfy_quant") else tensor for name, tensor in rowwise.items()}
    save(models / "diffusion_models" / "rowwise.safetensors", renamed)
    assert torch.equal(paint(ours("rowwise.safetensors")[0]), paint(ours("int8.safetensors")[0]))


@pytest.mark.parametrize("marked", [True, False])
def test_rowwise_fp8_files_of_converters_are_read(models, sd, marked):  # U45, U46
    stored, expanded = dict(sd), dict(sd)
    for name in filter(is_block_linear, sd):
        weight, scale = fp8.quantise_rowwise(sd[name])
        stored |= {name: weight, f"{name}_scale": scale}
        expanded[name] = (weight.float() * scale).float()
        if marked:
            text = json.dumps({"format": "float8_e4m3fn_rowwise"}).encode()
            stored[name.replace(".weight", ".comfy_quant")] = torch.tensor(list(text), dtype=torch.uint8)
    save(models / "diffusion_models" / "m.safetensors", stored)
    save(models / "diffusion_models" / "plain.safetensors", {k: v.float() for k, v in expanded.items()})
    model, line = ours("m.safetensors", "fp32")
    assert "row-wise FP8 (E4M3)" in line
    assert torch.equal(paint(model), paint(ours("plain.safetensors", "fp32")[0]))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 60_000])
def test_broken_marker_is_one_error(tmp_path, sd, text):
    broken = quantised(sd, "float8_e4m3fn")
    broken["layers.0.mlp.up_proj.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


@pytest.mark.parametrize("option", [{"convrot_groupsize": "x"}, {"convrot_groupsize": 0}, {"convrot_groupsize": 100}, {"linear_dtype": []}])
def test_broken_convrot_options_are_refused(tmp_path, sd, option):
    broken = quantised(sd, "convrot_w4a4")
    text = json.dumps({"format": "convrot_w4a4", "params": option}).encode()
    broken["layers.1.mlp.up_proj.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.up_proj.*{next(iter(option))}"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "nvfp4", "mxfp8", "int8_tensorwise", "convrot_w4a4"])
def test_missing_scale_is_named(tmp_path, sd, name):
    broken = quantised(sd, name)
    del broken["layers.1.self_attention.to_v.weight_scale"]
    with pytest.raises(CheckpointError, match=r"'layers\.1\.self_attention\.to_v'.*has no weight_scale"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


def test_scale_of_wrong_shape_is_named(tmp_path, sd):
    broken = quantised(sd, "float8_e4m3fn")
    broken["layers.0.mlp.up_proj.weight_scale"] = torch.ones(512, 1)
    with pytest.raises(CheckpointError, match=r"F32 weight_scale \[512, 1\].*1 elements is needed"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


@pytest.mark.parametrize("tensor", ["qweight", "absmax", "quant_state.bitsandbytes__nf4", "proj_down"])
def test_formats_of_other_engines_are_refused_by_name(tmp_path, sd, tensor):
    broken = {**sd, f"layers.0.mlp.up_proj.{tensor}": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="bitsandbytes, AWQ or GPTQ"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


def test_missing_tensor_is_refused_not_warned_about(tmp_path, sd):  # U21, V10
    broken = {k: v for k, v in sd.items() if k != "layers.1.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"1 ERNIE-Image tensors are missing, the first is 'layers\.1\.mlp\.up_proj\.weight'"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


def test_gap_between_layers_is_refused(tmp_path):  # V10
    broken = {k: v for k, v in ernie_state_dict(num_layers=3).items() if not k.startswith("layers.1.")}
    with pytest.raises(CheckpointError, match="layer 1 is missing"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


def test_released_width_with_too_few_layers_is_refused_unless_declared(tmp_path):  # U21, V10
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 1, "ffn_hidden_size": 256, "text_in_dim": 64}
    sd = ernie_state_dict(**sizes)
    with pytest.raises(CheckpointError, match=r"1 of 36 layers found.*num_layers = 1"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", sd)))
    declared = open_checkpoint(save(tmp_path / "declared.safetensors", sd, {"num_layers": "1"}))
    assert probe_model(declared).architecture.num_layers == 1


def test_folder_with_fewer_layers_than_its_config_is_refused(tmp_path, sd):  # V10
    config = {"_class_name": "ErnieImageTransformer2DModel", "num_layers": 4}
    with pytest.raises(CheckpointError, match="2 of 4 layers found"):
        probe_model(open_checkpoint(save_sharded(tmp_path / "t", sd, config=config)))


def test_wrong_shape_is_named(tmp_path, sd):
    broken = {**sd, "layers.1.mlp.linear_fc2.weight": torch.zeros(256, 511)}
    with pytest.raises(CheckpointError, match=r"'layers\.1\.mlp\.linear_fc2\.weight' has shape \[256, 511\]; \[256, 512\]"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", broken)))


FOREIGN = {
    "text encoder": ("model.layers.0.self_attn.q_proj.weight", "ERNIE Text Encoder Loader"),
    "VAE": ("decoder.conv_in.weight", "Load VAE"),
    "LoRA": ("diffusion_model.layers.0.self_attention.to_q.lora_A.weight", "ERNIE LoRA Loader"),
    "Flux": ("double_blocks.0.img_attn.qkv.weight", "Load Diffusion Model"),
    "Stable Diffusion": ("model.diffusion_model.input_blocks.0.0.weight", "Load Checkpoint"),
    "Wan": ("blocks.0.self_attn.q.weight", "Load Diffusion Model"),
    "Z-Image": ("cap_embedder.0.weight", "Load Diffusion Model"),
    "no model known": ("something.weight", "ERNIE Model Loader"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_models_file_is_named_with_what_to_use(tmp_path, kind):  # U25
    name, advice = FOREIGN[kind]
    with pytest.raises(CheckpointError, match=rf"no ERNIE-Image diffusion model\..*{kind}.*{advice}"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", {name: torch.zeros(2, 2)})))


def test_nanos_other_parts_are_recognised(nano):  # U25
    for name, kind in (("ministral-nano", "text encoder"), ("taef2_decoder", "tiny autoencoder"), ("taef2_encoder", "tiny autoencoder")):
        with pytest.raises(CheckpointError, match=kind):
            probe_model(open_checkpoint(nano / f"{name}.safetensors"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 128, "num_attention_heads": 1},
        {"hidden_size": 384, "num_attention_heads": 3, "num_layers": 1},
        {"hidden_size": 256, "num_attention_heads": 4, "rope_axes_dim": (16, 24, 24)},
        {"text_in_dim": 256},
        {"in_channels": 64, "out_channels": 64},
        {"ffn_hidden_size": 320, "num_layers": 5},
    ],
    ids=str,
)
def test_any_size_is_read_from_shapes(tmp_path, sizes):
    sd = ernie_state_dict(**sizes)
    model = load_model(save(tmp_path / "m.safetensors", sd))
    loaded = model.model.diffusion_model.state_dict()
    assert set(loaded) == set(sd)
    assert all(torch.equal(loaded[name].float(), sd[name].float()) for name in sd)
    if "rope_axes_dim" in sizes:
        assert tuple(model.model.diffusion_model.pos_embed.axes_dim) == sizes["rope_axes_dim"]


def test_head_size_that_rope_cannot_split_is_refused(tmp_path):
    sd = ernie_state_dict(hidden_size=240, num_attention_heads=2, rope_axes_dim=(40, 40, 40))
    with pytest.raises(CheckpointError, match="head size 120; a multiple of 16"):
        probe_model(open_checkpoint(save(tmp_path / "m.safetensors", sd)))


def test_all_in_one_checkpoint_gives_its_diffusion_model(models, sd):
    parts = {
        **with_prefix(sd, "model.diffusion_model."),
        "text_encoders.ministral3_3b.transformer.model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2),
        "vae.decoder.conv_in.weight": torch.zeros(2, 2),
    }
    save(models / "checkpoints" / "aio.safetensors", parts)
    save(models / "diffusion_models" / "alone.safetensors", sd)
    assert torch.equal(paint(ours("checkpoints/aio.safetensors")[0]), paint(ours("alone.safetensors")[0]))


def test_scaled_fp8_works_behind_a_prefix(models, sd):
    save(models / "diffusion_models" / "bare.safetensors", quantised(sd, "float8_e4m3fn"))
    expected = paint(ours("bare.safetensors")[0])
    for name, content in {
        "markers": quantised(sd, "float8_e4m3fn"),
        "unmarked": quantised(sd, "float8_e4m3fn", marker=False),
        "old": old_scaled_fp8(sd),
    }.items():
        save(models / "diffusion_models" / f"{name}.safetensors", with_prefix(content, "model.diffusion_model."))
        assert torch.equal(paint(ours(f"{name}.safetensors")[0]), expected), name


def test_sharded_folder_and_repository_are_offered_and_load(models, sd):
    save_sharded(models / "diffusion_models" / "sharded", sd)
    save_sharded(models / "diffusers" / "ERNIE-Image" / "transformer", sd)
    save(models / "diffusion_models" / "one.safetensors", sd)
    schema = ErnieFastModelLoader.GET_SCHEMA()
    offered = ErnieFastModelLoader.define_schema().inputs[0].options
    assert schema.node_id == "ErnieFastModelLoader"
    assert offered == ["one.safetensors", "sharded", "diffusers/ERNIE-Image/transformer"]
    expected = paint(ours("one.safetensors")[0])
    for name in offered[1:]:
        assert torch.equal(paint(ours(name)[0]), expected)


def test_odd_entries_in_the_model_folders_stop_no_list(models, sd):
    (models / "diffusers" / "odd").mkdir()
    (models / "diffusers" / "odd" / "transformer").write_text("a file of this name")
    (models / "diffusers" / "empty" / "transformer").mkdir(parents=True)
    save(models / "diffusion_models" / "Upper.SAFETENSORS", sd)
    assert ErnieFastModelLoader.define_schema().inputs[0].options == ["Upper.SAFETENSORS"]


def test_fp16_file_never_computes_in_fp16(models):  # U05
    save(models / "diffusion_models" / "m.safetensors", ernie_state_dict(torch.float16))
    for compute in ("auto", "bf16", "fp32"):
        model, line = ours("m.safetensors", compute)
        assert model.model.get_dtype_inference() in (torch.bfloat16, torch.float32)
        assert "fp16" not in line.split("computes in")[1].split("(")[0]


def test_compute_choice_sets_the_dtype_and_is_told(models, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    save(models / "diffusion_models" / "q.safetensors", quantised(sd, "float8_e4m3fn"))
    exact = paint(ours("m.safetensors", "fp32")[0])
    for name in ("m.safetensors", "q.safetensors"):
        for compute, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            model, line = ours(name, compute)
            assert model.model.get_dtype_inference() == dtype
            assert line.endswith(f"computes in {compute} (as chosen)")
    error = (paint(ours("m.safetensors", "bf16")[0]) - exact).norm() / exact.norm()
    assert 0 < error < 0.05


def test_summary_names_size_format_and_reason(nano, models):
    (models / "diffusion_models" / "nano.safetensors").symlink_to(nano / "ernie-image-nano.safetensors")
    _, line = ours("nano.safetensors")
    assert line == (
        "ERNIE-Image, 12 layers, width 256, text width 192, 11.0 M parameters; BF16, 0.02 GB; computes in fp32 (on the CPU)"
    )


def test_quantised_boundary_layers_are_warned_about(models, sd, caplog):  # U55
    content = quantised(sd, "float8_e4m3fn")
    scale = sd["final_linear.weight"].abs().max().float() / 448
    content["final_linear.weight"] = (sd["final_linear.weight"].float() / scale).to(torch.float8_e4m3fn)
    content["final_linear.weight_scale"] = scale
    save(models / "diffusion_models" / "m.safetensors", content)
    ours("m.safetensors")
    assert "final_linear are quantised too" in caplog.text


def test_unused_tensors_are_warned_about(models, sd, caplog):
    save(models / "diffusion_models" / "m.safetensors", with_prefix({**sd, "extra.weight": torch.zeros(2)}, "transformer."))
    ours("m.safetensors")
    assert "1 tensors are not used, the first is 'extra.weight'" in caplog.text


def test_validation_and_run_give_the_same_text(models, sd):
    save(models / "diffusion_models" / "cut.safetensors", sd)
    file = models / "diffusion_models" / "cut.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    hostile = ("../escape.safetensors", "/etc/passwd", "", "C:\\x.safetensors", "x" * 5000, "a\0b", "\ud800", "a/../../b", ".")
    for name in ("cut.safetensors", "absent.safetensors", *hostile):
        with pytest.raises(CheckpointError) as error:
            ours(name)
        assert ErnieFastModelLoader.validate_inputs(unet_name=name) == str(error.value)
    assert ErnieFastModelLoader.validate_inputs(unet_name=None) is True


def test_replaced_file_is_loaded_again(models, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    first = ErnieFastModelLoader.fingerprint_inputs(unet_name="m.safetensors", compute="auto")
    assert first == ErnieFastModelLoader.fingerprint_inputs(unet_name="m.safetensors", compute="auto")
    save(models / "diffusion_models" / "m.safetensors", ernie_state_dict(num_layers=1))
    assert first != ErnieFastModelLoader.fingerprint_inputs(unet_name="m.safetensors", compute="auto")


def test_model_can_be_cloned_patched_and_rebuilt_by_comfyui(models, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model = ours("m.safetensors")[0]
    plain = paint(model)
    key = "diffusion_model.layers.0.mlp.up_proj.weight"
    patched = model.clone()
    patched.add_patches({key: (torch.full((512, 256), 0.01),)}, 1.0)
    assert not torch.equal(paint(patched), plain)
    assert torch.equal(paint(model), plain)
    rebuild, arguments = model.cached_patcher_init
    assert torch.equal(paint(rebuild(*arguments, disable_dynamic=True)), plain)


def test_package_loads_through_comfyuis_own_node_loader():
    from conftest import ROOT

    assert asyncio.run(core_nodes.load_custom_node(str(ROOT), module_parent="custom_nodes"))
    assert "ErnieFastModelLoader" in core_nodes.NODE_CLASS_MAPPINGS
