"""Our text encoder loader on full-size random weights: load, tokenizer, encode, and memory.

    python bench/text_encoder.py --out bench/results/text-encoder-h200.json        (on a GPU machine; COMFYUI_PATH set)

A 26-layer Ministral-3 3B file with a synthetic tokenizer of 131,072 tokens is written once, then loaded with dynamic VRAM. The
tokenizer is built twice, the second time from its cache. Random weights: this says nothing about pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaders import ROOT, load_package, save, start_comfyui

sys.path.append(str(ROOT / "tests"))

def write_checkpoint(file: Path) -> None:
    """Write the full-size encoder with its tokenizer."""
    import torch
    from ernie_fast.nodes.text.probe import EncoderSizes
    from safetensors.torch import save_file
    from text_files import tekken

    sizes = EncoderSizes(
        vocab=131072, hidden=3072, intermediate=9216, layers=26, heads=32, kv_heads=8, head_dim=128, rms_eps=1e-5
    )
    torch.manual_seed(0)
    sd = {}
    for name, shape in sizes.shapes():
        value = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
        sd[f"model.{name}"] = (value + 1 if "norm" in name else value).cpu()
    text = json.dumps(tekken(131072, specials=1000)).encode()
    sd["tekken_model"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(sd, str(file))


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return (seconds, result) of a call."""
    start = time.perf_counter()
    result = work()
    return round(time.perf_counter() - start, 2), result


def main() -> None:
    """Write the file, load it twice, encode with both kinds of positions, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "text-encoder.json")
    arguments = parser.parse_args()
    start_comfyui([])
    load_package()
    import torch
    from ernie_fast.nodes.model.checkpoint import open_checkpoint
    from ernie_fast.nodes.text import tokenizer
    from ernie_fast.nodes.text.encoder import load_text_encoder
    from ernie_fast.nodes.text.source import find_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.CACHE_FOLDER = Path(folder) / "tokenizers"
        file = Path(folder) / "encoder.safetensors"
        write_checkpoint(file)
        source = find_tokenizer(open_checkpoint(file))
        tokenizer_s = [timed(source.load)[0] for _ in range(3)]
        rows = [{"tokenizer_first_s": tokenizer_s[0], "tokenizer_second_s": min(tokenizer_s[1:])}]
        for rope in ("yarn", "comfyui"):
            load_s, clip = timed(lambda rope=rope: load_text_encoder(file, "encoder", source, rope))
            tokens = clip.tokenize(" ".join(["etaoin shrdlu"] * 40))
            count = len(tokens["ministral3_3b"][0])
            times = []
            for _ in range(8):
                seconds, condition = timed(lambda clip=clip, tokens=tokens: clip.encode_from_tokens(tokens))
                times.append(seconds)
            rows.append({
                "rope": rope, "tokens": count, "load_s": load_s, "first_encode_s": times[0],
                "encode_s": statistics.median(times[2:]), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
                "patcher": type(clip.patcher).__name__, "finite": bool(torch.isfinite(condition).all()),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            save(arguments.out, rows)


if __name__ == "__main__":
    main()
