"""LoRA files as each trainer writes them, with the change that they must make, and a real model to make it on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models
import comfy.supported_models_base
import comfy.text_encoders.ernie
import comfy.utils
import pytest
import torch
from ernie_fast.nodes.model.checkpoint import CheckpointError

NANO_CONFIG = {
    "image_model": "ernie", "hidden_size": 256, "num_attention_heads": 2, "num_layers": 12, "ffn_hidden_size": 768,
    "text_in_dim": 192,
}  # fmt: skip
NANO_ENCODER = {
    "vocab_size": 276, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
CPU = torch.device("cpu")
ROOT = "diffusion_model."
MODULE = "layers.1.self_attention.to_q"
MODULES = (MODULE, "layers.1.self_attention.to_out.0", "layers.11.mlp.linear_fc2", "text_proj")
RANK, ALPHA = 4, 2.0
StateDict = dict[str, torch.Tensor]


def flat(prefix: str) -> Callable[[str], str]:
    """Name a module as kohya's scripts do: underscores only."""
    return lambda module: prefix + module.replace(".", "_")


def dotted(prefix: str) -> Callable[[str], str]:
    """Name a module as PyTorch does."""
    return lambda module: prefix + module


FORMS = {
    "kohya": flat("lora_unet_"),
    "onetrainer": flat("lora_transformer_"),
    "simpletuner lycoris": flat("lycoris_"),
    "comfyui": dotted("diffusion_model."),
    "checkpoint": dotted("model.diffusion_model."),
    "diffusers": dotted("transformer."),
    "unet": dotted("unet."),
    "peft": dotted("base_model.model."),
    "peft transformer": dotted("base_model.model.transformer."),
    "peft diffusion_model": dotted("base_model.model.diffusion_model."),
    "bare": dotted(""),
}
TEXT_FORMS = {
    "comfyui": dotted("text_encoders.ministral3_3b.transformer.model."),
    "comfyui short": dotted("text_encoders.transformer.model."),
    "kohya": flat("lora_te_"),
    "kohya model": flat("lora_te_model_"),
    "onetrainer": flat("lora_te1_"),
    "onetrainer mistral3": flat("lora_te1_language_model_"),
    "diffusers": dotted("text_encoder."),
    "diffusers model": dotted("text_encoder.model."),
    "diffusers mistral3": dotted("text_encoder.model.language_model."),
    "diffusers causal": dotted("text_encoder.language_model.model."),
}


def kohya(name: str, up: torch.Tensor, down: torch.Tensor, alpha: float) -> StateDict:
    """One module as kohya writes it."""
    return {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down, f"{name}.alpha": torch.tensor(alpha)}


def peft(name: str, up: torch.Tensor, down: torch.Tensor, alpha: float, adapter: str = "") -> StateDict:
    """One module as PEFT writes it: the scale is in no tensor, so it is multiplied into B."""
    return {f"{name}.lora_B{adapter}.weight": up * (alpha / up.shape[1]), f"{name}.lora_A{adapter}.weight": down}


def peft_default(name: str, up: torch.Tensor, down: torch.Tensor, alpha: float) -> StateDict:
    """One module of a raw PEFT state dict, which keeps the adapter's name."""
    return peft(name, up, down, alpha, ".default")


def factors(shape: torch.Size, rank: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random (up, down) for a weight."""
    return torch.randn(shape[0], rank) * 0.1, torch.randn(rank, shape[1]) * 0.1


def nano_model(sd: StateDict) -> comfy.model_patcher.ModelPatcher:
    """Build ComfyUI's model of nano's size from a state dict, quantised or not, computing in fp32."""
    config = comfy.supported_models.ErnieImage(dict(NANO_CONFIG))
    config.set_inference_dtype(torch.float32, torch.float32)
    config.quant_config = comfy.utils.detect_layer_quantization(sd, "")
    base = config.get_model(sd, "")
    missing, unexpected = base.diffusion_model.load_state_dict(sd, strict=False)
    assert not missing
    assert not unexpected
    return comfy.model_patcher.ModelPatcher(base.eval(), load_device=CPU, offload_device=CPU)


def nano_clip(file: Path) -> comfy.sd.CLIP:
    """Build ComfyUI's CLIP from nano's text encoder."""
    sd = comfy.utils.load_torch_file(str(file))
    tekken = sd.pop("tekken_model")
    target = comfy.supported_models_base.ClipTarget(
        comfy.text_encoders.ernie.ErnieTokenizer, comfy.text_encoders.ernie.te()
    )
    return comfy.sd.CLIP(
        target, tokenizer_data={"tekken_model": tekken}, parameters=2_000_000, state_dict=[sd],
        model_options={"ministral3_3b_model_config": NANO_ENCODER},
    )  # fmt: skip


@contextmanager
def patched(patcher: comfy.model_patcher.ModelPatcher):
    """Load the model as ComfyUI does before sampling, and unload it after; yields a function name -> full-precision weight."""

    def weight(name: str) -> torch.Tensor:
        value = comfy.utils.get_attr(patcher.model, name)
        return (value.dequantize() if hasattr(value, "dequantize") else value).detach().float().clone()

    comfy.model_management.load_models_gpu([patcher])
    try:
        yield weight
    finally:
        comfy.model_management.unload_all_models()


def lora(
    base: StateDict,
    modules: tuple[str, ...] = MODULES,
    form: Callable[[str], str] = FORMS["kohya"],
    write: Callable[..., StateDict] = kohya,
    scale: float = 1.0,
) -> tuple[StateDict, StateDict]:
    """Return (file content, module -> change) of random low-rank factors for the modules."""
    sd, deltas = {}, {}
    for module in modules:
        up, down = factors(base[f"{module}.weight"].shape, RANK)
        sd |= write(form(module), up * scale, down, ALPHA)
        deltas[module] = (up * scale) @ down * (ALPHA / RANK)
    return sd, deltas


def assert_changed_by(patcher: comfy.model_patcher.ModelPatcher, base: StateDict, deltas: StateDict) -> None:
    """Check that the loaded model's weights are the base weights plus the changes (module -> change)."""
    with patched(patcher) as weight:
        for module, delta in deltas.items():
            torch.testing.assert_close(weight(f"{ROOT}{module}.weight"), base[f"{module}.weight"] + delta)


def refusal(apply: Callable[[StateDict], object], sd: StateDict) -> str:
    """Return the message with which the loader refuses a file."""
    with pytest.raises(CheckpointError) as error:
        apply(sd)
    return str(error.value)
