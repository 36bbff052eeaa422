"""Sample a small model through ComfyUI's own samplers."""

from __future__ import annotations

import comfy.sample
import torch
from ernie_fast.nodes.model import forward as forward_module


def condition(tokens: int, width: int = 192, seed: int = 1):
    return [[torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed)), {}]]


def paint(model, steps=3, positive=None, negative=None, cfg=4.0, batch=1, size=(4, 6), sampler="euler"):
    """Sample through ComfyUI's own sampler; prompts of equal length unless others are given."""
    positive, negative = positive or condition(7), negative or condition(7, seed=2)
    latent = torch.zeros(batch, 128, *size)
    noise = comfy.sample.prepare_noise(latent, 0)
    return comfy.sample.sample(
        model, noise, steps, cfg, sampler, "simple", positive, negative, latent, disable_pbar=True, seed=0
    )


def core_forward(model):
    """A clone that runs ComfyUI's own forward."""
    clone = model.clone()
    for kind in forward_module.WRAPPERS:
        clone.remove_wrappers_with_key(kind, forward_module.KEY)
    return clone
