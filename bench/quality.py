"""Caches on the bundled tiny checkpoint: PSNR and SSIM to the uncached run of the same seed, against the share of work saved.

    python bench/quality.py --peers .cache/peers/bin/python          (COMFYUI_PATH set, or after `make host`; about 40 minutes)

Real pictures, FP32 on the CPU, through ComfyUI's own sampler. The ratio is transformer blocks of the uncached run divided by blocks
that ran, counted by hooks. Beside ours: ComfyUI's EasyCache and LazyCache on the same MODEL, and, in an environment of its own,
cache-dit itself (see cache_dit_peer.py). Writes a CSV (a row per setting and prompt), a table and a plot.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loaders import ROOT, load_package, start_comfyui

arguments_given, os.environ["COMFYUI_PATH"] = sys.argv, os.environ.get("COMFYUI_PATH", str(ROOT / ".host" / "ComfyUI"))
start_comfyui(["--cpu", "--disable-api-nodes"])
sys.argv = arguments_given
load_package()
import comfy.sample
import comfy.samplers
import comfy.taesd.taesd
import torch
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from ernie_fast.nodes.cache.attach import attach_cache
from ernie_fast.nodes.cache.config import PRESETS, CacheConfig
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import open_checkpoint
from ernie_fast.nodes.text.encoder import load_text_encoder
from ernie_fast.nodes.text.source import find_tokenizer
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import load_file, save_file

NANO = ROOT / "assets" / "nano"
PROMPTS = (
    "a red apple", "a dog face on a blue background", "a grinning face next to a pizza", "a house on a green background",
    "a soccer ball next to a trophy on a pink background", "a christmas tree on a red background",
    # Not looked at while the presets were chosen:
    "a butterfly on a pink background", "a hamburger on a purple background", "a star next to a moon on a black background",
    "a sunflower", "a ghost on a purple background", "grapes next to cherries",
)  # fmt: skip
SIDE = 16  # latent pixels of a 256 px picture
BLOCKS = 12


@dataclass(frozen=True)
class Task:
    """How pictures are made."""

    steps: int
    cfg: float
    prompts: tuple[str, ...]
    seeds: int
    sampler: str = "euler"

    def cases(self) -> list[tuple[str, int]]:
        """Return every (prompt, seed)."""
        return [(prompt, seed) for prompt in self.prompts for seed in range(self.seeds)]


@dataclass(frozen=True)
class Row:
    """One setting on one prompt and seed."""

    task: str
    family: str
    name: str
    prompt: str
    seed: int
    ratio: float
    psnr: float
    ssim: float


class Nano:
    """The tiny model with its text encoder and autoencoder."""

    def __init__(self) -> None:
        self.model = load_model(NANO / "ernie-image-nano.safetensors", "fp32")
        encoder = NANO / "ministral-nano.safetensors"
        self.clip = load_text_encoder(encoder, encoder.name, find_tokenizer(open_checkpoint(encoder)), "comfyui")
        vae = comfy.taesd.taesd.TAESD(
            str(NANO / "taef2_encoder.safetensors"), str(NANO / "taef2_decoder.safetensors"), latent_channels=128
        )
        self.vae = vae.float().eval()
        self.ran = 0
        for layer in self.model.model.diffusion_model.layers:
            layer.mlp.linear_fc2.register_forward_hook(self._count)  # attention reuse calls no block as a whole

    def _count(self, _module: Any, args: tuple[Any, ...], _out: Any) -> None:
        self.ran += args[0].shape[0]

    def condition(self, prompt: str) -> list[Any]:
        """Return ComfyUI's condition of a prompt."""
        return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(prompt))

    def paint(self, model: Any, task: Task, prompt: str, seed: int) -> tuple[torch.Tensor, int]:
        """Return the latent (1, 128, 16, 16) and the number of blocks that ran."""
        latent = torch.zeros(1, 128, SIDE, SIDE)
        noise = comfy.sample.prepare_noise(latent, seed)
        self.ran = 0
        out = comfy.sample.sample(
            model, noise, task.steps, task.cfg, task.sampler, "simple", self.condition(prompt), self.condition(""), latent,
            disable_pbar=True, seed=seed,
        )  # fmt: skip
        return out, self.ran

    def picture(self, latent: torch.Tensor) -> torch.Tensor:
        """Return (3, 256, 256) in 0 to 1."""
        return ((self.vae.decode(latent.float()).clamp(-1, 1) + 1) / 2)[0]


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two pictures in 0 to 1; 99 for equal ones."""
    error = float(((a - b) ** 2).mean())
    return min(99.0, -10 * math.log10(error)) if error else 99.0


def ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Structural similarity (Wang et al. 2004): Gaussian window of 11 pixels and sigma 1.5, mean over the channels."""
    at = torch.arange(11) - 5.0
    window = torch.exp(-(at**2) / (2 * 1.5**2))
    kernel = (window[:, None] * window[None]).div(window.sum() ** 2).expand(1, 1, 11, 11)

    def blur(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x.unsqueeze(1), kernel)

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    both = blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    value = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(value.mean())


def dbcache(**settings: Any) -> CacheConfig:
    """Our cache with cache-dit's way of deciding: first-block distance, 6 warm-up steps, at most 3 cached in a row."""
    base: dict[str, Any] = {"max_warmup_steps": 6, "max_continuous_cached_steps": 3, "forecast": "none"}
    return CacheConfig(**{**base, **settings})


def our_models(model: Any, task: str) -> Iterable[tuple[str, str, Any]]:
    """Yield (family, name, model) of our settings and ComfyUI's caches."""
    names = ("turbo",) if task == "turbo8" else ("safe", "balanced", "fast", "ultra")
    for name in names:
        yield "ours", name, attach_cache(model, PRESETS[name])
    if task == "base50":
        f2 = {"fn_compute_blocks": 2, "residual_diff_threshold": 0.12}
        for name, config in {
            "balanced, taylorseer 1": CacheConfig(forecast="taylorseer"),
            "balanced, none": CacheConfig(forecast="none"),
            "F2 0.12 taylorseer 1": dbcache(**f2, forecast="taylorseer"),
            "F2 0.12 corrected": dbcache(**f2, forecast="corrected"),
            "F2 0.12 taylorseer 1, fp8": dbcache(**f2, forecast="taylorseer", cache_dtype="fp8"),
            "F2 0.12 taylorseer 1, int8": dbcache(**f2, forecast="taylorseer", cache_dtype="int8"),
            "balanced, attention reuse 2": CacheConfig(attention_reuse=2),
            "balanced, mask fast": CacheConfig(steps_computation_mask="fast", steps_computation_policy="static"),
        }.items():
            yield "ours, variants", name, attach_cache(model, config)
    for threshold in (0.2,) if task == "turbo8" else (0.2, 0.4):
        for label, node in (("EasyCache", EasyCacheNode), ("LazyCache", LazyCacheNode)):
            yield label, f"{label} {threshold}", node.execute(model, threshold, 0.15, 0.95, False).args[0]


PEER_CONFIGS = (
    ("F8 0.08 (defaults)", 8, 0.08, 8, -1, 0), ("F4 0.12", 4, 0.12, 6, 3, 0), ("F2 0.12", 2, 0.12, 6, 3, 0), ("F1 0.08", 1, 0.08, 6, 3, 0),
    ("F1 0.2", 1, 0.2, 6, 4, 0), ("F2 0.12 taylorseer 1", 2, 0.12, 6, 3, 1), ("F1 0.2 taylorseer 1", 1, 0.2, 6, 4, 1),
    ("F1 0.3 taylorseer 1", 1, 0.3, 6, 6, 1),
)  # fmt: skip


def run_peers(nano: Nano, python: Path, task: Task, out: Path) -> None:
    """Run cache-dit in its own environment on the same noise and prompts; write its latents to `out`."""
    cases = task.cases()
    sampling = nano.model.get_model_object("model_sampling")
    tensors = {"sigmas": comfy.samplers.calculate_sigmas(sampling, "simple", task.steps)}
    for index, (prompt, seed) in enumerate(cases):
        tensors[f"noise.{index}"] = comfy.sample.prepare_noise(torch.zeros(1, 128, SIDE, SIDE), seed)
        tensors[f"cond.{index}"] = nano.condition(prompt)[0][0].float().contiguous()
        tensors[f"uncond.{index}"] = nano.condition("")[0][0].float().clone()
    fields = ("name", "fn", "threshold", "warmup", "max_continuous", "taylor_order")
    configs = [{**dict(zip(fields, entry, strict=True)), "bn": 0} for entry in PEER_CONFIGS]
    with tempfile.TemporaryDirectory() as folder:
        inputs, settings = Path(folder) / "in.safetensors", Path(folder) / "configs.json"
        save_file(tensors, inputs, {"cfg": str(task.cfg), "cases": str(len(cases))})
        settings.write_text(json.dumps(configs))
        script = ROOT / "bench" / "cache_dit_peer.py"
        command = [str(python), str(script), "--inputs", str(inputs), "--configs", str(settings), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def peer_rows(nano: Nano, file: Path, task: Task) -> list[Row]:
    """Return the rows of what cache_dit_peer.py wrote, each picture compared with its own uncached one, as ours are."""
    latents = load_file(file)
    with safe_open(file, "pt") as opened:
        runs = json.loads(opened.metadata()["runs"])
    rows = []
    for name, blocks in runs.items():
        for index, case in enumerate(task.cases()):
            found, wanted = (nano.picture(latents[f"latent.{which}.{index}"]) for which in (name, "uncached"))
            ratio = task.steps * 2 * BLOCKS / blocks[index]
            rows.append(Row("base50", "cache-dit", name, *case, ratio, psnr(found, wanted), ssim(found, wanted)))
    return rows


def run_case(label: str, task: Task, case: tuple[str, int]) -> list[Row]:
    """Run every setting on one prompt and seed."""
    torch.set_grad_enabled(False)
    nano = Nano()
    reference, blocks = nano.paint(nano.model, task, *case)
    wanted = nano.picture(reference)
    rows = []
    for family, name, model in our_models(nano.model, label):
        latent, ran = nano.paint(model, task, *case)
        found = nano.picture(latent)
        rows.append(Row(label, family, name, *case, blocks / ran, psnr(found, wanted), ssim(found, wanted)))
    print(f"{label}: {case[0]}, seed {case[1]}", flush=True)
    return rows


def run_task(label: str, task: Task, peers: Path | None, jobs: int) -> list[Row]:
    """Run every prompt and seed in `jobs` processes; `peers` is a file of cache_dit_peer.py, or None."""
    cases = task.cases()
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        results = list(pool.map(run_case, [label] * len(cases), [task] * len(cases), cases))
    rows = [row for found in results for row in found]
    if peers and label == "base50":
        rows += peer_rows(Nano(), peers, task)
    return rows


def summary(rows: list[Row]) -> str:
    """Return one line of means for rows of one setting."""
    count = len(rows)
    ratio, mean, worst = sum(r.ratio for r in rows) / count, sum(r.psnr for r in rows) / count, min(r.psnr for r in rows)
    similar = sum(r.ssim for r in rows) / count
    return f"| {rows[0].task} | {rows[0].family} | {rows[0].name} | {ratio:.2f} | {mean:.1f} | {worst:.1f} | {similar:.4f} |"


def grouped(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each setting together, in the order of their first row."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.family, row.name), []).append(row)
    return list(groups.values())


COLOURS = {"ours": "#c0392b", "ours, variants": "#e59866", "cache-dit": "#2471a3", "EasyCache": "#1e8449", "LazyCache": "#7d3c98"}


def plot(rows: list[Row], file: Path) -> None:
    """Draw mean PSNR over the ratio, one dot per setting of the 50-step task."""
    width, height, left, bottom = 1200, 720, 80, 70
    low, high, far = 5.0, 75.0, 4.0
    canvas = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(canvas)

    def at(ratio: float, value: float) -> tuple[float, float]:
        x = left + (ratio - 1) / (far - 1) * (width - left - 30)
        return x, height - bottom - (min(value, high) - low) / (high - low) * (height - bottom - 30)

    for step in range(7):
        x, y = at(1 + step * 0.5, low)
        draw.line([(x, 30), (x, y)], fill="#dddddd")
        draw.text((x - 12, y + 8), f"{1 + step * 0.5:.1f}x", fill="black", font_size=18)
    for value in range(10, 80, 10):
        x, y = at(1, value)
        draw.line([(x, y), (width - 30, y)], fill="#dddddd")
        draw.text((30, y - 10), f"{value} dB", fill="black", font_size=18)
    draw.text((left, height - 32), "blocks of the uncached run / blocks that ran (50 steps, cfg 4, tiny checkpoint)", fill="black", font_size=18)
    for index, (family, colour) in enumerate(COLOURS.items()):
        draw.ellipse([width - 190, 40 + index * 28, width - 176, 54 + index * 28], fill=colour)
        draw.text((width - 165, 36 + index * 28), family, fill="black", font_size=18)
    for group in grouped([row for row in rows if row.task == "base50" and row.name != "uncached"]):
        x, y = at(sum(r.ratio for r in group) / len(group), sum(r.psnr for r in group) / len(group))
        draw.ellipse([x - 7, y - 7, x + 7, y + 7], fill=COLOURS[group[0].family])
        if group[0].family == "ours":
            draw.text((x + 10, y - 12), group[0].name, fill="black", font_size=18)
    canvas.save(file, optimize=True)


def main() -> None:
    """Run the tasks and write CSV, table and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="Python of the environment with cache-dit; without it those rows are left out")
    parser.add_argument("--peer-results", type=Path, help="where --peers writes; without --peers, read what an earlier run wrote")
    parser.add_argument("--prompts", type=int, default=6, help="the first n of 12 prompts; the last 6 were not used for tuning")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first n prompts")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="prompts that run at once, each in a process")
    parser.add_argument("--tasks", nargs="+", choices=("base50", "base20", "turbo8"), default=["base50", "base20", "turbo8"])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "quality-nano.csv")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "cache-quality.png")
    arguments = parser.parse_args()
    prompts = PROMPTS[arguments.skip : arguments.prompts]
    torch.set_grad_enabled(False)
    tasks = {"base50": Task(50, 4.0, prompts, arguments.seeds), "base20": Task(20, 4.0, prompts, arguments.seeds),
             "turbo8": Task(8, 1.0, prompts, arguments.seeds)}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        peers = arguments.peer_results or (Path(folder) / "peers.safetensors" if arguments.peers else None)
        if arguments.peers and peers:
            run_peers(Nano(), arguments.peers, tasks["base50"], peers)
        run_tasks(arguments, tasks, peers)


def run_tasks(arguments: argparse.Namespace, tasks: dict[str, Task], peers: Path | None) -> None:
    """Run the chosen tasks, write the CSV after each, then the table and the plot."""
    rows: list[Row] = []
    for label in arguments.tasks:
        rows += run_task(label, tasks[label], peers, arguments.jobs)
        with arguments.out.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(Row.__dataclass_fields__)
            for r in rows:
                numbers = (f"{r.ratio:.3f}", f"{r.psnr:.2f}", f"{r.ssim:.5f}")
                writer.writerow((r.task, r.family, r.name, r.prompt, r.seed, *numbers))
    print("| task | family | setting | ratio | PSNR, dB | worst | SSIM |\n|---|---|---|---|---|---|---|")
    for group in grouped(rows):
        print(summary(group))
    plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
