"""Decoding GGUF weights on a GPU: eager torch, torch.compile, and Triton to bf16 and to FP8, per type.

    python bench/gguf_kernels.py --out bench/results/gguf-kernels-h200.json        (on a CUDA machine; needs gguf, not ComfyUI)

One weight of 4096 x 12288, the largest linear layer of ERNIE-Image, of random blocks. Times are medians of 30 runs after
warm-up, by CUDA events; GB/s counts the bytes read and the bytes written. torch.compile is measured for three types only,
because compiling takes longest. `exact` says whether, on the first 64 rows, every result equals gguf-py's on the
CPU bit for bit: float32, float16 and bf16 of eager and of Triton, and FP8 with given scales.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from loaders import ROOT, load_package
from timing import median_ms, same_bits

load_package()

from ernie_fast.kernels.fp8 import FP8_MAX, scales_of  # noqa: E402
from ernie_fast.kernels.gguf import eager, ops  # noqa: E402
from ernie_fast.kernels.gguf.qtypes import QTYPES  # noqa: E402

ROWS, COLUMNS, CHECKED_ROWS = 4096, 12288, 64
COMPILED = ("Q4_K", "Q6_K", "Q8_0")
DEVICE = "cuda"
# Where a block keeps its fp16 numbers; a type that is not named here has one, at byte 0.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
COLUMNS_SHOWN = ("eager", "compile", "triton_bf16", "triton_fp8", "triton_scales")


def random_weight(qtype: str) -> torch.Tensor:
    """Random bytes (ROWS, row bytes) uint8, their fp16 scales finite and below 1."""
    generator = torch.Generator(DEVICE).manual_seed(QTYPES[qtype].ggml_id)
    shape = (ROWS, COLUMNS // QTYPES[qtype].block_size, QTYPES[qtype].type_size)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
    for at in HALVES.get(qtype, (0,)):
        blocks[..., at + 1] &= 0xBB
    return blocks.view(ROWS, -1)


def differences(data: torch.Tensor, qtype: str) -> list[str]:
    """Return the names of the results on the first rows that differ from gguf-py's."""
    part = data[:CHECKED_ROWS].contiguous()
    expected = torch.from_numpy(gguf.quants.dequantize(part.cpu().numpy(), gguf.GGMLQuantizationType[qtype]))
    scale = scales_of(expected.abs().amax(dim=-1))
    found = {}
    for name, decode in (("eager", eager.dequantize), ("op", ops.dequantize)):
        for dtype in ops.FLOAT_DTYPES:
            found[f"{name} {dtype}"] = same_bits(decode(part, qtype, dtype), expected.to(dtype))
    found["row scales"] = same_bits(ops.row_scales(part, qtype), scale)
    for factor in (1.0, 0.01, 300.0):  # 0.01 saturates, 300 gives subnormal FP8 numbers
        changed = scale * factor
        fp8 = (expected * (1.0 / changed)[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        found[f"op fp8 x{factor}"] = same_bits(ops.dequantize_fp8(part, qtype, changed.to(DEVICE)), fp8)
    return [name for name, equal in found.items() if not equal]


def measure(qtype: str) -> dict:
    """Return the row of one type: times in ms, GB/s, backend, and what differs."""
    data = random_weight(qtype)
    scale = ops.row_scales(data, qtype)
    weights = ROWS * COLUMNS
    calls: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "eager": (lambda: eager.dequantize(data, qtype, torch.bfloat16), 2 * weights),
        "triton_bf16": (lambda: ops.dequantize(data, qtype, torch.bfloat16), 2 * weights),
        "triton_fp8": (lambda: ops.dequantize_fp8(data, qtype, scale), weights),
        "triton_scales": (lambda: ops.row_scales(data, qtype), 4 * ROWS),
    }
    if qtype in COMPILED:
        compiled = torch.compile(lambda blocks: eager.DECODERS[qtype](blocks).to(torch.bfloat16))
        blocks = data.view(-1, QTYPES[qtype].type_size)
        calls["compile"] = (lambda: compiled(blocks), 2 * weights)
    row: dict = {"type": qtype, "backend": ops.backend(data), "differs": differences(data, qtype), "ms": {}, "gb_s": {}}
    for name, (call, written) in calls.items():
        row["ms"][name] = round(median_ms(call), 4)
        row["gb_s"][name] = round((data.numel() + written) / row["ms"][name] / 1e6)
    row["speed_up_bf16"] = round(row["ms"]["eager"] / row["ms"]["triton_bf16"], 1)
    return row


def main() -> None:
    """Measure the types, print a table, and write the rows with the GPU and the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gguf-kernels.json")
    parser.add_argument("--types", nargs="+", choices=QTYPES, default=list(QTYPES))
    arguments = parser.parse_args()
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    result: dict = {"gpu": torch.cuda.get_device_name(), "versions": versions, "shape": [ROWS, COLUMNS], "rows": []}
    print(f"{result['gpu']}, {versions}, {ROWS} x {COLUMNS}, median ms (GB/s)", flush=True)
    print(f"{'type':8}", *(f"{name:>16}" for name in COLUMNS_SHOWN), "  exact", flush=True)
    start = time.perf_counter()
    for qtype in arguments.types:
        row = measure(qtype)
        result["rows"].append(row)
        cells = (f"{row['ms'][n]:.3f} ({row['gb_s'][n]})" if n in row["ms"] else "" for n in COLUMNS_SHOWN)
        exact = "yes" if not row["differs"] else f"NO: {row['differs']}"
        print(f"{qtype:8}", *(f"{cell:>16}" for cell in cells), f"  {exact} ({row['backend'][0]})", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
