"""Quantise at load, and the file that ERNIE Save Checkpoint writes, against ComfyUI's own loader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import comfy.model_management
import comfy.ops
import folder_paths
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from ernie_fast.kernels.formats import FORMATS
from ernie_fast.nodes.loaders.lora import apply_lora
from ernie_fast.nodes.loaders.model_loader import ErnieFastModelLoader
from ernie_fast.nodes.loaders.save import save_model
from ernie_fast.nodes.loaders.save_checkpoint import ErnieFastSaveCheckpoint
from ernie_fast.nodes.model.architecture import BOUNDARY_LINEARS
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.quantise import WEIGHT_FORMATS, QuantisePolicy
from ernie_files import ernie_state_dict, quantised, save
from safetensors import safe_open
from safetensors.torch import load_file
from sampling import paint

NATIVE = [name for name, chosen in WEIGHT_FORMATS.items() if chosen.format in QUANT_ALGOS]


@pytest.fixture(scope="module")
def sd():
    return ernie_state_dict()


@pytest.fixture
def output(tmp_path, monkeypatch, models):
    """An output folder of its own, in which ComfyUI's loaders look, as its main.py arranges."""
    folder = tmp_path / "output"
    monkeypatch.setattr(folder_paths, "output_directory", str(folder))
    paths, extensions = folder_paths.folder_names_and_paths["diffusion_models"]
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "diffusion_models", ([*paths, str(folder / "diffusion_models")], extensions)
    )
    return folder / "diffusion_models"


def quantised_names(model) -> set[str]:
    parameters = model.model.diffusion_model.named_parameters()
    return {name.removesuffix(".weight") for name, p in parameters if isinstance(p.data, QuantizedTensor)}


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_quantised_at_load_stays_close(models, sd, weight_format):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model, line = ErnieFastModelLoader.execute("m.safetensors", "fp32", weight_format).args
    assert f"BF16, 14 layers quantised at load to {WEIGHT_FORMATS[weight_format].title}" in line
    assert torch.isfinite(paint(model)).all()
    for name in quantised_names(model):
        module = model.model.diffusion_model.get_submodule(name)
        original = sd[f"{name}.weight"].float()
        noise = module.weight.data.dequantize().float() - original
        assert 10 * torch.log10(original.square().mean() / noise.square().mean()) > (17 if "4" in weight_format else 30)


@pytest.mark.parametrize("weight_format", NATIVE)
def test_saved_file_is_read_by_cores_loader_to_the_same_weights(models, output, core_loader, sd, weight_format):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model, _ = ErnieFastModelLoader.execute("m.safetensors", "auto", weight_format).args
    summary = ErnieFastSaveCheckpoint.execute(model, f"sub/{weight_format}", False).args[0]
    assert summary.startswith(f"diffusion_models/sub/{weight_format}.safetensors: ")
    assert "ComfyUI's Load Diffusion Model reads it too" in summary
    theirs = core_loader(f"sub/{weight_format}.safetensors")
    assert quantised_names(theirs) == quantised_names(model)
    wanted = paint(model)
    assert torch.equal(paint(theirs), wanted)
    again = ErnieFastModelLoader.execute(f"sub/{weight_format}.safetensors", "auto").args[0]
    assert torch.equal(paint(again), wanted)


@pytest.mark.parametrize("weight_format", [name for name in WEIGHT_FORMATS if name not in NATIVE])
def test_saved_file_of_our_own_formats_reads_back_here(models, output, sd, weight_format):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model, _ = ErnieFastModelLoader.execute("m.safetensors", "auto", weight_format).args
    summary = ErnieFastSaveCheckpoint.execute(model, "own.safetensors", False).args[0]
    assert "only ERNIE Model Loader reads" in summary
    again, line = ErnieFastModelLoader.execute("own.safetensors", "auto").args
    assert FORMATS[WEIGHT_FORMATS[weight_format].format].title in line
    assert torch.equal(paint(again), paint(model))


def test_streaming_reader_knows_every_dtype_that_is_written(models, output, sd):
    """ComfyUI's dynamic VRAM reader stops at F8_E8M0."""
    known = set(comfy.utils._TYPES)
    for weight_format in WEIGHT_FORMATS:
        save(models / "diffusion_models" / "m.safetensors", sd)
        model = ErnieFastModelLoader.execute("m.safetensors", "auto", weight_format).args[0]
        ErnieFastSaveCheckpoint.execute(model, weight_format, False)
        with safe_open(output / f"{weight_format}.safetensors", "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} <= known  # noqa: SIM118


def test_boundary_layers_and_chosen_blocks_stay_16_bit(models, sd):  # U55
    save(models / "diffusion_models" / "m.safetensors", sd)
    model = ErnieFastModelLoader.execute("m.safetensors", "auto", "fp8", "0.self_attention, to_v,1.gate_proj").args[0]
    names = quantised_names(model)
    assert not names & set(BOUNDARY_LINEARS)
    assert names == {
        "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.linear_fc2", "layers.1.self_attention.to_q",
        "layers.1.self_attention.to_k", "layers.1.self_attention.to_out.0", "layers.1.mlp.up_proj", "layers.1.mlp.linear_fc2",
    }  # fmt: skip


@pytest.mark.parametrize("keep", ["0-1", "self_attention, mlp", "x", "2", "1-0", "-1", "0..to_v", "0,,to_v;", "layers.0.mlp", "99999"])
def test_unusable_keep_is_the_same_error_before_and_at_the_run(models, sd, keep):
    save(models / "diffusion_models" / "m.safetensors", sd)
    message = ErnieFastModelLoader.validate_inputs(unet_name="m.safetensors", weight_format="fp8", keep_16bit=keep)
    assert isinstance(message, str)
    assert "keep_16bit" in message
    with pytest.raises(ValueError, match="keep_16bit") as caught:
        ErnieFastModelLoader.execute("m.safetensors", "auto", "fp8", keep)
    assert str(caught.value) == message


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "plain fp8"])
def test_a_quantised_file_is_not_quantised_again(models, sd, dtype):
    stored = ernie_state_dict(torch.float8_e4m3fn) if dtype == "plain fp8" else quantised(sd, dtype)
    save(models / "diffusion_models" / "m.safetensors", stored)
    message = ErnieFastModelLoader.validate_inputs(unet_name="m.safetensors", weight_format="nvfp4", keep_16bit="")
    assert "Only BF16, FP16 and FP32 files are quantised at load" in str(message)


def test_unknown_weight_format_names_the_allowed(models, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    message = ErnieFastModelLoader.validate_inputs(unet_name="m.safetensors", weight_format="int3", keep_16bit="")
    assert "allowed are as stored, fp8, fp8_rowwise" in str(message)


def test_cancelling_stops_at_the_next_layer(models, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    comfy.model_management.interrupt_current_processing(True)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ErnieFastModelLoader.execute("m.safetensors", "auto", "fp8")


def test_model_is_rebuilt_with_its_policy(tmp_path, sd):
    file = save(tmp_path / "m.safetensors", sd)
    model = load_model(file, policy=QuantisePolicy("int8_convrot", "1"))
    function, arguments = model.cached_patcher_init
    again = function(*arguments, disable_dynamic=True)
    assert quantised_names(again) == quantised_names(model)
    assert torch.equal(paint(again), paint(model))


def test_header_says_what_the_file_was_made_from(models, output, sd):
    source = save(models / "diffusion_models" / "m.safetensors", sd)
    model = ErnieFastModelLoader.execute("m.safetensors", "auto", "nvfp4", "0").args[0]
    ErnieFastSaveCheckpoint.execute(model, "x", False)
    with safe_open(output / "x.safetensors", "pt") as file:
        made = json.loads(file.metadata()["ernie_fast"])
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert made["source"] == {"name": "m.safetensors", "sha256": {"m.safetensors": digest}}
    assert made["weight_format"] == "nvfp4"
    assert made["keep_16bit"] == "0"
    assert made["versions"]["torch"] == torch.__version__.split("+")[0] or made["versions"]["torch"] == torch.__version__


def test_existing_file_is_replaced_only_when_told(models, output, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model = ErnieFastModelLoader.execute("m.safetensors", "auto").args[0]
    output.mkdir(parents=True)
    (output / "x.safetensors").write_bytes(b"mine")
    assert ErnieFastSaveCheckpoint.validate_inputs(filename="x") is True  # the graph that saved it may be queued again
    with pytest.raises(ValueError, match="already in"):
        ErnieFastSaveCheckpoint.execute(model, "x", False)
    assert (output / "x.safetensors").read_bytes() == b"mine"
    ErnieFastSaveCheckpoint.execute(model, "x", True)
    assert load_file(output / "x.safetensors").keys() == sd.keys()


@pytest.mark.parametrize("fault", ["disk", "cancel"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(models, output, sd, monkeypatch, fault):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model = ErnieFastModelLoader.execute("m.safetensors", "auto", "fp8").args[0]
    output.mkdir(parents=True)
    (output / "x.safetensors").write_bytes(b"mine")
    if fault == "cancel":
        comfy.model_management.interrupt_current_processing(True)
        expected: type[BaseException] = comfy.model_management.InterruptProcessingException
    else:

        def full(_tensors, path, metadata):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        expected = OSError
    with pytest.raises(expected):
        ErnieFastSaveCheckpoint.execute(model, "x", True)
    assert [path.name for path in output.iterdir()] == ["x.safetensors"]
    assert (output / "x.safetensors").read_bytes() == b"mine"


def test_too_little_space_is_said_before_writing(models, output, sd, monkeypatch):
    save(models / "diffusion_models" / "m.safetensors", sd)
    model = ErnieFastModelLoader.execute("m.safetensors", "auto").args[0]
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"0\.0 GB free; the file needs 0\.0 GB"):
        ErnieFastSaveCheckpoint.execute(model, "x", False)


@pytest.mark.parametrize(
    "name", ["", " ", "../x", "a/../../x", "/etc/x", "C:\\x", "a\0b", "con", "nul.txt", "x?", "a" * 300, "x.", ".safetensors", "a//b"]
)
def test_hostile_names_are_refused(output, name):
    message = ErnieFastSaveCheckpoint.validate_inputs(filename=name)
    assert str(message).startswith("filename is")


def test_a_link_out_of_the_folder_is_refused(output, tmp_path):
    output.mkdir(parents=True)
    (output / "out").symlink_to(tmp_path)
    assert "leads out of the folder" in str(ErnieFastSaveCheckpoint.validate_inputs(filename="out/x"))


def test_loras_are_merged_into_the_saved_file(models, output, sd):
    save(models / "diffusion_models" / "m.safetensors", sd)
    up, down = torch.randn(256, 4) * 0.1, torch.randn(4, 256) * 0.1
    module = "diffusion_model.layers.0.self_attention.to_q"
    lora = save(models / "loras" / "l.safetensors", {f"{module}.lora_B.weight": up, f"{module}.lora_A.weight": down})
    model = ErnieFastModelLoader.execute("m.safetensors", "auto").args[0]
    patched = apply_lora(open_checkpoint(lora), model, None, 0.5, 0)[0]
    ErnieFastSaveCheckpoint.execute(patched, "x", False)
    saved = load_file(output / "x.safetensors")
    change = saved["layers.0.self_attention.to_q.weight"].float() - sd["layers.0.self_attention.to_q.weight"].float()
    assert (change - 0.5 * up @ down).abs().max() < 2e-3
    assert torch.equal(saved["layers.0.self_attention.to_k.weight"], sd["layers.0.self_attention.to_k.weight"])


def test_other_models_are_refused(models, output):
    class Other:
        model = torch.nn.Linear(1, 1)

    with pytest.raises(ValueError, match="the model is Linear; an ERNIE-Image model is needed"):
        save_model(Other(), output / "x.safetensors")


def test_nothing_is_loaded_from_a_wrong_name(models, sd):
    with pytest.raises(CheckpointError):
        ErnieFastModelLoader.execute("missing.safetensors", "auto", "fp8")
