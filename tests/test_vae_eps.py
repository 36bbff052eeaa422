"""The latent batch norm of ComfyUI's Flux.2 autoencoder computes with another eps than the reference pipeline."""

from __future__ import annotations

import comfy.sd
import pytest
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL

TRAINED_EPS = 1e-5


@pytest.fixture(scope="module")
def vae():
    """A VAE of the Flux.2 layout with narrow channels, through ComfyUI's own detection."""
    config = {
        "double_z": True, "z_channels": 32, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "batch_norm_latent": True,
    }  # fmt: skip
    model = AutoencoderKL(ddconfig=config, embed_dim=32, decoder_ddconfig={**config, "ch": 32})
    generator = torch.Generator().manual_seed(0)
    sd = {}
    for name, tensor in model.state_dict().items():
        fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
        value = torch.randn(tensor.shape, generator=generator) / fan_in**0.5
        sd[name] = value * 0.1 + 1 if tensor.dim() == 1 and name.endswith("weight") else value
    sd["bn.running_mean"] = torch.randn(128, generator=generator)
    sd["bn.running_var"] = torch.rand(128, generator=generator) * 2.5 + 0.5
    del sd["bn.num_batches_tracked"]
    return comfy.sd.VAE(sd=sd)


def test_eps_of_the_latent_norm_changes_no_pixel_by_a_grey_level(vae):  # U08
    model = vae.first_stage_model
    latent = torch.randn(1, 128, 4, 4, generator=torch.Generator().manual_seed(1))
    ours = vae.decode(latent)
    core_eps = model.bn_eps
    assert core_eps == 1e-4, "ComfyUI changed the eps; docs/architecture.md names it"
    try:
        model.bn_eps = TRAINED_EPS
        reference = vae.decode(latent)
    finally:
        model.bn_eps = core_eps
    assert ours.shape == (1, 64, 64, 3)
    difference = (ours - reference).abs().max().item()
    assert 0 < difference < 1 / 255
