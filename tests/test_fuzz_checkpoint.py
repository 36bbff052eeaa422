"""Damaged and hostile headers: always our error, never a crash, a hang or another exception."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ernie_fast.nodes.loaders.lora_alpha import stated_alpha
from ernie_fast.nodes.loaders.lora_keys import group_keys
from ernie_fast.nodes.model.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ernie_fast.nodes.model.probe import probe_model
from ernie_fast.nodes.text.probe import probe_text_encoder
from ernie_fast.nodes.text.rope import rope_from_config
from ernie_files import ernie_state_dict, quantised
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_bytes
from text_files import encoder_state_dict

FUZZ = settings(max_examples=500, deadline=2000, derandomize=True, suppress_health_check=list(HealthCheck), database=None)

DTYPES = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I64", "I8", "U8", "BOOL", "F4", "C64", "XX", ""]
NAMES = [
    "layers.0.mlp.linear_fc2.weight", "layers.0.self_attention.norm_q.weight", "x_embedder.proj.weight",
    "layers.0.mlp.gate_proj.weight", "final_linear.weight", "layers.99999999999.mlp.up_proj.weight",
    "layers.0.mlp.up_proj.comfy_quant", "layers.0.mlp.up_proj.weight_scale", "scaled_fp8",
    "model.layers.1.self_attn.q_proj.weight", "lm_head.weight", "layers.0.mlp.up_proj.lora_A.weight", "tekken_model",
    "net.layers.0.adaLN_sa_ln.weight", "model.diffusion_model.layers.1.adaLN_sa_ln.weight", "", "__metadata__", "é\0",
]  # fmt: skip


@cache
def base_file(kind: str) -> bytes:
    """A whole, very small checkpoint as bytes."""
    if kind == "text":
        return to_bytes(encoder_state_dict())
    if kind == "fp8":
        return to_bytes(quantised(ernie_state_dict(num_layers=1), "float8_e4m3fn"))
    sizes = {
        "hidden_size": 32, "num_attention_heads": 2, "num_layers": 1, "ffn_hidden_size": 16, "text_in_dim": 8,
        "in_channels": 4, "out_channels": 4, "rope_axes_dim": (4, 6, 6),
    }  # fmt: skip
    return to_bytes(ernie_state_dict(**sizes))


def as_text_encoder(checkpoint: Checkpoint) -> None:
    """Probe a checkpoint as the text encoder loader does."""
    rope_from_config(probe_text_encoder(checkpoint).config, "yarn", checkpoint.label)


def as_lora(checkpoint: Checkpoint) -> None:
    """Read a checkpoint's names and strength as the LoRA loader does."""
    group_keys(checkpoint.tensors, checkpoint.label)
    stated_alpha(checkpoint, "transformer")


def probe_bytes(files: dict[str, bytes], open_name: str | None = None) -> list[str]:
    """Write the files, probe the one named (or the folder) as each loader does; return 'ok' or our error text for each."""
    out = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for probe in (probe_model, as_text_encoder, as_lora):
            try:
                probe(open_checkpoint(folder / open_name if open_name else folder, label="file"))
                out.append("ok")
            except CheckpointError as error:
                out.append(str(error))
                assert out[-1].startswith("file")
                assert 10 < len(out[-1]) < 2000
    return out


def test_base_files_are_whole():
    assert probe_bytes({"m.safetensors": base_file("plain")}, "m.safetensors")[0] == "ok"
    assert probe_bytes({"m.safetensors": base_file("fp8")}, "m.safetensors")[0] == "ok"
    assert probe_bytes({"m.safetensors": base_file("text")}, "m.safetensors")[1] == "ok"


@FUZZ
@given(st.data())
def test_bytes_changed_anywhere_in_the_header(data):
    content = bytearray(base_file(data.draw(st.sampled_from(["plain", "text"]))))
    (length,) = struct.unpack("<Q", content[:8])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, 7 + length))
        content[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    probe_bytes({"m.safetensors": bytes(content)}, "m.safetensors")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=6) | st.floats(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=8,
)
TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 2**66) | st.integers(0, 64), max_size=5) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 2**66) | st.integers(0, 4096), min_size=1, max_size=3) | JSON_VALUES,
    }
)
HEADER = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), TENSOR | JSON_VALUES, max_size=8)


@FUZZ
@given(HEADER | JSON_VALUES, st.binary(max_size=64), st.integers(0, 2**64 - 1) | st.none())
def test_headers_of_arbitrary_json(header, payload, length):
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text) if length is None else length) + text + payload
    probe_bytes({"m.safetensors": content}, "m.safetensors")


@st.composite
def edited_header(draw):
    """A whole file whose header had whole tensors renamed, retyped, reshaped or removed, offsets kept right."""
    content = base_file(draw(st.sampled_from(["plain", "fp8", "text"])))
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    names = sorted(header)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(names))
        info = header.get(name)
        if info is None:
            continue
        action = draw(st.sampled_from(["rename", "dtype", "shape", "flatten", "metadata"]))
        if action == "rename":
            header[draw(st.sampled_from(NAMES) | st.text(max_size=8))] = header.pop(name)
        elif action == "dtype":
            info["dtype"] = draw(st.sampled_from(DTYPES))
        elif action == "shape":
            info["shape"] = [1, *info["shape"], 1][draw(st.integers(0, 1)) :]
        elif action == "flatten":
            size = 1
            for n in info["shape"]:
                size *= n
            info["shape"] = [size]
        else:
            value = draw(JSON_VALUES | st.just({"layers": {"layers.0.mlp.up_proj": {"format": "nvfp4"}}}))
            text = json.dumps(value)
            header["__metadata__"] = {
                "_quantization_metadata": text, "lora_adapter_metadata": text, "num_layers": draw(st.text(max_size=5)),
            }  # fmt: skip
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@FUZZ
@given(edited_header())
def test_headers_edited_tensor_by_tensor(content):
    probe_bytes({"m.safetensors": content}, "m.safetensors")


SHARD_NAMES = st.from_regex(r"\A[ab]-0000[0-3]-of-0000[0-3]\.safetensors\Z") | st.sampled_from(
    ["m.safetensors", "config.json", "adapter_model.safetensors", "adapter_config.json", "a.safetensors.index.json", "x-99999-of-99999.safetensors", "y.safetensors.part"]
)


@FUZZ
@given(st.dictionaries(SHARD_NAMES, st.sampled_from(["plain", "fp8"]) | st.binary(max_size=40) | JSON_VALUES, max_size=5))
def test_folders_of_arbitrary_shards(files):
    contents = {}
    for name, content in files.items():
        if isinstance(content, str):
            contents[name] = base_file(content) if content in ("plain", "fp8") else content.encode("utf-8", "replace")
        else:
            contents[name] = content if isinstance(content, bytes) else json.dumps(content).encode()
    probe_bytes(contents)


@pytest.mark.parametrize("depth", [10, 200, 100_000])
def test_deeply_nested_header_is_one_error(depth):
    text = b"[" * depth + b"]" * depth
    assert probe_bytes({"m.safetensors": struct.pack("<Q", len(text)) + text}, "m.safetensors")[0] != "ok"
