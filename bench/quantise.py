"""Quantise at load, saving, and LoRA on every format, on full-size random weights: time, memory, and the change that the weights get.

    python bench/quantise.py --out bench/results/quantise-h200.json       (on a GPU machine; COMFYUI_PATH set)

A BF16 file of the released size is loaded with each `weight_format`, and GGUF files as they are; with dynamic VRAM, as ComfyUI runs by
default. Then a LoRA of rank 16 is added. `lora_gain` and `lora_error` compare the change of three weights on the GPU with that of the BF16
weights: the length along it (1 is right), and the error relative to the format's own error. `core` is the same for ComfyUI's own
loader on the saved file. Random weights: this says nothing about pictures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loaders import MODES, load_package, measure, save, start_comfyui, write_checkpoints, write_gguf

if TYPE_CHECKING:
    import torch

WEIGHT_FORMATS = ("as stored", "fp8", "fp8_rowwise", "int8_convrot", "mxfp8", "nvfp4", "convrot_w4a4", "svdquant_w4a4")
GGUF_TYPES = ("Q4_K", "Q8_0")
LAYERS = ("layers.0.self_attention.to_q", "layers.17.mlp.up_proj", "layers.35.mlp.linear_fc2")


def weights_on_gpu(patcher: Any) -> dict[str, torch.Tensor]:
    """Return the chosen weights as they are on the GPU, LoRAs included, as float32."""
    from comfy.quant_ops import QuantizedTensor

    out = {}
    for layer in LAYERS:
        module = patcher.model.diffusion_model.get_submodule(layer)
        weight = getattr(module, "_v_weight", None)
        weight = module.weight if weight is None else weight
        out[layer] = (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).float().cuda().clone()
    return out


def lora_change(load: Any, lora: Path, inputs: tuple[Any, ...], originals: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the LoRA's gain and error (see above), and the forward's time without and with it."""
    from ernie_fast.nodes.loaders.lora import apply_lora
    from ernie_fast.nodes.model.checkpoint import open_checkpoint
    from safetensors import safe_open

    held: list[Any] = []

    def plain() -> Any:
        held[:] = [load()]
        return held[0]

    numbers, _ = measure(plain, inputs)
    before = weights_on_gpu(held[0])
    with_lora, _ = measure(lambda: held.__setitem__(0, apply_lora(open_checkpoint(lora), held[0], None, 1.0, 0.0)[0]) or held[0], inputs)
    after = weights_on_gpu(held[0])
    gains, errors = [], []
    with safe_open(lora, "pt", device="cuda") as file:
        for layer, weight in after.items():
            up, down = (file.get_tensor(f"diffusion_model.{layer}.lora_{which}.weight") for which in "BA")
            delta = up @ down
            change = weight - before[layer]
            own = (before[layer] - originals[layer]).square().mean().sqrt()
            gains.append(float((change * delta).sum() / delta.square().sum()))
            errors.append(float((change - delta).square().mean().sqrt() / own) if own > 0 else 0.0)
    return {**numbers, "lora_forward_ms": with_lora["forward_ms"], "lora_gain": [round(g, 3) for g in gains], "lora_error": [round(e, 2) for e in errors]}


def run(folder: Path, formats: list[str]) -> None:
    """Measure every format in this process and print a JSON line for each."""
    start_comfyui(MODES["dynamic"])
    load_package()
    import comfy.sd
    import torch
    from ernie_fast.nodes.loaders.save import save_model
    from ernie_fast.nodes.model.build import SOURCE, load_model
    from ernie_fast.nodes.model.quantise import QuantisePolicy
    from safetensors import safe_open

    generator = torch.Generator("cuda").manual_seed(1)
    inputs = (
        torch.randn(1, 128, 64, 64, device="cuda", generator=generator),
        torch.tensor([0.7], device="cuda"),
        torch.randn(1, 256, 3072, device="cuda", generator=generator),
    )
    source, lora = folder / "bf16.safetensors", folder / "lora-small.safetensors"
    with safe_open(source, "pt", device="cuda") as file:
        originals = {layer: file.get_tensor(f"{layer}.weight").float() for layer in LAYERS}
    for name in formats:
        if name in GGUF_TYPES:
            row = {"format": name, **lora_change(lambda name=name: load_model(folder / f"{name}.gguf"), lora, inputs, originals)}
            print("ROW " + json.dumps(row), flush=True)
            continue
        policy = None if name == "as stored" else QuantisePolicy(name)
        start = time.perf_counter()
        model = load_model(source, policy=policy)
        row: dict[str, Any] = {"format": name, "quantise_s": round(time.perf_counter() - start, 1)}
        row["weights_gb"] = round(model.get_attachment(SOURCE).stored_bytes / 1e9, 2)
        row |= lora_change(lambda model=model: model, lora, inputs, originals)
        if name in ("fp8", "nvfp4", "int8_convrot"):
            file, start = folder / "saved.safetensors", time.perf_counter()
            save_model(model, file)
            row["save_s"] = round(time.perf_counter() - start, 1)
            row["core"] = lora_change(lambda file=file: comfy.sd.load_diffusion_model(str(file)), lora, inputs, originals)
            file.unlink()
        print("ROW " + json.dumps(row), flush=True)
        del model


def write_lora(folder: Path) -> None:
    """Write a LoRA of rank 16 whose change is 2 % of each weight."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch.manual_seed(0)
    out = {}
    with safe_open(folder / "bf16.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            if name.startswith("layers.") and len(shape) == 2:
                up, down = torch.randn(shape[0], 16), torch.randn(16, shape[1])
                module = f"diffusion_model.{name.removesuffix('.weight')}"
                out |= {f"{module}.lora_B.weight": up * 0.02 * 0.02 / 4, f"{module}.lora_A.weight": down}
    save_file(out, str(folder / "lora-small.safetensors"))


def main() -> None:
    """Write the files, measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    parser.add_argument("--formats", nargs="+", choices=(*WEIGHT_FORMATS, *GGUF_TYPES), default=[*WEIGHT_FORMATS, *GGUF_TYPES])
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step == "write":
        write_checkpoints(arguments.folder, ["bf16"])
        write_lora(arguments.folder)
        from safetensors.torch import load_file

        for qtype in set(GGUF_TYPES) & set(arguments.formats):
            write_gguf(arguments.folder / f"{qtype}.gguf", load_file(arguments.folder / "bf16.safetensors"), qtype)
        return
    if arguments.step == "run":
        return run(arguments.folder, arguments.formats)
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = arguments.folder or Path(temporary), []
        for step in ("write", "run"):
            command = [sys.executable, "-u", __file__, "--folder", str(folder), "--step", step, "--out", str(arguments.out)]
            process = subprocess.Popen([*command, "--formats", *arguments.formats], stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("ROW "):
                    rows.append(json.loads(line[4:]))
                    save(arguments.out, rows)
            print(f"{step}: exit {process.wait()}", flush=True)
    return None


if __name__ == "__main__":
    main()
