"""Real, tiny ERNIE-Image checkpoints in every form, written from the state dict of ComfyUI's own module."""

from __future__ import annotations

import json
from pathlib import Path

import comfy.ops
import torch
from comfy.ldm.ernie.model import ErnieImageModel
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from safetensors.torch import save_file

# Widths are multiples of 256, so that every format's groups fit.
SIZES = {
    "hidden_size": 256, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 512, "text_in_dim": 192,
}  # fmt: skip
BLOCK_LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "gate_proj", "up_proj", "linear_fc2")
StateDict = dict[str, torch.Tensor]


def ernie_state_dict(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **sizes: int) -> StateDict:
    """Return random weights of a small ERNIE transformer, scaled so that a forward stays finite."""
    module = ErnieImageModel(**{**SIZES, **sizes}, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in module.state_dict().items():
        value = torch.randn(tensor.shape, generator=generator) * (0.05 if tensor.dim() > 1 else 0.1)
        out[name] = (value + 1.0 if name.endswith(("_ln.weight", "norm_q.weight", "norm_k.weight")) else value).to(dtype)
    return out


def is_block_linear(name: str) -> bool:
    """True for the weight of one of the seven linear layers of a block."""
    return name.startswith("layers.") and name.removesuffix(".weight").endswith(BLOCK_LINEARS)


def save(path: Path, sd: StateDict, metadata: dict[str, str] | None = None) -> Path:
    """Write a safetensors file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in sd.items()}, str(path), metadata=metadata)
    return path


def with_prefix(sd: StateDict, prefix: str) -> StateDict:
    """Put a prefix before every name."""
    return {prefix + name: tensor for name, tensor in sd.items()}


def quantised(sd: StateDict, format_name: str, marker: bool = True, **options: object) -> StateDict:
    """Quantise the block linears with ComfyUI's own code, with or without the `comfy_quant` markers."""
    out = dict(sd)
    for name in sd:
        if not is_block_linear(name):
            continue
        layer = name.removesuffix(".weight")
        layout = QUANT_ALGOS[format_name]["comfy_tensor_layout"]
        tensor = QuantizedTensor.from_float(sd[name].float(), layout, **options)
        out.update(tensor.state_dict(name))
        if marker:
            config: dict[str, object] = {"format": format_name}
            if options.get("convrot"):
                config |= {"convrot": True, "convrot_groupsize": 256}
            out[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
    return out


def old_scaled_fp8(sd: StateDict, marker_elements: int = 0) -> StateDict:
    """Return the older notation: `scaled_fp8`, `scale_weight`, and a `scale_input` of 1."""
    new = quantised(sd, "float8_e4m3fn", marker=False)
    out = {name.replace(".weight_scale", ".scale_weight"): tensor for name, tensor in new.items()}
    for name in list(out):
        if name.endswith(".scale_weight"):
            out[name.replace(".scale_weight", ".scale_input")] = torch.tensor(1.0)
    out["scaled_fp8"] = torch.zeros(marker_elements, dtype=torch.float8_e4m3fn)
    return out


def save_sharded(folder: Path, sd: StateDict, count: int = 3, index: bool = True, config: dict | None = None) -> Path:
    """Write a Hugging Face folder: shards, index, and config.json."""
    names = sorted(sd)
    weight_map = {}
    for number in range(count):
        file = f"diffusion_pytorch_model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[number::count]
        save(folder / file, {name: sd[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    if index:
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
