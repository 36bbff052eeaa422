"""The forward and the cache on full-size random weights: time, memory, and what the cache's ratio is worth on the clock.

    python bench/cache_speed.py --out bench/results/cache-h200.json        (on a GPU machine; COMFYUI_PATH set)

1024x1024, 256 text tokens, negative prompt of 8 tokens, euler, through ComfyUI's own sampler; a process per memory mode. `forward`
rows sample with ComfyUI's own forward and with ours, in turns; `cache` rows sample 50 steps at cfg 4 with each setting and compare
the time saved with the blocks saved. Random weights: the difference thresholds are lifted, so that the caps alone decide, and
nothing here says anything about pictures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaders import MODES, load_package, save, start_comfyui, write_checkpoints

if TYPE_CHECKING:
    import torch

FORMATS = ("bf16", "float8_e4m3fn")
STEPS = 50
BLOCKS = 36
# Dynamic VRAM with all but about 8 GB of the card kept free: the weights are streamed.
MODES = {name: MODES[name] for name in ("dynamic", "no-dynamic")} | {"dynamic-8gb": ["--vram-headroom", "{reserve_gb}"]}


class Bench:
    """One model on the device, and how it is sampled."""

    def __init__(self, file: Path, side_px: int = 1024) -> None:
        import torch
        from ernie_fast.nodes.model.build import load_model

        self.model = load_model(file)
        generator = torch.Generator().manual_seed(1)
        self.positive = [[torch.randn(1, 256, 3072, generator=generator), {}]]
        self.negative = [[torch.randn(1, 8, 3072, generator=generator), {}]]
        self.latent = torch.zeros(1, 128, side_px // 16, side_px // 16)

    def sample(self, model: Any, steps: int, cfg: float) -> tuple[torch.Tensor, list[float], float]:
        """Return the latent, the seconds of each step, and the peak of allocated device memory in GB."""
        import comfy.sample
        import torch

        times = [0.0]

        def callback(*_: Any) -> None:
            torch.cuda.synchronize()
            times.append(time.perf_counter())

        noise = comfy.sample.prepare_noise(self.latent, 0)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        times[0] = time.perf_counter()
        out = comfy.sample.sample(
            model, noise, steps, cfg, "euler", "simple", self.positive, self.negative, self.latent,
            callback=callback, disable_pbar=True, seed=0,
        )  # fmt: skip
        steps_s = [after - before for before, after in itertools.pairwise(times)]
        return out, steps_s, torch.cuda.max_memory_allocated() / 1e9


def compare_forwards(bench: Bench) -> dict[str, Any]:
    """Sample 8 steps at cfg 1 in turns: ComfyUI's forward, ours, and ours without streaming the next block ahead."""
    import torch
    from ernie_fast.nodes.model import blocks, forward

    core = bench.model.clone()
    for kind in forward.WRAPPERS:
        core.remove_wrappers_with_key(kind, forward.KEY)
    prefetch = blocks._prefetch_queue
    outputs: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {}
    again = None
    for turn in range(3):
        for name, model in (("core", core), ("ours", bench.model), ("ours_no_prefetch", bench.model)):
            blocks._prefetch_queue = prefetch if name == "ours" else (lambda *_: None)
            outputs_now, steps, _ = bench.sample(model, 8, 1.0)
            if turn:
                times.setdefault(name, []).extend(steps[2:])
            if turn == 2 and name == "core":
                again = bool(torch.equal(outputs[name], outputs_now))
            outputs[name] = outputs_now
    blocks._prefetch_queue = prefetch
    return {
        "agrees_with_comfyui": forward.agrees_with_comfyui(),
        "equal": bool(torch.equal(outputs["core"], outputs["ours"])),
        "core_equal_to_itself": again,
        "finite": bool(torch.isfinite(outputs["ours"]).all()),
        "step_ms": {name: round(statistics.median(values) * 1000, 1) for name, values in times.items()},
    }


def cache_rows(bench: Bench) -> list[dict[str, Any]]:
    """Sample with each setting; the uncached run before and after, so that drift shows."""
    import torch
    from ernie_fast.nodes.cache.attach import attach_cache, cache_of
    from ernie_fast.nodes.cache.config import PRESETS, CacheConfig

    eager = {name: replace(config, residual_diff_threshold=100.0) for name, config in PRESETS.items() if config}
    first = CacheConfig(fn_compute_blocks=1, residual_diff_threshold=100.0, max_warmup_steps=6, max_continuous_cached_steps=3,
                        forecast="taylorseer")  # fmt: skip
    settings: dict[str, CacheConfig | None] = {
        "off": None, "threshold 0": CacheConfig(residual_diff_threshold=0.0),
        "threshold 0, F1": CacheConfig(fn_compute_blocks=1, residual_diff_threshold=0.0, forecast="taylorseer"),
        **{name: eager[name] for name in ("safe", "balanced", "fast", "ultra")},
        "F1 taylorseer 1": first, "F1 taylorseer 1, fp8": replace(first, cache_dtype="fp8"),
        "F1 taylorseer 1, int8": replace(first, cache_dtype="int8"),
        "attention reuse 2": CacheConfig(residual_diff_threshold=0.0, attention_reuse=2),
        "attention reuse 2, fp8": CacheConfig(residual_diff_threshold=0.0, attention_reuse=2, cache_dtype="fp8"),
        "off again": None,
    }  # fmt: skip
    bench.sample(bench.model, 3, 4.0)
    rows: list[dict[str, Any]] = []
    plain = None
    for name, config in settings.items():
        model = bench.model if config is None else attach_cache(bench.model, config)
        out, steps, peak = bench.sample(model, STEPS, 4.0)
        # The first step loads what is not on the device yet; both sides leave it out.
        row: dict[str, Any] = {"setting": name, "seconds": round(sum(steps[1:]), 3), "peak_gb": round(peak, 2)}
        row["median_step_ms"] = round(statistics.median(steps[1:]) * 1000, 2)
        if plain is None:
            plain = out
        if config is not None:
            cache = cache_of(model)
            # Of the steps that are timed: all but the first.
            total, ran = cache.report.blocks_total - 2 * BLOCKS, cache.report.blocks_run - 2 * BLOCKS
            row.update(compute_ratio=round(total / ran, 3), computed=cache.report.computed,
                       cache_mb=round(cache.report.peak_bytes / 1e6, 1))  # fmt: skip
            row["bit_identical"] = bool(torch.equal(out, plain))
        rows.append(row)
        print("  " + json.dumps(row), flush=True)
    off = min(row["seconds"] for row in rows if row["setting"].startswith("off"))
    for row in rows:
        row["speed_up"] = round(off / row["seconds"], 3)
    return rows


def other_nodes(bench: Bench) -> dict[str, Any]:
    """Run ComfyUI's own accelerators and guidance nodes once: do they take effect on the device?"""
    import torch
    from comfy_extras.nodes_easycache import EasyCacheNode
    from comfy_extras.nodes_nag import NAGuidance
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    plain = bench.sample(bench.model, 6, 4.0)[0]
    found = {}
    for name, model in {
        "EasyCache": EasyCacheNode.execute(bench.model, 100.0, 0.0, 1.0, False).args[0],
        "NAGuidance": NAGuidance.execute(bench.model, 5.0, 0.5, 1.5).args[0],
        "SkipLayerGuidanceDiT": SkipLayerGuidanceDiT.execute(bench.model, 3.0, 0.0, 1.0, "7", "7", 0.0).args[0],
    }.items():
        out, steps, _ = bench.sample(model, 6, 4.0)
        found[name] = {"finite": bool(torch.isfinite(out).all()), "effect": float((out - plain).norm() / plain.norm()), "seconds": round(sum(steps), 2)}
    return found


def run_mode(folder: Path, mode: str, reserve_gb: int) -> None:
    """Run one memory mode in this process and print a JSON line per measurement."""
    start_comfyui([part.format(reserve_gb=reserve_gb) for part in MODES[mode]])
    load_package()
    for format_name in FORMATS if mode != "dynamic-8gb" else ("bf16",):
        bench = Bench(folder / f"{format_name}.safetensors")
        row = {"mode": mode, "format": format_name, "forward": compare_forwards(bench)}
        print("ROW " + json.dumps(row), flush=True)
        if format_name == "bf16" and mode == "dynamic":  # the default of ComfyUI
            print("ROW " + json.dumps({"mode": mode, "format": format_name, "cache": cache_rows(bench)}), flush=True)
            print("ROW " + json.dumps({"mode": mode, "format": format_name, "nodes": other_nodes(bench)}), flush=True)


def main() -> None:
    """Write the files, run each mode, and save after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cache.json"))
    parser.add_argument("--folder", type=Path, help="where the 25 GB of files go; default: a temporary folder")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--reserve-gb", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step == "write":
        return write_checkpoints(arguments.folder, FORMATS)
    if arguments.step:
        return run_mode(arguments.folder, arguments.step, arguments.reserve_gb)
    import torch  # not before a step: dynamic VRAM wants to start first

    reserve_gb = int(torch.cuda.get_device_properties(0).total_memory / 1024**3) - 8
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        rows: list[dict[str, Any]] = []
        for step in ("write", *arguments.modes):
            command = [sys.executable, "-u", __file__, "--folder", str(folder), "--step", step, "--reserve-gb", str(reserve_gb)]
            start = time.perf_counter()
            run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert run.stdout
            for line in run.stdout:
                if line.startswith("ROW "):
                    rows.append(json.loads(line[4:]))
                    save(arguments.out, rows)
                print(line, end="", flush=True)
            print(f"{step}: exit {run.wait()}, {time.perf_counter() - start:.0f} s", flush=True)
    return None


if __name__ == "__main__":
    main()
