"""Say what a checkpoint is when it is not what a loader needs, from its tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LOADERS = "Use ERNIE Model Loader for the diffusion model, ERNIE Text Encoder Loader for the text encoder, Load VAE for the VAE."

# (pattern over tensor names, what it is, what to do), the most telling first.
_KINDS: tuple[tuple[str, str, str], ...] = (
    (r"lora_(A|B|up|down)\b|\.lokr_w|\.hada_w|lora_(up|down)\.weight", "a LoRA", "Load it with ERNIE LoRA Loader."),
    (r"^(v\.blk\.|mm\.|v\.patch_embd)", "the vision part (mmproj) of a language model", "ERNIE-Image never needs one: choose the file of the language model."),
    (r"^blk\.\d+\.attn_(q|qkv)\.", "a language model in GGUF form", "Load it with ERNIE Text Encoder Loader."),
    (r"layers\.\d+\.adaLN_sa_ln\.", "an ERNIE-Image diffusion model", "Load it with ERNIE Model Loader."),
    (r"^(first_stage_model\.|vae\.)?(decoder\.(conv_in|up)|encoder\.down|decoder\.mid_block)", "a VAE", "Load it with Load VAE (models/vae)."),
    (r"taesd|^\d+\.(conv\.\d+\.)?weight$", "a tiny autoencoder", "Put it into models/vae_approx and use Load VAE."),
    (r"double_blocks\.\d+|single_transformer_blocks\.\d+", "a Flux model", "Use Load Diffusion Model."),
    (r"transformer_blocks\.\d+\.img_mod", "a Qwen-Image model", "Use Load Diffusion Model."),
    (r"joint_blocks\.\d+", "a Stable Diffusion 3 model", "Use Load Checkpoint."),
    (r"cap_embedder\.|noise_refiner\.", "a Lumina or Z-Image model", "Use Load Diffusion Model."),
    (r"(^|\.)blocks\.\d+\.self_attn\.q\.", "a Wan model", "Use Load Diffusion Model."),
    (r"input_blocks\.\d+|down_blocks\.\d+\.resnets", "a Stable Diffusion model", "Use Load Checkpoint."),
    (r"layers\.\d+\.self_attn\.q_norm\.", "a Qwen text encoder", "ERNIE-Image needs Ministral-3 3B (ministral-3-3b.safetensors)."),
    (r"layers\.\d+\.self_attn\.q_proj\.", "a text encoder", "Load it with ERNIE Text Encoder Loader."),
    (r"encoder\.block\.\d+\.layer", "a T5 text encoder", "ERNIE-Image needs Ministral-3 3B (ministral-3-3b.safetensors)."),
    (r"text_model\.encoder\.layers", "a CLIP text encoder", "ERNIE-Image needs Ministral-3 3B (ministral-3-3b.safetensors)."),
)  # fmt: skip


def describe(names: Iterable[str]) -> str:
    """Return one or two sentences: what the file looks like and which node to use.

    Args:
        names: the tensor names of the file.
    """
    names = list(names)
    if not names:
        return "It holds no tensors. Download it again."
    for pattern, kind, advice in _KINDS:
        if any(re.search(pattern, name) for name in names):
            return f"It looks like {kind}. {advice}"
    return f"Its {len(names)} tensors, such as '{min(names)}', belong to no model known here. {_LOADERS}"
