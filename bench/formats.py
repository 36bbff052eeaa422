"""Storage formats on the bundled tiny checkpoint: pictures, weights and sizes against the unquantised model.

    python bench/formats.py                 (COMFYUI_PATH set, or after `make host`; about 25 minutes on 2 cores)

For each format the linear layers of the blocks are quantised, the same 6 prompts are painted (20 steps, cfg 4, FP32 on the CPU, through
ComfyUI's own sampler), and each picture is compared with that of the unquantised weights and the same seed. SQNR is the signal-to-noise
ratio of a weight. Formats with 4-bit activations (W4A4) quantise the activations too; for the others the CPU expands the weights first.
These are numbers of the tiny model: a larger one may do better or worse. Writes a CSV and a table.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

from loaders import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from quality import NANO, PROMPTS, Nano, Task, psnr, ssim  # starts ComfyUI and loads the package

# isort: split
import torch
from comfy.quant_ops import QuantizedTensor
from ernie_fast.kernels import int4, svdquant
from ernie_fast.kernels.gguf.qtypes import QTYPES
from ernie_fast.nodes.loaders.save import save_model
from ernie_fast.nodes.model.build import SOURCE, load_model
from ernie_fast.nodes.model.quantise import WEIGHT_FORMATS, QuantisePolicy
from ernie_files import is_block_linear
from gguf_files import write_gguf
from PIL import Image, ImageDraw
from safetensors.torch import load_file

FILE = NANO / "ernie-image-nano.safetensors"
SHOWN = ("unquantised", "Q8_0", "fp8", "Q5_K", "Q4_K", "nvfp4", "svdquant_w4a4", "Q2_K")
PLAIN = "plain_w4a4"  # no choice of the loader: 4-bit weights and activations without SVDQuant's low-rank branch
GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K")


@dataclass(frozen=True)
class Row:
    """One format: bits per weight of the quantised layers, MB on disk and in memory, dB, and structural similarity."""

    format: str
    bits: float
    disk_mb: float
    memory_mb: float
    sqnr_mean_db: float
    sqnr_worst_db: float
    psnr_mean_db: float
    psnr_worst_db: float
    ssim_mean: float


def load(name: str, folder: Path) -> tuple[Any, int]:
    """Return (the model in a format, bytes of its file)."""
    if name == PLAIN:
        with mock.patch.object(svdquant, "quantize", plain_w4a4):
            model = load_model(FILE, "fp32", policy=QuantisePolicy("svdquant_w4a4"))
        return model, save_model(model, folder / f"{name}.safetensors")[0]
    if name in WEIGHT_FORMATS:
        model = load_model(FILE, "fp32", policy=QuantisePolicy(name))
        return model, save_model(model, folder / f"{name}.safetensors")[0]
    file = folder / f"{name}.gguf"
    write_gguf(file, load_file(FILE), lambda key: name if is_block_linear(key) else "BF16")
    return load_model(file, "fp32"), file.stat().st_size


def plain_w4a4(weight: torch.Tensor) -> svdquant.SVDQuantWeight:
    """Quantise (N, K) to INT4 with one scale per 64 inputs, amax / 7, and no low-rank branch: what SVDQuant is measured against."""
    groups = weight.float().view(len(weight), -1, svdquant.GROUP_SIZE)
    scales = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-7, 7).flatten(1)
    none = torch.zeros(weight.shape[1], svdquant.RANK_MULTIPLE, dtype=torch.bfloat16)
    ones = torch.ones(weight.shape[1], dtype=torch.bfloat16)
    return svdquant.SVDQuantWeight(int4.pack(codes), scales.T.contiguous(), none, none.new_zeros(len(weight), none.shape[1]), ones)


def weight_errors(model: Any) -> tuple[list[float], float]:
    """Return (SQNR in dB of each quantised layer, bits per weight)."""
    originals = load_file(FILE)
    ratios, stored_bits, weights = [], 0, 0
    for name, parameter in model.model.diffusion_model.named_parameters():
        tensor = parameter.data if isinstance(parameter.data, QuantizedTensor) else parameter
        if not isinstance(tensor, QuantizedTensor):
            continue
        original = originals[name].float()
        error = tensor.dequantize().float() - original
        ratios.append(10 * math.log10(float(original.square().mean() / error.square().mean())))
        stored_bits += 8 * sum(part.nbytes for part in tensor.state_dict(name).values())
        weights += original.numel()
    return ratios, stored_bits / weights


def run_format(name: str, prompts: tuple[str, ...], references: list[torch.Tensor]) -> tuple[Row, list[torch.Tensor]]:
    """Paint every prompt with the weights in one format; return the numbers and the pictures."""
    torch.set_grad_enabled(False)
    nano = Nano()
    with tempfile.TemporaryDirectory() as folder:
        model, disk = load(name, Path(folder))
        ratios, bits = weight_errors(model)
        task = Task(20, 4.0, prompts, 1)
        pictures = [nano.picture(nano.paint(model, task, prompt, 0)[0]) for prompt in prompts]
        memory = model.get_attachment(SOURCE).stored_bytes
    quality = [psnr(found, wanted) for found, wanted in zip(pictures, references, strict=True)]
    similar = [ssim(found, wanted) for found, wanted in zip(pictures, references, strict=True)]
    print(f"{name}: {sum(quality) / len(quality):.1f} dB", flush=True)
    row = Row(
        name, bits, disk / 1e6, memory / 1e6, sum(ratios) / len(ratios), min(ratios), sum(quality) / len(quality), min(quality),
        sum(similar) / len(similar),
    )  # fmt: skip
    return row, pictures


def paint_references(prompts: tuple[str, ...]) -> list[torch.Tensor]:
    """Paint every prompt with the weights as stored (BF16)."""
    torch.set_grad_enabled(False)
    nano = Nano()
    task = Task(20, 4.0, prompts, 1)
    return [nano.picture(nano.paint(nano.model, task, prompt, 0)[0]) for prompt in prompts]


def draw_strip(file: Path, columns: dict[str, list[torch.Tensor]]) -> None:
    """Draw the first pictures of each format below its name, (3, 256, 256) in 0 to 1 each."""
    names, title_px, rows, side = [name for name in SHOWN if name in columns], 28, 3, 192
    canvas = Image.new("RGB", (len(names) * side, title_px + rows * side), "white")
    draw = ImageDraw.Draw(canvas)
    for index, name in enumerate(names):
        draw.text((index * side + 6, 4), name, fill="black", font_size=18)
        for row, picture in enumerate(columns[name][:rows]):
            pixels = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
            canvas.paste(Image.fromarray(pixels).resize((side, side), Image.Resampling.LANCZOS), (index * side, title_px + row * side))
    canvas.save(file, optimize=True)


def main() -> None:
    """Run every format and write CSV and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=(*WEIGHT_FORMATS, PLAIN, *QTYPES), default=[*WEIGHT_FORMATS, PLAIN, *GGUF_TYPES])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--jobs", type=int, default=1, help="formats that run at once, each in a process")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "formats-nano.csv")
    parser.add_argument("--strip", type=Path, help="draw some of the pictures side by side into this file")
    arguments = parser.parse_args()
    prompts = PROMPTS[: arguments.prompts]
    references = paint_references(prompts)
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    count = len(arguments.formats)
    with ProcessPoolExecutor(arguments.jobs, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        results = list(pool.map(run_format, arguments.formats, [prompts] * count, [references] * count))
    rows = [row for row, _ in results]
    if arguments.strip:
        draw_strip(arguments.strip, {"unquantised": references} | {row.format: pictures for row, pictures in results})
    with arguments.out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([field.name for field in fields(Row)])
        for row in rows:
            writer.writerow([f"{value:.4f}" if isinstance(value, float) else value for value in astuple(row)])
    print("| format | bits per weight | on disk, MB | in memory, MB | SQNR mean / worst, dB | PSNR mean / worst, dB | SSIM |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r.format} | {r.bits:.2f} | {r.disk_mb:.1f} | {r.memory_mb:.1f} | {r.sqnr_mean_db:.1f} / {r.sqnr_worst_db:.1f} | "
            f"{r.psnr_mean_db:.1f} / {r.psnr_worst_db:.1f} | {r.ssim_mean:.4f} |"
        )


if __name__ == "__main__":
    main()
