"""cache-dit itself on the bundled tiny checkpoint, for bench/quality.py. It needs an environment of its own:

    python -m venv .cache/peers
    .cache/peers/bin/pip install torch==2.14.1 diffusers==0.42.1 cache-dit==1.5.3
    .cache/peers/bin/python bench/cache_dit_peer.py --inputs in.safetensors --configs configs.json --out out.safetensors

`in.safetensors` holds `sigmas` (steps + 1), and for each case i `noise.i` (1, 128, h, w), `cond.i` and `uncond.i`
(1, T, width); its metadata has `cfg` and `cases`. `out.safetensors` gets `latent.<config>.<i>` and, as metadata `runs`,
the blocks that ran. As in diffusers' pipeline, cond and uncond are padded into one batch. An uncached run is always
made, named "uncached".
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import cache_dit
import torch
from diffusers import ErnieImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

NANO = Path(__file__).resolve().parent.parent / "assets" / "nano" / "ernie-image-nano.safetensors"


@dataclass(frozen=True)
class PeerConfig:
    """One setting of cache-dit. `taylor_order` 0 is without calibrator; `max_continuous` -1 without a cap."""

    name: str
    fn: int
    bn: int
    threshold: float
    warmup: int
    max_continuous: int
    taylor_order: int


def build(config: PeerConfig | None, steps: int) -> tuple[ErnieImageTransformer2DModel, list[int]]:
    """Return a transformer with cache-dit enabled, and a list that gets the batch size of every block that runs."""
    model = ErnieImageTransformer2DModel(
        hidden_size=256, num_attention_heads=2, num_layers=12, ffn_hidden_size=768, in_channels=128, out_channels=128,
        patch_size=1, text_in_dim=192, rope_theta=256, rope_axes_dim=(32, 48, 48),
    ).eval()  # fmt: skip
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(NANO).items()})
    ran: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, args, _out: ran.append(args[0].shape[1]))
    if config is not None:
        cache_config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=config.fn,
            Bn_compute_blocks=config.bn,
            residual_diff_threshold=config.threshold,
            max_warmup_steps=config.warmup,
            max_continuous_cached_steps=config.max_continuous,
            num_inference_steps=steps,
        )
        calibrator = None
        if config.taylor_order:
            calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=config.taylor_order)
        cache_dit.enable_cache(model, cache_config=cache_config, calibrator_config=calibrator)
    return model, ran


def paint(
    model: ErnieImageTransformer2DModel,
    sigmas: torch.Tensor,
    x: torch.Tensor,
    cond: torch.Tensor,
    uncond: torch.Tensor,
    cfg: float,
) -> torch.Tensor:
    """Return the latent after Euler steps, (1, 128, h, w)."""
    lengths = torch.tensor([uncond.shape[1], cond.shape[1]])
    text = torch.zeros(2, int(lengths.max()), cond.shape[2])
    text[0, : uncond.shape[1]], text[1, : cond.shape[1]] = uncond[0], cond[0]
    for sigma, following in itertools.pairwise(sigmas):
        velocity = model(
            hidden_states=torch.cat([x, x]),
            timestep=(sigma * 1000).expand(2),
            text_bth=text,
            text_lens=lengths,
            return_dict=False,
        )[0]
        x = x + (following - sigma) * (velocity[:1] + cfg * (velocity[1:] - velocity[:1]))
    return x


def main() -> None:
    """Run every configuration on every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    inputs = load_file(arguments.inputs)
    with safe_open(arguments.inputs, "pt") as opened:
        metadata = opened.metadata()
    sigmas, cfg = inputs["sigmas"], float(metadata["cfg"])
    steps = len(sigmas) - 1
    configs = [PeerConfig(**entry) for entry in json.loads(arguments.configs.read_text())]
    latents: dict[str, torch.Tensor] = {}
    runs: dict[str, list[int]] = {}
    for config in (None, *configs):
        name = "uncached" if config is None else config.name
        model, ran = build(config, steps)
        for case in range(int(metadata["cases"])):
            if config is not None:
                cache_dit.refresh_context(model, num_inference_steps=steps, verbose=False)
            ran.clear()
            noise, cond, uncond = (inputs[f"{part}.{case}"] for part in ("noise", "cond", "uncond"))
            latents[f"latent.{name}.{case}"] = paint(model, sigmas, noise, cond, uncond, cfg)
            runs.setdefault(name, []).append(sum(ran))
        print(f"{name}: {runs[name]} blocks", flush=True)
    versions = {package: version(package) for package in ("cache-dit", "diffusers", "torch")}
    save_file(latents, arguments.out, {"runs": json.dumps(runs), "versions": json.dumps(versions)})


if __name__ == "__main__":
    main()
