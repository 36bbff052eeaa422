"""Files and folders that are broken, incomplete or something else: one clear sentence for each."""

from __future__ import annotations

import json

import pytest
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.probe import probe_model
from ernie_files import ernie_state_dict, save, save_sharded, with_prefix


@pytest.fixture(scope="module")
def sd():
    return ernie_state_dict()


def test_interrupted_download_is_refused_with_both_sizes(tmp_path, sd):  # U21
    file = save(tmp_path / "half.safetensors", sd)
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[: whole // 2])
    with pytest.raises(CheckpointError, match=rf"half\.safetensors: the file is incomplete: {whole // 2:,} bytes.*{whole:,}"):
        open_checkpoint(file)


def test_file_cut_inside_the_header_is_refused(tmp_path, sd):  # U21
    file = save(tmp_path / "short.safetensors", sd)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(file)


def test_file_with_bytes_after_the_last_tensor_is_refused(tmp_path, sd):
    file = save(tmp_path / "long.safetensors", sd)
    file.write_bytes(file.read_bytes() + b"\0" * 10)
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a safetensors file"),
        (b"abc", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"GGUF" + b"\0" * 64, "GGUF file with a wrong ending"),
        (b"PK\x03\x04" + b"\0" * 64, "pickle"),
        (b"\xff" * 64, "not a safetensors file"),
    ],
)
def test_other_content_behind_the_ending_is_named(tmp_path, content, words):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(file)


@pytest.mark.parametrize("ending", [".ckpt", ".pt", ".pth", ".bin"])
def test_pickle_files_are_never_opened(tmp_path, ending):
    file = tmp_path / f"model{ending}"
    file.write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="can run code"):
        open_checkpoint(file)


def test_missing_file_says_how_to_refresh(tmp_path):
    with pytest.raises(CheckpointError, match=r"no such file.*refresh"):
        open_checkpoint(tmp_path / "gone.safetensors")


def test_sharded_folder_equals_the_single_file(tmp_path, sd):
    single = probe_model(open_checkpoint(save(tmp_path / "one.safetensors", sd)))
    for index in (True, False):
        folder = probe_model(open_checkpoint(save_sharded(tmp_path / f"shards-{index}", sd, index=index)))
        assert folder.architecture == single.architecture
        assert folder.storage.parameters == single.storage.parameters


def test_one_shard_opens_the_whole_set(tmp_path, sd):
    folder = save_sharded(tmp_path / "transformer", sd)
    checkpoint = open_checkpoint(folder / "diffusion_pytorch_model-00002-of-00003.safetensors")
    assert len(checkpoint.files) == 3
    assert set(checkpoint.tensors) == set(sd)


def test_missing_shard_is_named(tmp_path, sd):
    folder = save_sharded(tmp_path / "transformer", sd)
    (folder / "diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="2 of 3 shards found; missing number 2"):
        open_checkpoint(folder)


def test_hostile_shard_count_does_not_hang(tmp_path, sd):
    save(tmp_path / "t" / "x-00001-of-99999.safetensors", sd)
    with pytest.raises(CheckpointError, match="1 of 99999 shards found"):
        open_checkpoint(tmp_path / "t")


def test_tensor_in_two_shards_is_refused(tmp_path, sd):
    folder = tmp_path / "t"
    save(folder / "m-00001-of-00002.safetensors", sd)
    save(folder / "m-00002-of-00002.safetensors", {"final_linear.bias": sd["final_linear.bias"]})
    with pytest.raises(CheckpointError, match=r"'final_linear\.bias' is in two shards"):
        open_checkpoint(folder)


def test_index_that_names_absent_tensors_is_refused(tmp_path, sd):
    folder = save_sharded(tmp_path / "t", sd)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["layers.9.mlp.up_proj.weight"] = "../../etc/passwd"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"'layers\.9\.mlp\.up_proj\.weight'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_broken_index_is_one_error(tmp_path, sd, text):
    folder = save_sharded(tmp_path / "t", sd)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(folder)


def test_folder_of_several_models_asks_for_one(tmp_path, sd):
    save(tmp_path / "t" / "a.safetensors", sd)
    save(tmp_path / "t" / "b.safetensors", sd)
    with pytest.raises(CheckpointError, match=r"several models \(a\.safetensors, b\.safetensors\)"):
        open_checkpoint(tmp_path / "t")


def test_empty_folder_is_named(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        open_checkpoint(tmp_path / "t")


def test_config_of_another_model_beside_a_file_is_harmless(tmp_path, sd):
    file = save(tmp_path / "m.safetensors", sd)
    (tmp_path / "config.json").write_text("{broken")
    assert probe_model(open_checkpoint(file)).architecture.num_layers == 2
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel", "num_layers": 19}))
    assert probe_model(open_checkpoint(file)).architecture.num_layers == 2


def test_unreadable_file_is_one_error(tmp_path, sd):
    folder = tmp_path / "m.safetensors"
    folder.mkdir()
    with pytest.raises(CheckpointError):
        open_checkpoint(folder)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "model.", "net.", "transformer.", "diffusion_model.", "unet."])
def test_every_known_prefix_is_stripped(tmp_path, sd, prefix):  # V8
    probe = probe_model(open_checkpoint(save(tmp_path / "m.safetensors", with_prefix(sd, prefix))))
    assert probe.prefix == prefix
    assert probe.architecture.num_layers == 2
    assert not probe.unused


def test_unknown_prefix_is_named_with_the_known_ones(tmp_path, sd):  # V8
    file = save(tmp_path / "m.safetensors", with_prefix(sd, "my.net."))
    with pytest.raises(CheckpointError, match=r"unknown prefix 'my\.net\.'; known are none, 'model\.diffusion_model\.'"):
        probe_model(open_checkpoint(file))

