"""The LoRA strength that PEFT and diffusers state outside of the tensors."""

from __future__ import annotations

import json
import math

import lora_files
import pytest
from ernie_fast.nodes.loaders.lora_alpha import StatedAlpha
from ernie_fast.nodes.loaders.lora_loader import ErnieFastLoRALoader
from ernie_fast.nodes.model.checkpoint import CheckpointError
from ernie_files import save
from lora_files import MODULE, RANK, factors
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def base(nano):
    return {k: v.float() for k, v in load_file(nano / "ernie-image-nano.safetensors").items()}


@pytest.fixture(scope="module")
def model(base):
    return lora_files.nano_model(base)


def plain_peft(base, module=MODULE):
    up, down = factors(base[f"{module}.weight"].shape, RANK)
    return {f"transformer.{module}.lora_B.weight": up, f"transformer.{module}.lora_A.weight": down}, up @ down


def header(**entries):
    return {"lora_adapter_metadata": json.dumps({f"transformer.{name}": value for name, value in entries.items()})}


@pytest.mark.parametrize(
    ("entries", "factor"),
    [
        ({"r": RANK, "lora_alpha": 2 * RANK}, 2),
        ({"lora_alpha": RANK, "use_rslora": True}, math.sqrt(RANK)),
        ({"lora_alpha": RANK, "alpha_pattern": {"to_q": 3 * RANK}}, 3),
        ({"lora_alpha": RANK, "alpha_pattern": {"to_k": 3 * RANK}}, 1),
        ({}, 1),
    ],
)
def test_alpha_of_the_diffusers_header_scales_the_change(base, model, models, entries, factor):
    sd, delta = plain_peft(base)
    save(models / "loras" / "style.safetensors", sd, header(**entries))
    patcher = ErnieFastLoRALoader.execute(model, "style.safetensors", 1.0).args[0]
    lora_files.assert_changed_by(patcher, base, {MODULE: factor * delta})


def test_alpha_beside_a_peft_file_scales_the_change(base, model, models):
    sd, delta = plain_peft(base)
    save(models / "loras" / "mine" / "adapter_model.safetensors", sd)
    (models / "loras" / "mine" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2 * RANK, "r": RANK}))
    patcher = ErnieFastLoRALoader.execute(model, "mine/adapter_model.safetensors", 1.0).args[0]
    lora_files.assert_changed_by(patcher, base, {MODULE: 2 * delta})


def test_alpha_tensor_wins_over_the_header(base, model, models):
    sd, deltas = lora_files.lora(base, modules=(MODULE,))
    save(models / "loras" / "style.safetensors", sd, header(lora_alpha=100))
    patcher = ErnieFastLoRALoader.execute(model, "style.safetensors", 1.0).args[0]
    lora_files.assert_changed_by(patcher, base, deltas)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"transformer.lora_alpha": "8"}', '{"transformer.lora_alpha": true}'])
def test_broken_configuration_is_an_error(base, model, models, text):
    save(models / "loras" / "style.safetensors", plain_peft(base)[0], {"lora_adapter_metadata": text})
    with pytest.raises(CheckpointError, match=r"style\.safetensors.*(lora_adapter_metadata|lora_alpha)"):
        ErnieFastLoRALoader.execute(model, "style.safetensors", 1.0)


def test_nothing_stated_changes_nothing():
    assert StatedAlpha().of(MODULE, RANK) is None
