"""Fuzz the readers of GGUF and safetensors files with atheris, guided by coverage: longer than CI's runs.

    pip install atheris
    python bench/fuzz.py gguf --seconds 600            (COMFYUI_PATH set, or after `make host`)
    python bench/fuzz.py safetensors --seconds 600

Starts from small whole files. Any exception but our CheckpointError, an input that takes longer than 5 s, or more than 2 GB of memory stops the
run; atheris then prints it and writes the input to a file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import atheris
from loaders import ROOT, load_package, start_comfyui

os.environ.setdefault("COMFYUI_PATH", str(ROOT / ".host" / "ComfyUI"))
arguments_given = list(sys.argv)
start_comfyui(["--cpu", "--disable-api-nodes"])
sys.path.insert(0, str(ROOT / "tests"))
with atheris.instrument_imports(include=["ernie_fast"]):
    load_package()
    from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
    from ernie_fast.nodes.model.probe import probe_model
    from ernie_fast.nodes.text.probe import probe_text_encoder
from ernie_files import ernie_state_dict, quantised  # noqa: E402
from gguf_files import block_linears_as, write_gguf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from text_files import encoder_state_dict  # noqa: E402

SIZES = {
    "hidden_size": 32, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 32, "text_in_dim": 16,
    "in_channels": 4, "out_channels": 4, "rope_axes_dim": (4, 6, 6),
}  # fmt: skip


def write_corpus(kind: str, folder: Path) -> None:
    """Write the whole files that the fuzzer starts from."""
    small = ernie_state_dict(**SIZES)
    if kind == "gguf":
        fields = {"a.bool": True, "a.int": 7, "a.float": 0.5, "a.text": "x", "a.numbers": [1, 2], "a.texts": ["p", "q"]}
        write_gguf(folder / "q8.gguf", small, block_linears_as("Q8_0"), "wan", fields)
        write_gguf(folder / "f32.gguf", small, block_linears_as("F32"), None)
        return
    save_file(small, folder / "plain.safetensors")
    save_file(encoder_state_dict(), folder / "text.safetensors")
    fp8 = quantised(ernie_state_dict(num_layers=1), "float8_e4m3fn")
    save_file({name: tensor.contiguous() for name, tensor in fp8.items()}, folder / "fp8.safetensors")


def main() -> None:
    """Fuzz until the time is over or something is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("gguf", "safetensors"))
    parser.add_argument("--seconds", type=int, default=600)
    arguments = parser.parse_args(arguments_given[1:])
    folder = Path(tempfile.mkdtemp())
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(arguments.kind, corpus)
    file = folder / f"m.{arguments.kind}"

    def probe(data: bytes) -> None:
        file.write_bytes(data)
        for reader in (probe_model, probe_text_encoder):
            try:
                reader(open_checkpoint(file, "file"))
            except CheckpointError as error:
                if not str(error).startswith("file"):
                    raise RuntimeError("the message does not name the file") from error

    options = ["-max_len=60000", "-timeout=5", "-rss_limit_mb=2048", f"-max_total_time={arguments.seconds}", "-print_final_stats=1"]
    atheris.Setup([arguments_given[0], *options, str(corpus)], probe)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
