"""Nunchaku Lite: layers are unpacked, a file loads as the same weights in `comfy_quant` form do, what is not read is one error."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from ernie_fast.kernels import nunchaku_lite as lite
from ernie_fast.kernels import svdquant
from ernie_fast.kernels.svdquant import SVDQuantWeight
from ernie_fast.nodes.loaders.model_loader import ErnieFastModelLoader
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.probe import probe_model
from ernie_fast.nodes.model.quantise import QuantisePolicy
from ernie_files import ernie_state_dict, is_block_linear, save, save_sharded, with_prefix
from nunchaku_files import manifest, metadata, nunchaku_lite, pack_awq, pack_svdquant
from sampling import condition, paint

PARTS = lite.TENSORS
TEXT = 384
LAYER = "layers.0.mlp.up_proj"


def random_svdquant(rows: int, columns: int, rank: int) -> SVDQuantWeight:
    return SVDQuantWeight(
        torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8),
        torch.rand(columns // 64, rows).bfloat16(),
        torch.randn(columns, rank).bfloat16(),
        torch.randn(rows, rank).bfloat16(),
        torch.rand(columns).bfloat16(),
    )


@pytest.fixture(scope="module")
def files():
    """The same small model as (Nunchaku Lite, comfy_quant) state dicts."""
    sd = ernie_state_dict(text_in_dim=TEXT)
    smooth = torch.Generator().manual_seed(0)
    stored = {
        name.removesuffix(".weight"): svdquant.quantize(
            tensor, smooth=torch.rand(tensor.shape[1], generator=smooth) + 0.5, refits=0
        )
        for name, tensor in sd.items()
        if is_block_linear(name)
    }
    return nunchaku_lite(sd, stored)


def painted(model) -> torch.Tensor:
    return paint(model, positive=condition(7, TEXT), negative=condition(7, TEXT, seed=2))


def error_of(path) -> str:
    with pytest.raises(CheckpointError) as raised:
        probe_model(open_checkpoint(path))
    return str(raised.value)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(128, 128, 16), (256, 384, 48), (384, 256, 32)])
def test_svdquant_layer_is_unpacked(rows: int, columns: int, rank: int):
    natural = random_svdquant(rows, columns, rank)
    found = lite.unpack({**pack_svdquant(natural), "bias": torch.zeros(rows)})
    assert all(torch.equal(getattr(found, name), getattr(natural, name)) for name in PARTS)
    assert all(getattr(found, name).is_contiguous() for name in PARTS)


@pytest.mark.parametrize(("rows", "columns"), [(4, 64), (128, 256), (36, 192)])
def test_awq_layer_is_expanded(rows: int, columns: int):
    weight = torch.randn(rows, columns) + 0.5
    stored, packed = pack_awq(weight)
    found = lite.unpack_awq({**packed, "bias": torch.zeros(rows)})
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert torch.equal(found, stored)
    assert (stored.float() - weight).abs().max() < 0.35


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("proj_up", None),
        ("qweight", torch.zeros(128, 64, dtype=torch.int32)),
        ("qweight", torch.zeros(64, 64, dtype=torch.int8)),
        ("qweight", torch.zeros(0, 64, dtype=torch.int8)),
        ("wscales", torch.zeros(8, 128, dtype=torch.float8_e4m3fn)),
        ("proj_down", torch.zeros(128, 0, dtype=torch.bfloat16)),
        ("smooth_factor", torch.ones(64, dtype=torch.bfloat16)),
        ("smooth_factor", torch.ones(128)),
    ],
    ids=["missing", "AWQ", "no whole tile", "no rows", "NVFP4", "no rank", "short", "dtype"],
)
def test_other_svdquant_layer_is_refused(name: str, tensor: torch.Tensor | None):
    packed = pack_svdquant(random_svdquant(128, 128, 16))
    packed = {k: v for k, v in packed.items() if k != name} | ({} if tensor is None else {name: tensor})
    with pytest.raises(ValueError, match=r"needed|only INT4"):
        lite.unpack(packed)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("wzeros", None),
        ("qweight", torch.zeros(32, 64, dtype=torch.int16)),
        ("qweight", torch.zeros(32, 16, dtype=torch.int32)),
        ("wzeros", torch.zeros(1, 128, dtype=torch.bfloat16)),
        ("wscales", torch.zeros(2, 128)),
    ],
    ids=["missing", "int16", "no whole group", "short", "float32"],
)
def test_other_awq_layer_is_refused(name: str, tensor: torch.Tensor | None):
    packed = pack_awq(torch.randn(128, 128))[1]
    packed = {k: v for k, v in packed.items() if k != name} | ({} if tensor is None else {name: tensor})
    with pytest.raises(ValueError, match="needed"):
        lite.unpack_awq(packed)


@pytest.mark.parametrize("form", ["manifest", "diffusers folder", "prefix", "zero bias"])
def test_file_loads_as_the_same_weights_in_comfy_quant_form(tmp_path, files, form):
    stored, comfy = files
    header = metadata(manifest(stored))
    if form == "diffusers folder":
        path = save_sharded(
            tmp_path / "lite", stored, config={"quantization_config": {"quant_method": "nunchaku_lite"}}
        )
    elif form == "prefix":
        path = save(tmp_path / "lite.safetensors", with_prefix(stored, "model.diffusion_model."), header)
    elif form == "zero bias":
        biased = {**stored, f"{LAYER}.bias": torch.zeros(512, dtype=torch.bfloat16)}
        path = save(tmp_path / "lite.safetensors", biased, metadata(manifest(biased)))
    else:
        path = save(tmp_path / "lite.safetensors", stored, header)
    assert probe_model(open_checkpoint(path)).unused == ()
    model, other = load_model(path), load_model(save(tmp_path / "comfy.safetensors", comfy))
    assert isinstance(model.model.diffusion_model.layers[0].mlp.up_proj.weight, QuantizedTensor)
    found, wanted = (m.model.diffusion_model.state_dict() for m in (model, other))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    picture = painted(model)
    assert torch.isfinite(picture).all()
    assert torch.equal(picture, painted(other))


def test_summary_names_the_format_and_the_size_in_memory(models, files):
    stored, comfy = files
    save(models / "diffusion_models" / "lite.safetensors", stored, metadata(manifest(stored)))
    save(models / "diffusion_models" / "comfy.safetensors", comfy)
    line, other = (
        ErnieFastModelLoader.execute(unet_name=f"{name}.safetensors", compute="auto").result[1]
        for name in ("lite", "comfy")
    )
    assert "SVDQuant W4A4, " in line
    assert line == other


def test_file_is_not_quantised_again(tmp_path, files):
    path = save(tmp_path / "lite.safetensors", files[0], metadata(manifest(files[0])))
    with pytest.raises(CheckpointError, match="stored as SVDQuant W4A4, and weight_format"):
        load_model(path, policy=QuantisePolicy("fp8"))


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("version",), 2, "version is 2; allowed is 1"),
        (("schema",), "other", "schema is 'other'"),
        (("nunchaku_format_version",), None, "nunchaku_format_version is None"),
        (("structural_patches",), [{"type": "split_linear_input"}], "structural_patches is"),
        (("targets", 3, "precision"), "fp4", "precision is 'fp4'; allowed is 'int4'"),
        (("targets", 3, "group_size"), 128, "group_size is 128; allowed is 64"),
        (("targets", 3, "nunchaku_op"), "adanorm_awq_w4a16", "nunchaku_op is 'adanorm_awq_w4a16'"),
    ],
)
def test_manifest_that_is_not_read_is_one_error(tmp_path, files, keys, value, reason):
    changed = copy.deepcopy(manifest(files[0]))
    part = changed
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    message = error_of(save(tmp_path / "m.safetensors", files[0], metadata(changed)))
    assert reason in message
    assert message.startswith("m.safetensors: a Nunchaku Lite file that is not read")
    assert "weight_format 'svdquant_w4a4'" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "quantization_config cannot be read"),
        ("[]", "runtime_manifest in the header is missing.*'logical' order"),
        (json.dumps({"method": "svdquant"}), "runtime_manifest in the header is missing.*'logical' order"),
    ],
)
def test_header_without_a_manifest_is_one_error(tmp_path, files, text, reason):
    path = save(tmp_path / "m.safetensors", files[0], {"quantization_config": text})
    with pytest.raises(CheckpointError, match=reason):
        load_model(path)


def test_other_method_is_one_error(tmp_path, files):
    path = save(tmp_path / "m.safetensors", files[0], metadata(manifest(files[0]), method="gptq"))
    assert "method is 'gptq'; allowed is 'svdquant'" in error_of(path)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("bias", torch.ones(512, dtype=torch.bfloat16), rf"'{LAYER}.bias' is not zero; allowed is no bias in a block"),
        ("bias", torch.zeros(512, dtype=torch.int8), rf"'{LAYER}.bias' is not zero"),
        ("wscales", torch.zeros(16, 512, dtype=torch.float8_e4m3fn), rf"layer '{LAYER}' .*only INT4 is read.*FP4"),
        ("proj_up", None, rf"layer '{LAYER}' .*has no proj_up"),
        ("proj_up", torch.zeros(512, 32, dtype=torch.float64), "proj_up is None .*is needed"),
        ("qweight", torch.zeros(500, 128, dtype=torch.int8), "500 x 256; multiples of 128"),
        ("wscales", None, "belongs to a format that is not read here"),
    ],
    ids=["bias", "bias of integers", "FP4", "missing", "dtype", "logical", "no scales"],
)
def test_layer_that_is_not_read_is_one_error(tmp_path, files, name, tensor, reason):
    changed = {k: v for k, v in files[0].items() if k != f"{LAYER}.{name}"}
    changed |= {} if tensor is None else {f"{LAYER}.{name}": tensor}
    path = save(tmp_path / "m.safetensors", changed, metadata(manifest(files[0])))
    with pytest.raises(CheckpointError, match=reason):
        load_model(path)


def test_missing_layer_is_one_error(tmp_path, files):
    changed = {name: tensor for name, tensor in files[0].items() if not name.startswith("time_embedding.linear_1.")}
    assert "time_embedding.linear_1" in error_of(save(tmp_path / "m.safetensors", changed, metadata(manifest(changed))))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"smooth_mode": "weight_only"}, "smooth_mode 'weight_only', only 'ones' is read"),
        ({"params": {"act_unsigned": True}}, "act_unsigned True, only False is read"),
        ({"smooth_mode": "ones", "act_unsigned": False}, None),
    ],
)
def test_comfy_quant_file_of_a_wrong_smoothing_is_one_error(tmp_path, files, options, reason):
    marker = json.dumps({"format": "svdquant_w4a4", **options}).encode()
    changed = {**files[1], f"{LAYER}.comfy_quant": torch.tensor(list(marker), dtype=torch.uint8)}
    path = save(tmp_path / "m.safetensors", changed)
    if reason is None:
        assert probe_model(open_checkpoint(path)).storage.layers[LAYER]["smooth_mode"] == "ones"
    else:
        assert f"layer '{LAYER}' (SVDQuant W4A4) has {reason}" in error_of(path)
