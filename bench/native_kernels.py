"""Decoding NVFP4, MXFP8 and INT8 weights on a GPU: eager torch, comfy-kitchen, and ours to bf16 and to row-wise FP8.

    python bench/native_kernels.py --out bench/results/native-kernels-h200.json        (on a CUDA machine; needs comfy_kitchen, not ComfyUI)

One weight of 4096 x 12288, the largest linear layer of ERNIE-Image, of random codes and scales. Times are medians of 30 runs after
warm-up, by CUDA events; GB/s counts the bytes read and the bytes written. `kitchen` is comfy-kitchen's own choice of backend, to bf16.
`exact` says whether, on the first 128 rows, every result equals that of comfy-kitchen's eager functions on the CPU bit for bit: float32,
float16 and bf16 of eager and of the operators, row scales, and FP8 with given scales. `kitchen equal`: whether comfy-kitchen's own bf16 does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path

import comfy_kitchen
import torch
from comfy_kitchen.backends.eager import quantization
from loaders import ROOT, load_package
from timing import median_ms, same_bits

load_package()

from ernie_fast.kernels.backend import FLOAT_DTYPES  # noqa: E402
from ernie_fast.kernels.fp8 import FP8_MAX, scales_of  # noqa: E402
from ernie_fast.kernels.native import eager, ops  # noqa: E402

SHAPE = (4096, 12288)
CHECKED_ROWS = 128  # one row of tiles of block scales
DEVICE = "cuda"
FORMATS = ("nvfp4", "mxfp8", "int8", "int8_rows")
COLUMNS_SHOWN = ("eager", "kitchen", "bf16", "fp8", "scales")
Decode = Callable[[torch.dtype], torch.Tensor]


def random_weight(name: str) -> eager.Weight:
    """Random codes and scales, all finite."""
    generator = torch.Generator(DEVICE).manual_seed(FORMATS.index(name))

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=DEVICE, generator=generator)

    rows, columns = SHAPE
    if name == "nvfp4":
        blocks = integers(0x20, 0x7F, rows, columns // 16)
        scale = torch.tensor([3e-4], device=DEVICE)
        return eager.Weight("nvfp4", integers(0, 256, rows, columns // 2), scale, blocks, SHAPE)
    data = integers(0, 256, rows, columns)
    if name == "mxfp8":
        data[(data & 0x7F) == 0x7F] = 0  # NaN
        return eager.Weight(
            "mxfp8", data.view(torch.float8_e4m3fn), None, integers(105, 120, rows, columns // 32), SHAPE
        )
    scale = torch.rand(rows if name == "int8_rows" else 1, device=DEVICE, generator=generator) * 1e-3
    return eager.Weight("int8", data.view(torch.int8), scale, None, SHAPE)


def first_rows(weight: eager.Weight) -> eager.Weight:
    """The first rows of a weight."""
    scale, blocks = weight.scale, weight.block_scale
    if scale is not None and scale.numel() > 1:
        scale = scale[:CHECKED_ROWS]
    if blocks is not None:
        blocks = blocks[:CHECKED_ROWS]
    return weight._replace(
        data=weight.data[:CHECKED_ROWS], scale=scale, block_scale=blocks, shape=(CHECKED_ROWS, SHAPE[1])
    )


def on_cpu(weight: eager.Weight) -> eager.Weight:
    """A copy in RAM."""
    return eager.Weight(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in weight))


def ours(weight: eager.Weight) -> tuple[Decode, Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Our public functions for a weight: to floats, row scales, and to FP8 with given scales."""
    _, data, scale, blocks, shape = weight
    if weight.format == "nvfp4":
        return (
            lambda dtype: ops.dequantize_nvfp4(data, blocks, scale, shape, dtype),
            lambda: ops.nvfp4_row_scales(data, blocks, scale, shape),
            lambda row_scale: ops.nvfp4_to_fp8(data, blocks, scale, shape, row_scale),
        )
    if weight.format == "mxfp8":
        return (
            lambda dtype: ops.dequantize_mxfp8(data, blocks, shape, dtype),
            lambda: ops.mxfp8_row_scales(data, blocks, shape),
            lambda row_scale: ops.mxfp8_to_fp8(data, blocks, shape, row_scale),
        )
    return (
        lambda dtype: ops.dequantize_int8(data, scale, dtype),
        lambda: ops.int8_row_scales(data, scale),
        lambda row_scale: ops.int8_to_fp8(data, scale, row_scale),
    )


def kitchen(weight: eager.Weight, dtype: torch.dtype, eagerly: bool = False) -> torch.Tensor:
    """comfy-kitchen's weight: by the backend that it chooses, or by its eager functions."""
    module = quantization if eagerly else comfy_kitchen
    if weight.format == "nvfp4":
        return module.dequantize_nvfp4(
            weight.data, weight.scale[0], weight.block_scale.view(torch.float8_e4m3fn), dtype
        )
    if weight.format == "mxfp8":
        return module.dequantize_mxfp8(weight.data, weight.block_scale.view(torch.float8_e8m0fnu), dtype)
    scale = weight.scale[:, None] if weight.scale.numel() > 1 else weight.scale[0]
    functions = quantization if eagerly else torch.ops.comfy_kitchen
    return functions.dequantize_int8_simple_dtype(weight.data, scale, quantization.DTYPE_TO_CODE[dtype])


def differences(weight: eager.Weight) -> list[str]:
    """Return the names of the results on the first rows that differ from those of comfy-kitchen's eager functions on the CPU."""
    part = first_rows(weight)
    reference = on_cpu(part)
    decode, row_scales, to_fp8 = ours(part)
    exact = kitchen(reference, torch.float32, eagerly=True)
    scale = scales_of(exact.abs().amax(dim=-1))
    found = {"row scales": same_bits(row_scales(), scale)}
    for dtype in FLOAT_DTYPES:
        expected = kitchen(reference, dtype, eagerly=True)
        found[f"eager {dtype}"] = same_bits(eager.dequantize(part, dtype), expected)
        found[f"op {dtype}"] = same_bits(decode(dtype), expected)
    for factor in (1.0, 0.01, 300.0):  # 0.01 saturates, 300 gives subnormal FP8 numbers
        changed = scale * factor
        fp8 = (exact * (1.0 / changed)[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        found[f"op fp8 x{factor}"] = same_bits(to_fp8(changed.to(DEVICE)), fp8)
    return [name for name, equal in found.items() if not equal]


def measure(name: str) -> dict:
    """Return the row of one format: times in ms, GB/s, backend, and what differs."""
    weight = random_weight(name)
    decode, row_scales, to_fp8 = ours(weight)
    row_scale = row_scales()
    weights = SHAPE[0] * SHAPE[1]
    read = sum(value.nbytes for value in weight if isinstance(value, torch.Tensor))
    calls: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "eager": (lambda: eager.dequantize(weight, torch.bfloat16), 2 * weights),
        "kitchen": (lambda: kitchen(weight, torch.bfloat16), 2 * weights),
        "bf16": (lambda: decode(torch.bfloat16), 2 * weights),
        "fp8": (lambda: to_fp8(row_scale), weights),
        "scales": (row_scales, 4 * SHAPE[0]),
    }
    part = first_rows(weight)
    expected = kitchen(on_cpu(part), torch.bfloat16, eagerly=True)
    row: dict = {
        "format": name,
        "backend": ops.backend(weight.data),
        "differs": differences(weight),
        "kitchen_equal": same_bits(kitchen(part, torch.bfloat16), expected),
        "ms": {},
        "gb_s": {},
    }
    for column, (call, written) in calls.items():
        row["ms"][column] = round(median_ms(call), 4)
        row["gb_s"][column] = round((read + written) / row["ms"][column] / 1e6)
    row["speed_up_bf16"] = round(row["ms"]["kitchen"] / row["ms"]["bf16"], 2)
    return row


def main() -> None:
    """Measure the formats, print a table, and write the rows with the GPU and the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "native-kernels.json")
    arguments = parser.parse_args()
    import triton

    versions = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "comfy-kitchen": importlib.metadata.version("comfy-kitchen"),
    }
    result: dict = {"gpu": torch.cuda.get_device_name(), "versions": versions, "shape": SHAPE, "rows": []}
    print(f"{result['gpu']}, {versions}, {SHAPE[0]} x {SHAPE[1]}, median ms (GB/s)", flush=True)
    print(f"{'format':10}", *(f"{name:>16}" for name in COLUMNS_SHOWN), "  exact, kitchen equal", flush=True)
    start = time.perf_counter()
    for name in FORMATS:
        row = measure(name)
        result["rows"].append(row)
        cells = (f"{row['ms'][n]:.3f} ({row['gb_s'][n]})" for n in COLUMNS_SHOWN)
        exact = "yes" if not row["differs"] else f"NO: {row['differs']}"
        equal = "yes" if row["kitchen_equal"] else "no"
        print(f"{name:10}", *(f"{cell:>16}" for cell in cells), f"  {exact}, {equal} ({row['backend'][0]})", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
