"""YaRN positions: the hidden states of transformers' Ministral3, and ComfyUI's own when switched off."""

from __future__ import annotations

import json

import pytest
import torch
from comfy.text_encoders.llama import precompute_freqs_cis
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.text.encoder import load_text_encoder
from ernie_fast.nodes.text.rope import Rope, Yarn, rope_from_config
from ernie_fast.nodes.text.source import find_tokenizer
from text_files import as_bytes, embed, hf_folder, tekken
from transformers.models.ministral3 import Ministral3Config, Ministral3Model

TEXT = "a red apple on a blue table, "


@pytest.fixture(scope="module")
def reference():
    """A tiny Ministral3 of transformers with its default YaRN positions."""
    torch.manual_seed(0)
    config = Ministral3Config(
        vocab_size=276, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.2,
    )  # fmt: skip
    return Ministral3Model(config).eval()


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    """The same model as a Hugging Face folder, with a tekken.json."""
    sd = {f"model.{name}": tensor for name, tensor in reference.state_dict().items()}
    config = json.loads(reference.config.to_json_string())
    path = hf_folder(tmp_path_factory.mktemp("repository") / "text_encoder", sd, config)
    (path / "tekken.json").write_bytes(as_bytes(tekken()))
    return path


def load(folder, rope):
    return load_text_encoder(folder, "tiny", find_tokenizer(open_checkpoint(folder)), rope)


def hidden_states(reference, tokens: int) -> torch.Tensor:
    ids = torch.tensor([[1, *(byte + 20 for byte in (TEXT * 99).encode()[: tokens - 1])]])
    return reference(input_ids=ids, output_hidden_states=True).hidden_states[-2]


@pytest.mark.parametrize("tokens", [16, 1024])
def test_yarn_gives_the_hidden_states_of_transformers(reference, folder, tokens):
    wanted = hidden_states(reference, tokens)
    clip = load(folder, "yarn")
    ours = embed(clip, (TEXT * 99)[: tokens - 1])
    assert ours.shape == wanted.shape == (1, tokens, 64)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


def test_positions_of_comfyui_are_far_from_the_reference_at_1024_tokens(reference, folder):
    wanted = hidden_states(reference, 1024)
    plain = embed(load(folder, "comfyui"), (TEXT * 99)[:1023])
    assert (plain - wanted).norm() > 0.05 * wanted.norm()


def test_comfyui_positions_are_comfyui_code_bit_for_bit(folder):
    model = load(folder, "comfyui").cond_stage_model.ministral3_3b.transformer.model
    positions = torch.arange(50)[None]
    wanted = precompute_freqs_cis(32, positions, 1e6, device=torch.device("cpu"))
    for ours, core in zip(model.compute_freqs_cis(positions, torch.device("cpu")), wanted, strict=True):
        assert torch.equal(ours, core)


def test_yarn_leaves_high_frequencies_and_divides_low_ones():
    divisors = Yarn().divisors(128, 1e6)
    assert divisors.shape == (64,)
    assert torch.equal(divisors[:20], torch.ones(20))
    assert torch.equal(divisors[-20:], torch.full((20,), 16.0))
    assert (divisors.diff() >= 0).all()


def test_numbers_of_the_config_are_used():
    stated = {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 4096,
        "beta_fast": 16, "beta_slow": 2, "mscale": 2.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    rope = rope_from_config({"rope_parameters": stated}, "yarn", "x")
    assert rope.theta == 5e5
    assert rope.yarn
    assert (rope.yarn.factor, rope.yarn.original_max_position_embeddings) == (8.0, 4096.0)
    assert rope.yarn.attention_scale == pytest.approx((0.2 * 2.0794415 + 1) / (0.1 * 2.0794415 + 1))
    assert rope_from_config({"rope_parameters": stated}, "comfyui", "x") == Rope(5e5)
    del stated["rope_theta"]  # transformers 4 writes it beside the others
    old = rope_from_config({"rope_scaling": stated, "rope_theta": 5e5}, "yarn", "x")
    assert old.theta == 5e5


def test_attention_scale_is_on_the_cosines(reference, tmp_path):
    config = json.loads(reference.config.to_json_string())
    config["rope_parameters"] |= {"attention_factor": 1.25}
    sd = {f"model.{name}": tensor for name, tensor in reference.state_dict().items()}
    folder = hf_folder(tmp_path / "text_encoder", sd, config)
    (folder / "tekken.json").write_bytes(as_bytes(tekken()))
    scaled = Ministral3Model(Ministral3Config(**config)).eval()
    scaled.load_state_dict(reference.state_dict())
    torch.testing.assert_close(embed(load(folder, "yarn"), TEXT), hidden_states(scaled, len(TEXT) + 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [{}, {"rope_parameters": None}, {"rope_scaling": None, "rope_theta": 1e6}])
def test_config_without_numbers_means_those_of_ministral(config):
    assert rope_from_config(config, "yarn", "x") == Rope(1e6, Yarn())


def test_config_that_states_plain_positions_is_followed():
    assert rope_from_config({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "yarn", "x") == Rope(1e4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "llama3"}, "type 'llama3'; 'yarn' and 'default' are known"),
        ({"rope_type": "yarn", "factor": "16"}, "factor = '16'"),
        ({"rope_type": "yarn", "factor": 0}, "factor = 0"),
        ({"rope_type": "yarn", "beta_fast": float("nan")}, "beta_fast = nan"),
        ({"rope_theta": float("inf")}, "rope_theta = inf"),
        ({"rope_theta": 1}, "rope_theta = 1;"),
        ([], None),
        ([1], "type list"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(parameters, message):
    if message is None:
        assert rope_from_config({"rope_parameters": parameters}, "yarn", "x") == Rope(1e6, Yarn())
        return
    with pytest.raises(CheckpointError, match=f"^my file: config.json .*{message}"):
        rope_from_config({"rope_parameters": parameters}, "yarn", "my file")


def test_unknown_choice_is_refused():
    with pytest.raises(CheckpointError, match=r"rope 'ntk'; choose one of yarn, comfyui"):
        rope_from_config({}, "ntk", "x")
