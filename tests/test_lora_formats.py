"""LoRA on every storage format: the change that the weights get, against the change that the BF16 model gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.utils import get_attr
from ernie_fast.nodes.loaders.lora import apply_lora
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import open_checkpoint
from ernie_fast.nodes.model.quantise import WEIGHT_FORMATS, QuantisePolicy
from ernie_files import is_block_linear, save
from gguf_files import block_linears_as, write_gguf
from safetensors.torch import load_file

GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_0", "Q4_0", "IQ4_XS")
# A large change is rounded as any weight is; on scales not made for it, up to 8 % worse. SVDQuant's own error is smaller than its steps,
# because its low-rank branch was fitted to what the rounding left.
LIMITS = {"svdquant_w4a4": 1.3}
MODULES = ("layers.1.self_attention.to_q", "layers.4.mlp.linear_fc2", "layers.9.mlp.up_proj")


@pytest.fixture(scope="module")
def base(nano):
    """The weights of the bundled model, three of which a LoRA changes."""
    return load_file(nano / "ernie-image-nano.safetensors")


@pytest.fixture(scope="module")
def load(nano, base, tmp_path_factory):
    """Load the bundled model in a format."""
    folder = tmp_path_factory.mktemp("formats")

    def run(name: str):
        if name in WEIGHT_FORMATS:
            return load_model(nano / "ernie-image-nano.safetensors", "fp32", policy=QuantisePolicy(name))
        return load_model(write_gguf(folder / f"{name}.gguf", base, block_linears_as(name)), "fp32")

    return run


def write_lora(folder: Path, base, rank: int = 8, size: float = 0.02, seed: int = 0) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a LoRA whose change has the given RMS relative to each weight; return the file and the changes."""
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for module in MODULES:
        weight = base[f"{module}.weight"].float()
        up = torch.randn(weight.shape[0], rank, generator=generator)
        down = torch.randn(rank, weight.shape[1], generator=generator)
        up *= size * weight.std() / (up @ down).std()
        tensors |= {f"diffusion_model.{module}.lora_B.weight": up, f"diffusion_model.{module}.lora_A.weight": down}
        deltas[module] = up @ down
    return save(folder / f"lora{seed}.safetensors", tensors), deltas


def weight_of(model, module: str) -> torch.Tensor:
    weight = get_attr(model.model, f"diffusion_model.{module}.weight")
    return weight.dequantize().float() if isinstance(weight, QuantizedTensor) else weight.float()


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("size", [0.01, 0.1])
@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *GGUF_TYPES])
def test_the_change_is_that_of_the_bf16_model(tmp_path, base, load, name, size):  # U47, U48, U49
    model = load(name)
    lora, deltas = write_lora(tmp_path, base, size=size)
    before = {module: weight_of(model, module) for module in MODULES}
    patched = apply_lora(open_checkpoint(lora), model, None, 1.0, 0)[0]
    patched.patch_model()
    try:
        for module, delta in deltas.items():
            change = weight_of(patched, module) - before[module]
            gain = float((change * delta).sum() / delta.square().sum())
            own_error = rms(before[module] - base[f"{module}.weight"].float())
            assert gain == pytest.approx(1, abs=0.1), (module, gain)
            assert rms(change - delta) <= LIMITS.get(name, 1.1) * own_error, (module, rms(change - delta) / own_error)
            assert isinstance(get_attr(patched.model, f"diffusion_model.{module}.weight"), QuantizedTensor)
    finally:
        patched.unpatch_model()
    for module in MODULES:  # the base is as it was
        assert torch.equal(weight_of(model, module), before[module])


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "Q4_K"])
def test_several_loras_are_merged_once_and_strength_reloads_nothing(tmp_path, base, load, name):  # U32
    model = load(name)
    key = f"diffusion_model.{MODULES[0]}.weight"
    stored = get_attr(model.model, key)._qdata.data_ptr()
    files = [write_lora(tmp_path, base, size=0.1, seed=seed) for seed in range(4)]
    previous = None
    for strength in (1.0, 0.5):
        patched = model
        for file, _ in files:
            patched = apply_lora(open_checkpoint(file), patched, None, strength, 0)[0]
        patched.patch_model()
        try:
            module = get_attr(patched.model, f"diffusion_model.{MODULES[0]}")
            assert isinstance(module.weight, QuantizedTensor)  # merged: as many bytes and as much work as without
            assert module.weight_function == []
            previous = module.weight.dequantize() if previous is None else previous
            assert rms(module.weight.dequantize() - previous) > 0 or strength == 1.0
        finally:
            patched.unpatch_model()
    assert get_attr(model.model, key)._qdata.data_ptr() == stored  # still the mapped file


def test_streamed_weights_get_the_exact_change(tmp_path, base, load):
    """A weight that does not fit is expanded and changed when it is used; nothing is rounded."""
    model = load("Q4_K")
    lora, deltas = write_lora(tmp_path, base)
    patched = apply_lora(open_checkpoint(lora), model, None, 1.0, 0)[0]
    patched.load(torch.device("cpu"), lowvram_model_memory=1)
    try:
        module = get_attr(patched.model, f"diffusion_model.{MODULES[0]}")
        assert len(module.weight_function) == 1
        x = torch.randn(4, 256)
        change = module(x) - torch.nn.functional.linear(x, weight_of(model, MODULES[0]))
        assert torch.allclose(change, x @ deltas[MODULES[0]].T, atol=1e-5)
    finally:
        patched.unpatch_model()


def test_only_block_linears_of_the_bundled_model_are_quantised(load):
    parameters = load("Q4_K").model.diffusion_model.named_parameters()
    assert all(is_block_linear(name) == isinstance(p.data, QuantizedTensor) for name, p in parameters if p.dim() == 2)
