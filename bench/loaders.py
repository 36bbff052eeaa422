"""Our model loader beside ComfyUI's own, on full-size random weights: same outputs, time, and memory; and GGUF files, which ComfyUI lacks.

    python bench/loaders.py --out bench/results/loaders-h200.json        (on a GPU machine; COMFYUI_PATH set)

For each file format a checkpoint of the released size is written once; then, in a process of its own per memory mode
(dynamic VRAM, --disable-dynamic-vram, --lowvram with about 10 GB left), both loaders load it and run forwards at
1024x1024 with 256 text tokens. `equal` says whether the two outputs are bit-identical; `lora_equal` the same with a LoRA of rank 16 on every
linear layer, loaded by our LoRA loader and by ComfyUI's. For a GGUF file `equal` compares with its weights expanded to a BF16 file by
gguf-py's definition, and a process of its own gives the time until the weights are on the GPU and the most RAM that it held.
Random weights: this says nothing about pictures.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

ROOT = Path(__file__).resolve().parent.parent
# A large card never runs out, so the last mode reserves all but about 10 GB of it: weights are then streamed.
MODES = {
    "dynamic": [],
    "no-dynamic": ["--disable-dynamic-vram"],
    "lowvram": ["--lowvram", "--disable-dynamic-vram", "--reserve-vram", "{reserve_gb}"],
}
FORWARDS = 10  # the first half warms up
LORA_FORMATS = ("bf16", "float8_e4m3fn")
GGUF_FORMATS = ("Q4_K", "Q6_K", "Q8_0")
FORMATS = ("bf16", "float8_e4m3fn", "nvfp4", *GGUF_FORMATS)


def start_comfyui(arguments: list[str]) -> None:
    """Initialise ComfyUI as its main.py does: command line, dynamic VRAM, patcher class."""
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    sys.argv = ["main.py", *arguments]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy_aimdo.control
    from comfy.cli_args import enables_dynamic_vram

    if enables_dynamic_vram():
        comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    if enables_dynamic_vram():
        headroom = int(getattr(comfy.cli_args.args, "vram_headroom", 0) * 1024**3)
        devices = [(d.index, headroom) for d in comfy.model_management.get_all_torch_devices()]
        if comfy_aimdo.control.init_devices(devices):
            comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
            comfy.memory_management.aimdo_enabled = True


def load_package() -> None:
    """Import the package under the name ernie_fast."""
    spec = importlib.util.spec_from_file_location("ernie_fast", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["ernie_fast"] = module
    spec.loader.exec_module(module)


def write_checkpoints(folder: Path, formats: Sequence[str]) -> None:
    """Write one full-size file per format, weights random and scaled so that a forward stays finite."""
    start_comfyui(["--disable-dynamic-vram"])
    import torch
    from comfy.ldm.ernie.model import ErnieImageModel
    from comfy.ops import disable_weight_init
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = ErnieImageModel(operations=disable_weight_init, dtype=torch.bfloat16).state_dict()
    torch.manual_seed(0)
    base: dict[str, torch.Tensor] = {}
    for name, meta in shapes.items():
        value = torch.randn(meta.shape, device="cuda", dtype=torch.bfloat16) * (0.02 if meta.dim() > 1 else 0.1)
        base[name] = (value + 1 if "norm_" in name or "_ln." in name else value).cpu()
    for format_name in formats:
        if format_name in GGUF_FORMATS:
            write_gguf_pair(folder, format_name, base)
            continue
        out = dict(base)
        for name, tensor in base.items():
            if format_name == "bf16" or not name.startswith("layers.") or tensor.dim() != 2:
                continue
            layout = QUANT_ALGOS[format_name]["comfy_tensor_layout"]
            quantised = QuantizedTensor.from_float(tensor.cuda(), layout)
            out.update({k: v.cpu().contiguous() for k, v in quantised.state_dict(name).items()})
            marker = json.dumps({"format": format_name}).encode()
            out[name.removesuffix("weight") + "comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
        save_file(out, str(folder / f"{format_name}.safetensors"))
    lora: dict[str, torch.Tensor] = {}
    for name, tensor in base.items():
        if name.startswith("layers.") and tensor.dim() == 2:
            module = f"diffusion_model.{name.removesuffix('.weight')}"
            lora[f"{module}.lora_A.weight"] = torch.randn(16, tensor.shape[1]) * 0.02
            lora[f"{module}.lora_B.weight"] = torch.randn(tensor.shape[0], 16) * 0.02
    save_file(lora, str(folder / "lora.safetensors"))


def write_gguf(file: Path, tensors: dict[str, torch.Tensor], qtype: str) -> dict[str, torch.Tensor]:
    """Write a GGUF file with the blocks' linear layers in one type and the rest in BF16; return name -> blocks of those layers."""
    load_package()
    import gguf
    import torch
    from ernie_fast.kernels.gguf import encode

    writer, blocks = gguf.GGUFWriter(str(file), "wan"), {}
    for name, tensor in tensors.items():
        if name.startswith("layers.") and tensor.dim() == 2:
            blocks[name] = encode.quantize(tensor.cuda(), qtype).cpu()
            writer.add_tensor(name, blocks[name].numpy(), raw_dtype=gguf.GGMLQuantizationType[qtype])
        else:
            data = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return blocks


def write_gguf_pair(folder: Path, qtype: str, base: dict[str, torch.Tensor]) -> None:
    """Write a GGUF file with the blocks' linear layers in one type, and the same weights expanded to BF16."""
    blocks = write_gguf(folder / f"{qtype}.gguf", base, qtype)
    import torch
    from ernie_fast.kernels.gguf import eager
    from safetensors.torch import save_file

    expanded = {name: eager.dequantize(data.cuda(), qtype, torch.bfloat16).cpu() for name, data in blocks.items()}
    save_file({**base, **expanded}, str(folder / f"{qtype}-expanded.safetensors"))


def to_the_gpu(file: Path, mode: str, reserve_gb: int) -> None:
    """Load one file in this process, run one small forward so that every weight reaches the GPU, and print time and RAM."""
    start_comfyui([part.format(reserve_gb=reserve_gb) for part in MODES[mode]])
    load_package()
    import comfy.model_management as mm
    import torch
    from ernie_fast.nodes.model.build import load_model

    with file.open("rb") as stream:
        while stream.read(1 << 26):
            pass
    x, sigma = torch.randn(1, 128, 8, 8, device="cuda"), torch.tensor([0.7], device="cuda")
    context = torch.randn(1, 8, 3072, device="cuda")
    torch.cuda.synchronize()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    times = []
    for step in ("load", "first", "second"):
        start = time.perf_counter()
        if step == "load":
            patcher = load_model(file)
        else:
            mm.load_models_gpu([patcher], memory_required=patcher.memory_required(x.shape))
            patcher.model.current_patcher = patcher
            with torch.inference_mode():
                patcher.model.apply_model(x, sigma, c_crossattn=context, transformer_options={})
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    size = file.stat().st_size / 1e9
    seconds = times[0] + times[1] - times[2]  # the second forward moves nothing
    row = {
        "file": file.name, "mode": mode, "file_gb": round(size, 2), "load_s": round(times[0], 2), "on_gpu_s": round(seconds, 2),
        "gb_per_s": round(size / seconds, 2), "ram_before_gb": round(before, 2),
        "peak_ram_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }  # fmt: skip
    print("ROW " + json.dumps(row), flush=True)


def measure(load: Callable[[], ModelPatcher], inputs: tuple[torch.Tensor, ...]) -> tuple[dict, torch.Tensor]:
    """Load a model, run forwards at (x, sigma, context), and return the numbers and the output."""
    import comfy.model_management as mm
    import torch

    mm.unload_all_models()
    mm.soft_empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    patcher = load()
    loaded_s = time.perf_counter() - start
    x, sigma, context = inputs
    times = []
    for _ in range(FORWARDS):
        mm.load_models_gpu([patcher], memory_required=patcher.memory_required(x.shape))
        patcher.model.current_patcher = patcher
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            out = patcher.model.apply_model(x, sigma, c_crossattn=context, transformer_options={})
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    numbers = {
        "load_s": round(loaded_s, 2),
        "first_forward_s": round(times[0], 2),
        "forward_ms": round(statistics.median(times[FORWARDS // 2 :]) * 1000, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "patcher": type(patcher).__name__,
        "finite": bool(torch.isfinite(out).all()),
    }
    return numbers, out


def compare(folder: Path, mode: str, formats: Sequence[str], reserve_gb: int) -> None:
    """Run one memory mode in this process and print a JSON line per format."""
    start_comfyui([part.format(reserve_gb=reserve_gb) for part in MODES[mode]])
    load_package()
    import comfy.sd
    import comfy.utils
    import torch
    from ernie_fast.nodes.loaders.lora import apply_lora
    from ernie_fast.nodes.model.build import load_model
    from ernie_fast.nodes.model.checkpoint import open_checkpoint

    lora = folder / "lora.safetensors"

    def core_with_lora(file: Path) -> ModelPatcher:
        model = comfy.sd.load_diffusion_model(str(file))
        return comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0)[0]

    def ours_with_lora(file: Path) -> ModelPatcher:
        return apply_lora(open_checkpoint(lora), load_model(file), None, 1.0, 0.0)[0]

    generator = torch.Generator("cuda").manual_seed(1)
    inputs = (
        torch.randn(1, 128, 64, 64, device="cuda", generator=generator),
        torch.tensor([0.7], device="cuda"),
        torch.randn(1, 256, 3072, device="cuda", generator=generator),
    )
    for format_name in formats:
        gguf_file = format_name in GGUF_FORMATS
        file = folder / f"{format_name}.{'gguf' if gguf_file else 'safetensors'}"
        theirs = folder / f"{format_name}-expanded.safetensors" if gguf_file else file
        with file.open("rb") as stream:  # into the page cache, so that both loaders read from memory
            while stream.read(1 << 26):
                pass
        core, expected = measure(lambda file=theirs: comfy.sd.load_diffusion_model(str(file)), inputs)
        ours, found = measure(lambda file=file: load_model(file), inputs)
        row = {"format": format_name, "mode": mode, "equal": bool(torch.equal(expected, found)), "core": core, "ours": ours}
        if format_name in LORA_FORMATS:
            core_lora, expected = measure(lambda file=file: core_with_lora(file), inputs)
            our_lora, changed = measure(lambda file=file: ours_with_lora(file), inputs)
            row["lora_equal"] = bool(torch.equal(expected, changed)) and not torch.equal(changed, found)
            # Relative to the LoRA's effect. Where weights are streamed, ComfyUI's own second load differs from its first.
            again = measure(lambda file=file: core_with_lora(file), inputs)[1]
            effect = (expected - found).norm()
            row["lora_difference"] = float((expected - changed).norm() / effect)
            row["lora_difference_core_again"] = float((expected - again).norm() / effect)
            row["lora_forward_ms"] = {"core": core_lora["forward_ms"], "ours": our_lora["forward_ms"]}
        row["peak_ram_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1)
        print("ROW " + json.dumps(row), flush=True)


def main() -> None:
    """Write the files, run each mode, collect the rows with versions, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "loaders.json")
    parser.add_argument("--folder", type=Path, help="where the files go (29 GB for the first three formats); default: a temporary folder")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--reserve-gb", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step == "write":
        return write_checkpoints(arguments.folder, arguments.formats)
    if arguments.step and arguments.step.startswith("gpu:"):
        return to_the_gpu(arguments.folder / f"{arguments.formats[0]}.gguf", arguments.step[4:], arguments.reserve_gb)
    if arguments.step:
        return compare(arguments.folder, arguments.step, arguments.formats, arguments.reserve_gb)
    import torch  # not before a step: dynamic VRAM wants to start first

    reserve_gb = int(torch.cuda.get_device_properties(0).total_memory / 1024**3) - 10
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        rows = []
        steps = [(step, arguments.formats) for step in ("write", *arguments.modes)]
        steps += [(f"gpu:{mode}", [name]) for name in arguments.formats if name in GGUF_FORMATS for mode in arguments.modes]
        for step, formats in steps:
            command = [sys.executable, "-u", __file__, "--folder", str(folder), "--step", step, "--reserve-gb", str(reserve_gb)]
            command += ["--formats", *formats]
            start = time.perf_counter()
            run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for line in run.stdout:
                if line.startswith("ROW "):
                    rows.append(json.loads(line[4:]))
                print(line, end="", flush=True)
            print(f"{step}: exit {run.wait()}, {time.perf_counter() - start:.0f} s", flush=True)
            save(arguments.out, rows)
    return None


def save(file: Path, rows: list[dict]) -> None:
    """Write the rows so far, with the GPU and the versions."""
    import torch

    versions = {"torch": torch.__version__, "comfyui": "0.30.0"}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"gpu": gpu, "versions": versions, "rows": rows}, indent=1) + "\n")
    temporary.replace(file)


if __name__ == "__main__":
    main()
