"""GGUF weights decode to the bits that gguf-py gives, in eager torch and in Triton (here: Triton's interpreter)."""

from __future__ import annotations

import functools
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT
from ernie_fast.kernels.gguf import eager, ops
from ernie_fast.kernels.gguf.qtypes import QTYPES
from triton_process import checked_by_interpreter

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Where a block keeps its fp16 numbers; a type that is not named here has one, at byte 0.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_blocks(qtype: str, *shape: int) -> torch.Tensor:
    """Random bytes (*shape[:-1], shape[-1] blocks) with scales below 1, then per row one block of zeros, one of huge scales."""
    rng = np.random.default_rng(QTYPES[qtype].ggml_id)
    blocks = rng.integers(0, 256, (*shape, QTYPES[qtype].type_size), dtype=np.uint8)
    flat = blocks.reshape(-1, QTYPES[qtype].type_size)
    for at in HALVES.get(qtype, (0,)):
        flat[:, at + 1] &= 0xBB  # clears two of the five exponent bits: neither Inf nor NaN
        flat[2::5, at], flat[2::5, at + 1] = 0xFF, 0x7B  # 65504
    flat[1::5] = 0
    return torch.from_numpy(blocks.reshape(*shape[:-1], -1))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare shapes, dtypes and bits, the sign of zero included."""
    view = BITS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(view), b.view(view))


def reference(data: torch.Tensor, qtype: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[qtype]))


def check_triton(qtype: str) -> dict[str, bool]:
    """Compare what the operators give with eager, in a process where they take Triton."""
    found = {}
    # Columns that fill no whole program, rows that end inside a program, a single block, three dimensions.
    for shape in ((3, 5), (1, 1), (2, 2, 1)):
        data = random_blocks(qtype, *shape)
        found[f"backend {shape}"] = ops.backend(data)[0] == "triton"
        for dtype in DTYPES:
            found[f"{dtype} {shape}"] = same_bits(
                ops.dequantize(data, qtype, dtype), eager.dequantize(data, qtype, dtype)
            )
        scale = eager.row_scales(data, qtype)
        found[f"scales {shape}"] = same_bits(ops.row_scales(data, qtype), scale)
        for factor in (1.0, 0.01, 300.0):  # 0.01 saturates, 300 gives subnormal FP8 numbers
            changed = scale * factor
            found[f"fp8 x{factor} {shape}"] = same_bits(
                ops.dequantize_fp8(data, qtype, changed), eager.dequantize_fp8(data, qtype, changed)
            )
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), random_blocks(qtype, 1, 2)[0]])[1:]
    found["odd address"] = same_bits(ops.dequantize(odd, qtype, DTYPES[0]), eager.dequantize(odd, qtype, DTYPES[0]))
    return found


@functools.cache
def triton_results() -> dict[str, dict[str, bool]]:
    """Run `check_triton` for all types, once."""
    return checked_by_interpreter("test_gguf_dequantise", "QTYPES")


def test_table_of_types_equals_gguf_py():
    for name, qtype in QTYPES.items():
        known = gguf.GGMLQuantizationType[name]
        assert (qtype.ggml_id, (qtype.block_size, qtype.type_size)) == (int(known), gguf.GGML_QUANT_SIZES[known])
    assert set(eager.DECODERS) == set(QTYPES)


@pytest.mark.parametrize("qtype", QTYPES)
def test_eager_equals_gguf_py(qtype):
    for shape in ((3, 7), (1, 5), (1, 1), (2, 3, 2), (4,)):
        data = random_blocks(qtype, *shape)
        expected = reference(data, qtype)
        assert expected.isfinite().all()
        assert expected.any() or shape == (1, 1)
        for dtype in DTYPES:
            assert same_bits(ops.dequantize(data, qtype, dtype), expected.to(dtype)), (shape, dtype)


@pytest.mark.parametrize("qtype", QTYPES)
def test_triton_equals_eager(qtype):
    results = triton_results()[qtype]
    assert results
    assert all(results.values()), [name for name, equal in results.items() if not equal]


@pytest.mark.parametrize("qtype", QTYPES)
def test_fp8_is_the_scaled_and_clamped_weight(qtype):
    data = random_blocks(qtype, 3, 4)
    data[1] = 0
    weight = reference(data, qtype)
    scale = ops.row_scales(data, qtype)
    assert same_bits(scale, torch.where(weight.abs().amax(1) == 0, 1.0, weight.abs().amax(1) / 448))
    assert scale[1] == 1
    for factor in (1.0, 0.01):
        found = ops.dequantize_fp8(data, qtype, scale * factor)
        expected = (weight * (1.0 / (scale * factor))[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same_bits(found, expected)
        assert found.float().isfinite().all()


def test_weight_is_decoded_in_chunks_with_the_same_result(monkeypatch):
    data = random_blocks("Q4_K", 5, 3)
    scale = ops.row_scales(data, "Q4_K")
    whole = ops.dequantize(data, "Q4_K", torch.bfloat16), scale, ops.dequantize_fp8(data, "Q4_K", scale)
    monkeypatch.setattr(eager, "CHUNK", 2 * 768)
    parts = (
        ops.dequantize(data, "Q4_K", torch.bfloat16),
        ops.row_scales(data, "Q4_K"),
        ops.dequantize_fp8(data, "Q4_K", scale),
    )
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


def test_view_that_is_not_contiguous_or_starts_at_an_odd_address_is_decoded():
    data = random_blocks("IQ2_XXS", 4, 2)
    expected = reference(data, "IQ2_XXS")
    assert same_bits(ops.dequantize(data.t().contiguous().t(), "IQ2_XXS", torch.float32), expected)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), data[0]])[1:]
    assert same_bits(ops.dequantize(odd, "IQ2_XXS", torch.float32), expected[0])


def test_weight_of_no_rows_is_decoded_to_no_rows():
    data = torch.empty(0, 144, dtype=torch.uint8)
    assert ops.dequantize(data, "Q4_K", torch.float16).shape == (0, 256)
    assert ops.row_scales(data, "Q4_K").shape == (0,)
    assert ops.dequantize_fp8(data, "Q4_K", torch.empty(0)).shape == (0, 256)


def test_weight_on_the_cpu_is_decoded_by_eager():
    name, reason = ops.backend(torch.zeros(1, dtype=torch.uint8))
    assert name == "eager"
    assert "cpu" in reason


def test_triton_that_cannot_launch_is_logged_and_the_reason_kept(caplog):
    caplog.set_level("INFO", logger="ernie_fast")
    reason = ops._triton_failure.__wrapped__(torch.device("cpu"))  # Triton has no kernels for the CPU
    assert reason
    assert f"decoded without Triton, which is slower. {reason}" in caplog.text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: ops.dequantize(d, "Q9_K", torch.float32), r"unknown GGUF type 'Q9_K'; known: Q4_0, .*IQ4_XS"),
        (lambda d: ops.dequantize(d.int(), "Q4_K", torch.float32), r"Q4_K data is torch.int32 .*needed: torch.uint8"),
        (lambda d: ops.dequantize(d[:, 1:], "Q4_K", torch.float32), r"blocks of 144 bytes; a row of 143"),
        (lambda d: ops.dequantize(d, "Q4_K", torch.int8), r"cannot be decoded to torch.int8; allowed: torch.float32"),
        (lambda d: ops.row_scales(d[0, 0], "Q4_K"), r"of shape \(\); needed"),
        (lambda d: ops.dequantize_fp8(d, "Q4_K", torch.ones(3)), r"of shape \(3,\) on cpu; needed: .*\(2,\)"),
        (lambda d: ops.dequantize_fp8(d, "Q4_K", torch.ones(2).half()), r"torch.float16 .*needed: torch.float32"),
    ],
)
def test_wrong_input_names_what_was_found_and_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call(random_blocks("Q4_K", 2, 1))


def test_operators_are_registered_for_torch_compile():
    data = random_blocks("Q6_K", 2, 3, 1)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ernie_fast.gguf_dequantize, (data, "Q6_K", torch.bfloat16), test_utils=checks)
    torch.library.opcheck(torch.ops.ernie_fast.gguf_row_scales, (data, "Q6_K"), test_utils=checks)
    torch.library.opcheck(torch.ops.ernie_fast.gguf_dequantize_fp8, (data, "Q6_K", torch.ones(6)), test_utils=checks)


def test_torch_compile_takes_the_operator_whole():
    data = random_blocks("Q5_K", 2, 2)

    def forward(packed: torch.Tensor) -> torch.Tensor:
        return ops.dequantize(packed, "Q5_K", torch.float32) * 2

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    assert same_bits(compiled(data), forward(data))


def test_package_imported_twice_uses_the_same_operators():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import conftest, importlib, torch; "
        "from ernie_fast.kernels.gguf import ops; "
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('ernie_fast')]; "
        "conftest._load_package(); "
        "from ernie_fast.kernels.gguf import ops as again; "
        "assert again is not ops; "
        "data = torch.zeros(1, 144, dtype=torch.uint8); "
        "print([o.dequantize(data, 'Q4_K', torch.float32).shape[1] for o in (ops, again)])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(ROOT / "tests")], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[256, 256]", run.stderr
