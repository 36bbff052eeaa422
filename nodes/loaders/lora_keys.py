"""The names in a LoRA file: which module a tensor belongs to, and which weight of the model that module changes.

Trainers write the same module in many ways ('lora_unet_layers_0_mlp_up_proj', 'base_model.model.layers.0.mlp.up_proj').
Here every way is an alias of one weight, and every tensor ending becomes the one that ComfyUI's adapters read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ..model.checkpoint import CheckpointError

# What stands before 'layers.0.self_attention.to_q'. The flat forms write '_' for every '.'.
DOTTED_PREFIXES = (
    "diffusion_model.", "model.diffusion_model.", "transformer.", "unet.", "base_model.model.",
    "base_model.model.transformer.", "base_model.model.diffusion_model.", "",
)  # fmt: skip
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
_TEXT_DOTTED_PREFIXES = ("text_encoder.", "text_encoders.")
_TEXT_FLAT_PREFIXES = ("lora_te_", "lora_te1_")
# Where Ministral's layers sit: ComfyUI, transformers' causal model, and its image-and-text model (old and new layout).
_TEXT_PARENTS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")

_ROOT = "diffusion_model."
_WEIGHT = ".weight"
_TEXT_MODULE = re.compile(r"^(lora_te\d?_|text_encoders?(_\d)?\.)")

# PEFT puts the adapter's name, usually 'default', before '.weight'.
_ADAPTER = r"(?:\.(?!(?:weight|bias)$)[^.]+)?(?:\.weight)?$"
_LOW_RANK = re.compile(
    r"^(?P<module>.+?)(?:\.lora_|[._]lora\.|\.lora_linear_layer\.)(?P<side>up|down|mid|A|B)" + _ADAPTER
)
_MAGNITUDE = re.compile(r"^(?P<module>.+)\.lora_magnitude_vector" + _ADAPTER)
_OTHER = re.compile(
    r"^(?P<module>.+)\.(?P<kind>alpha|dora_scale|hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2"
    r"|oft_blocks|rescale|w_norm|b_norm|diff|diff_b|set_weight)$"
)
_SIDES = {"A": "down", "B": "up"}

# (pattern over module names, the model it was trained for), the most telling first.
_FOREIGN = (
    (r"double_blocks|single_blocks|single_transformer_blocks", "Flux or HunyuanVideo"),
    (r"joint_blocks", "Stable Diffusion 3"),
    (r"input_blocks|output_blocks|down_blocks|up_blocks|mid_block", "SDXL or Stable Diffusion 1.5"),
    (r"transformer_blocks", "Qwen-Image or another model with 'transformer_blocks'"),
    (r"noise_refiner|context_refiner|layers[._]\d+[._]attention[._]", "Z-Image or Lumina 2"),
    (r"(^|[._])blocks[._]\d+[._](self|cross)_attn", "Wan"),
    (r"layers[._]\d+[._]self_attn[._]", "a language model (a text encoder), not the diffusion model"),
)


def model_aliases(weights: Iterable[str]) -> dict[str, str]:
    """Map every known form of a module's name to its weight in the diffusion model.

    Args:
        weights: parameter names of ComfyUI's model ('diffusion_model.layers.0.self_attention.to_q.weight', ...).

    Returns: name of a module in a LoRA file -> parameter name.
    """
    aliases: dict[str, str] = {}
    for weight in weights:
        if not (weight.startswith(_ROOT) and weight.endswith(_WEIGHT)):
            continue
        module = weight[len(_ROOT) : -len(_WEIGHT)]
        # diffusers and PEFT name the output projection with its index in a list; some trainers leave the index out.
        for name in {module, module.removesuffix(".0")} if module.endswith(".to_out.0") else {module}:
            aliases.update((prefix + name, weight) for prefix in DOTTED_PREFIXES)
            aliases.update((prefix + name.replace(".", "_"), weight) for prefix in FLAT_PREFIXES)
    return aliases


def text_encoder_aliases(weights: Iterable[str]) -> dict[str, str]:
    """Map the known forms of a module's name to its weight in the Ministral text encoder.

    Args:
        weights: parameter names of ComfyUI's text encoder ('ministral3_3b.transformer.model.layers.0...', ...).

    Returns: name of a module in a LoRA file -> parameter name; ComfyUI's own forms are not repeated here.
    """
    aliases: dict[str, str] = {}
    for weight in weights:
        _, found, module = weight.partition(".transformer.model.")
        if not found or not module.endswith(_WEIGHT):
            continue
        for parent in _TEXT_PARENTS:
            name = parent + module[: -len(_WEIGHT)]
            aliases.update((prefix + name, weight) for prefix in _TEXT_DOTTED_PREFIXES)
            aliases.update((prefix + name.replace(".", "_"), weight) for prefix in _TEXT_FLAT_PREFIXES)
    return aliases


def is_text_encoder(module: str) -> bool:
    """Tell whether a module's name says that it belongs to a text encoder."""
    return _TEXT_MODULE.match(module) is not None


def group_keys(keys: Iterable[str], label: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Sort the tensor names of a LoRA file by module.

    Args:
        keys: the names in the file.
        label: the file, for messages.

    Returns: (module -> {ending that ComfyUI's adapters read: name in the file}, names with an unknown ending).
    Raises: CheckpointError when a module has the same tensor twice (two adapters in one file).
    """
    modules: dict[str, dict[str, str]] = {}
    unknown: list[str] = []
    for key in keys:
        module, kind = _split(key)
        if not module:
            unknown.append(key)
            continue
        tensors = modules.setdefault(module, {})
        if kind in tensors:
            raise CheckpointError(
                f"{label}: '{tensors[kind]}' and '{key}' are the same tensor of module '{module}'. The file holds two "
                "adapters; save each one to a file of its own."
            )
        tensors[kind] = key
    return modules, unknown


def _split(key: str) -> tuple[str, str]:
    """Split a tensor name into module and ending; ("", "") for an unknown ending."""
    if match := _LOW_RANK.match(key):
        return match["module"], f"lora_{_SIDES.get(match['side'], match['side'])}.weight"
    if match := _MAGNITUDE.match(key):
        return match["module"], "dora_scale"
    if match := _OTHER.match(key):
        return match["module"], match["kind"]
    return "", ""


def match_modules(modules: Iterable[str], aliases: Mapping[str, str], label: str) -> tuple[dict[str, str], list[str]]:
    """Find the weight of every module.

    Args:
        modules: module names of a LoRA file.
        aliases: name of a module -> parameter name.
        label: the file, for messages.

    Returns: (parameter name -> module, modules that match no weight).
    Raises: CheckpointError when two modules change the same weight (two LoRAs in one file).
    """
    matched: dict[str, str] = {}
    unmatched: list[str] = []
    for module in modules:
        weight = aliases.get(module)
        if weight is None:
            unmatched.append(module)
        elif weight in matched:
            raise CheckpointError(
                f"{label}: '{matched[weight]}' and '{module}' both change '{weight}'. The file holds two LoRAs; save "
                "each one to a file of its own."
            )
        else:
            matched[weight] = module
    return matched, unmatched


def trained_for(modules: Iterable[str]) -> str | None:
    """Name the model that a LoRA was trained for from its module names, or None when they do not tell."""
    modules = list(modules)
    for pattern, model in _FOREIGN:
        if any(re.search(pattern, module) for module in modules):
            return model
    return None
