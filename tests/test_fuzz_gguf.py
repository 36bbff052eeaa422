"""Damaged and hostile GGUF files: always our error, never a crash, a hang, a large allocation or another exception."""

from __future__ import annotations

import random
import struct
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import pytest
import torch
from ernie_fast.nodes.model.build import load_model
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.probe import probe_model
from ernie_fast.nodes.text.probe import probe_text_encoder
from ernie_files import ernie_state_dict
from gguf_files import block_linears_as, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = settings(max_examples=500, deadline=4000, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
MUTATIONS = 10  # files per example
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 64, "text_in_dim": 32, "rope_axes_dim": (8, 12, 12)}


@cache
def base_file() -> bytes:
    """A whole, very small model with a field of every kind."""
    fields = {
        "a.bool": True, "a.int": 7, "a.float": 0.5, "a.text": "x" * 20, "a.numbers": [1, 2, 3], "a.texts": ["p", "q"],
        "general.alignment": 32,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        file = Path(folder, "m.gguf")
        return write_gguf(file, ernie_state_dict(**SIZES), block_linears_as("Q8_0"), "wan", fields).read_bytes()


@cache
def header_size() -> int:
    with TemporaryDirectory() as folder:
        file = Path(folder, "m.gguf")
        file.write_bytes(base_file())
        return int(gguf.GGUFReader(file).data_offset)


def probe_bytes(content: bytes) -> str:
    """Probe a file as each loader does; return 'ok' or the error of the model loader."""
    out = []
    with TemporaryDirectory() as folder:
        file = Path(folder, "m.gguf")
        file.write_bytes(content)
        for probe in (probe_model, probe_text_encoder):
            try:
                probe(open_checkpoint(file, "file"))
                out.append("ok")
            except CheckpointError as error:
                out.append(str(error))
                assert out[-1].startswith("file")
                assert 10 < len(out[-1]) < 3000
    return out[0]


def test_base_file_is_whole():
    assert probe_bytes(base_file()) == "ok"


@FUZZ
@given(st.integers(0, 2**32))
def test_bytes_changed_anywhere_in_the_header(seed):  # 5,000 files
    rng = random.Random(seed)
    for _ in range(MUTATIONS):
        content = bytearray(base_file())
        for _ in range(rng.randint(1, 6)):
            content[rng.randrange(header_size())] = rng.randrange(256)
        if rng.random() < 0.3:
            content = content[: rng.randrange(len(content))]
        probe_bytes(bytes(content))


@FUZZ
@given(st.integers(0, 2**32))
def test_numbers_and_texts_replaced(seed):  # 5,000 files
    """Counts, lengths, shapes and types at their limits, at places where the header has small numbers."""
    rng = random.Random(seed)
    values = [0, 1, 2, 5, 8, 9, 12, 29, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
    for _ in range(MUTATIONS):
        content = bytearray(base_file())
        for _ in range(rng.randint(1, 3)):
            at, value = rng.randrange(4, header_size() - 8), rng.choice(values)
            if rng.random() < 0.5:
                content[at : at + 8] = struct.pack("<Q", value)
            else:
                content[at : at + 4] = struct.pack("<I", value % 2**32)
        if rng.random() < 0.2:
            piece = rng.randrange(header_size())
            del content[piece : piece + rng.randrange(40)]
        probe_bytes(bytes(content))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


FORGED = {
    "array of 2^40 numbers": text("a") + struct.pack("<IIQ", 9, 4, 1 << 40),
    "array of 2^22 numbers": text("a") + struct.pack("<IIQ", 9, 4, 1 << 22),
    "array of 2^60 texts": text("a") + struct.pack("<IIQ", 9, 8, 1 << 60),
    "array of arrays": text("a") + struct.pack("<IIQ", 9, 9, 2),
    "text of 2^60 bytes": text("a") + struct.pack("<IQ", 8, 1 << 60),
    "name of 2^60 bytes": struct.pack("<Q", 1 << 60),
    "unknown type": text("a") + struct.pack("<I", 77),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_counts_neither_hang_nor_allocate(kind):
    tracemalloc.start()
    try:
        assert probe_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + FORGED[kind]) != "ok"
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("counts", [(1 << 60, 0), (0, 1 << 60), (1 << 16, 0), (0, 1 << 16)])
def test_forged_numbers_of_entries(counts):
    assert probe_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts)) != "ok"


@pytest.mark.parametrize("version", [0, 1, 4, 1 << 24, 3 << 24])
def test_other_versions_are_named(version):
    assert "GGUF version" in probe_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))


@pytest.mark.parametrize("seed", range(20))
def test_arbitrary_blocks_load_and_expand(tmp_path, seed):
    """Bytes of the data part may be anything: weights become NaN at worst."""
    rng = random.Random(seed)
    content = bytearray(base_file())
    content[header_size() :] = rng.randbytes(len(content) - header_size())
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    network = load_model(file).model.diffusion_model
    assert network.layers[0].mlp.up_proj.weight.dequantize().shape == torch.Size((64, 64))
