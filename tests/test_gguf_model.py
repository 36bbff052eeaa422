"""GGUF files of the diffusion model: every type, every converter's habits, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import folder_paths
import gguf
import gguf_files
import numpy as np
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from ernie_fast.kernels.gguf.qtypes import QTYPES
from ernie_fast.nodes.loaders.files import list_models
from ernie_fast.nodes.loaders.model_loader import ErnieFastModelLoader
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.probe import probe_model
from ernie_files import ernie_state_dict, is_block_linear, save, with_prefix
from gguf_files import block_linears_as, write_gguf
from sampling import paint

CONV = "x_embedder.proj.weight"
ENCODED = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS")


@pytest.fixture(scope="module")
def sd():
    return ernie_state_dict()


def dequantised(file: Path) -> dict[str, torch.Tensor]:
    """Return what gguf-py reads from a file, as float32 in torch's shapes."""
    out = {}
    for tensor in gguf.GGUFReader(file).tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        out[tensor.name] = torch.from_numpy(np.array(data)).reshape(*reversed([int(n) for n in tensor.shape]))
    return out


@pytest.mark.parametrize("qtype", [*ENCODED, "BF16", "F16", "F32"])
def test_every_type_paints_as_its_dequantised_weights(tmp_path, sd, qtype):
    file = write_gguf(tmp_path / "m.gguf", sd, block_linears_as(qtype))
    plain = save(tmp_path / "m.safetensors", dequantised(file))
    result = paint(load_model(file, "fp32"))
    assert torch.isfinite(result).all()
    assert torch.equal(result, paint(load_model(plain, "fp32")))


@pytest.mark.parametrize("qtype", [name for name in QTYPES if name.startswith(("IQ2", "IQ3"))])
def test_vector_types_load(tmp_path, sd, qtype):
    """No program in reach encodes these; the blocks are random bytes with small scales."""
    generator = np.random.default_rng(0)

    def write(name: str) -> str:
        return qtype if name == "layers.0.mlp.up_proj.weight" else "F32"

    def blocks(tensor, kind):
        data = generator.integers(0, 256, (tensor.shape[0], QTYPES[kind].row_bytes(tensor.shape[1])), dtype=np.uint8)
        data.reshape(-1, QTYPES[kind].type_size)[:, :2] = np.array([0.01], np.float16).view(np.uint8)
        return data

    real = gguf_files.stored
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "stored", lambda t, kind: blocks(t, kind) if kind == qtype else real(t, kind))
        file = write_gguf(tmp_path / "m.gguf", sd, write)
    plain = save(tmp_path / "m.safetensors", dequantised(file))
    assert torch.equal(paint(load_model(file, "fp32")), paint(load_model(plain, "fp32")))


@pytest.mark.parametrize("architecture", ["wan", None, "ernie_image", "ernie-image", "ernie", "pig", "cow", "llama"])
def test_the_architecture_string_is_only_a_hint(tmp_path, sd, architecture):  # U16, U29, U30, V7
    file = write_gguf(tmp_path / "m.gguf", sd, block_linears_as("Q8_0"), architecture)
    probe = probe_model(open_checkpoint(file))
    assert probe.architecture.num_layers == 2
    assert probe.storage.title == "GGUF Q8_0"


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "transformer.", "diffusion_model.", "model."])
def test_known_prefixes(tmp_path, sd, prefix):  # V7
    file = write_gguf(tmp_path / "m.gguf", with_prefix(sd, prefix), lambda n: block_linears_as("Q8_0")(n.removeprefix(prefix)))
    bare = write_gguf(tmp_path / "bare.gguf", sd, block_linears_as("Q8_0"))
    assert torch.equal(paint(load_model(file)), paint(load_model(bare)))


def test_quantised_vectors_and_convolution_are_expanded(tmp_path, sd):  # U29
    flat = {**sd, CONV: sd[CONV].flatten(1)}
    file = write_gguf(tmp_path / "m.gguf", flat, lambda name: "Q8_0" if sd[name].shape[0] % 32 == 0 else "F32", None)
    model = load_model(file, "fp32")
    network = model.model.diffusion_model
    assert network.x_embedder.proj.weight.shape == sd[CONV].shape
    assert not isinstance(network.layers[0].adaLN_sa_ln.weight.data, QuantizedTensor)
    wanted = dequantised(file)
    assert torch.equal(network.layers[0].adaLN_sa_ln.weight.data.float(), wanted["layers.0.adaLN_sa_ln.weight"])
    assert torch.isfinite(paint(model)).all()


def test_brain_float_vectors_and_4d_convolution(tmp_path, sd):  # U29, U42
    file = write_gguf(tmp_path / "m.gguf", sd, lambda name: "Q8_0" if is_block_linear(name) else "BF16")
    assert probe_model(open_checkpoint(file)).architecture.in_channels == 128
    assert torch.equal(load_model(file).model.diffusion_model.x_embedder.proj.weight.data.float(), sd[CONV].float())


def test_shape_before_flattening_is_taken_from_the_file(tmp_path, sd):  # U42
    flat = {**sd, CONV: sd[CONV].reshape(-1, 256)}
    fields = {f"comfy.gguf.orig_shape.{CONV}": [int(n) for n in sd[CONV].shape]}
    file = write_gguf(tmp_path / "m.gguf", flat, lambda name: "Q8_0" if name == CONV else "F32", fields=fields)
    weight = load_model(file).model.diffusion_model.x_embedder.proj.weight
    assert (weight.float() - sd[CONV].float()).abs().max() < 0.01


def test_a_linear_layer_of_another_row_length_is_refused(tmp_path, sd):
    name = "layers.0.mlp.up_proj.weight"
    flat = {**sd, name: sd[name].reshape(-1, 128)}
    file = write_gguf(tmp_path / "m.gguf", flat, fields={f"comfy.gguf.orig_shape.{name}": [512, 256]})
    assert "in rows of 128, but the file says that its shape was [512, 256]" in refusal(file)


def test_weights_stay_quantised_and_mapped(tmp_path, sd, monkeypatch):
    """No warning about arrays that are not writable (U35), because no numpy array is made: its version cannot matter (U36)."""
    monkeypatch.setattr(torch, "from_numpy", None)
    file = write_gguf(tmp_path / "m.gguf", sd, block_linears_as("Q4_K"))
    model = load_model(file)
    weight = model.model.diffusion_model.layers[1].mlp.up_proj.weight.data
    assert isinstance(weight, QuantizedTensor)
    assert weight._qdata.dtype == torch.uint8
    assert weight._qdata.shape == (512, 144)
    assert weight.shape == (512, 256)
    with file.open("rb") as stream, Path("/proc/self/maps").open() as maps:
        stream.seek(0)
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("m.gguf")]
    address = weight._qdata.data_ptr()
    assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_mixed_types_are_named_in_the_summary(models, sd):
    types = {"to_v": "Q6_K", "linear_fc2": "Q5_K"}
    write_gguf(
        models / "diffusion_models" / "sub" / "mix.gguf",
        sd,
        lambda n: next((t for part, t in types.items() if part in n), "Q4_K") if is_block_linear(n) else "F32",
    )
    assert list_models("diffusion_models", "transformer") == ["sub/mix.gguf"]
    assert ErnieFastModelLoader.validate_inputs(unet_name="sub/mix.gguf") is True
    line = ErnieFastModelLoader.execute("sub/mix.gguf", "auto").args[1]
    assert "mixed: GGUF Q4_K, GGUF Q6_K, GGUF Q5_K" in line


def test_other_loaders_see_no_gguf_files(models, sd):  # U31
    write_gguf(models / "diffusion_models" / "m.gguf", sd)
    list_models("diffusion_models", "transformer")
    assert folder_paths.get_filename_list("diffusion_models") == []


def test_loading_needs_no_import_of_gguf(tmp_path, sd):  # U37: its version and dependencies cannot break a start
    file = write_gguf(tmp_path / "m.gguf", sd, block_linears_as("Q4_K"))
    script = (
        "import sys; sys.path.insert(0, 'tests'); import conftest\n"
        "from pathlib import Path\nfrom ernie_fast.nodes.model.build import load_model\n"
        f"load_model(Path({str(file)!r})); print('gguf' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_clone_and_reload_keep_the_weights(tmp_path, sd):  # U38
    file = write_gguf(tmp_path / "m.gguf", sd, block_linears_as("Q5_K"))
    model = load_model(file, "fp32")
    wanted = paint(model)
    assert torch.equal(paint(model.clone()), wanted)
    function, arguments = model.cached_patcher_init
    assert torch.equal(paint(function(*arguments, disable_dynamic=True)), wanted)


def refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        probe_model(open_checkpoint(file, "m.gguf"))
    return str(caught.value)


def test_truncated_file_gives_both_sizes(tmp_path, sd):  # U21
    file = write_gguf(tmp_path / "m.gguf", sd)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert f"{len(whole) // 2:,} bytes, but tensor" in refusal(file)
    file.write_bytes(whole[:300])
    assert "its header does not end within its 300 bytes" in refusal(file)
    file.write_bytes(b"")
    assert "empty" in refusal(file)


def test_a_language_model_is_named(tmp_path):  # U30
    file = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": torch.zeros(32, 32)}, architecture="mistral3")
    assert "Load it with ERNIE Text Encoder Loader. The file calls itself 'mistral3'" in refusal(file)


def test_a_vision_part_is_named(tmp_path):  # U41
    file = write_gguf(tmp_path / "m.gguf", {"v.blk.0.attn_q.weight": torch.zeros(32, 32)}, architecture="clip")
    assert "mmproj" in refusal(file)


def test_an_unknown_type_names_the_known_ones(tmp_path, sd):
    file = write_gguf(tmp_path / "m.gguf", sd, block_linears_as("Q8_0"))
    data = bytearray(file.read_bytes())
    name = b"layers.0.mlp.up_proj.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = (29).to_bytes(4, "little")
    file.write_bytes(data)
    assert "has the GGUF type IQ1_M (29); known are F32, F16, BF16, Q4_0" in refusal(file)


def test_wrong_endings_are_named(tmp_path, sd):
    file = write_gguf(tmp_path / "m.gguf", sd)
    renamed = file.rename(tmp_path / "m.safetensors")
    assert "GGUF file with a wrong ending" in refusal(renamed)
    wrong = save(tmp_path / "x.safetensors", sd).rename(tmp_path / "x.gguf")
    assert "safetensors file with a wrong ending" in refusal(wrong)


def test_a_part_of_a_split_file_is_refused(tmp_path, sd):
    file = write_gguf(tmp_path / "m.gguf", sd, fields={"split.count": 3})
    assert "one of 3 parts" in refusal(file)


def test_missing_tensor_is_refused(tmp_path, sd):
    file = write_gguf(tmp_path / "m.gguf", {k: v for k, v in sd.items() if k != "layers.1.mlp.up_proj.weight"})
    assert "1 ERNIE-Image tensors are missing" in refusal(file)
