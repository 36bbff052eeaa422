"""NVFP4, MXFP8 and INT8 weights decode to the bits that comfy-kitchen gives, in eager torch and in Triton (here: its interpreter)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfy_kitchen.backends.eager import quantization as kitchen
from ernie_fast.kernels.native import eager, ops
from triton_process import checked_by_interpreter

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# name -> ComfyUI's word for the format, and the options of its quantiser.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": ("nvfp4", {"scale": "recalculate"}),
    "mxfp8": ("mxfp8", {}),
    "int8_tensor": ("int8_tensorwise", {}),
    "int8_rows": ("int8_tensorwise", {"per_channel": True}),
}
# More rows than a tile of scales and more columns than a program; also more than a step of the row scales; padding; an odd number.
SHAPES = ((130, 272), (2, 2080), (48, 80), (40, 200), (1, 70), (3, 37))
# Global scales of NVFP4: usual; FP16 and then float32 subnormals; overflow of FP16, and of float32 at the largest code.
NVFP4_SCALES = (3e-4, 1e-7, 1e-41, 1e4, 3e35)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Stored(NamedTuple):
    """A weight as in a file; `scale` or `block_scale` is None where the format has none."""

    name: str
    data: torch.Tensor
    scale: Any
    block_scale: Any
    shape: tuple[int, int]

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """Our float weight."""
        if self.name == "nvfp4":
            return ops.dequantize_nvfp4(self.data, self.block_scale, self.scale, self.shape, dtype)
        if self.name == "mxfp8":
            return ops.dequantize_mxfp8(self.data, self.block_scale, self.shape, dtype)
        return ops.dequantize_int8(self.data, self.scale, dtype)

    def row_scales(self) -> torch.Tensor:
        """Our scales for FP8."""
        if self.name == "nvfp4":
            return ops.nvfp4_row_scales(self.data, self.block_scale, self.scale, self.shape)
        if self.name == "mxfp8":
            return ops.mxfp8_row_scales(self.data, self.block_scale, self.shape)
        return ops.int8_row_scales(self.data, self.scale)

    def fp8(self, row_scale: torch.Tensor) -> torch.Tensor:
        """Our FP8 weight."""
        if self.name == "nvfp4":
            return ops.nvfp4_to_fp8(self.data, self.block_scale, self.scale, self.shape, row_scale)
        if self.name == "mxfp8":
            return ops.mxfp8_to_fp8(self.data, self.block_scale, self.shape, row_scale)
        return ops.int8_to_fp8(self.data, self.scale, row_scale)

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """The float weight of comfy-kitchen's eager function, without the padding."""
        if self.name == "nvfp4":
            full = kitchen.dequantize_nvfp4(self.data, self.scale, self.block_scale, dtype)
        elif self.name == "mxfp8":
            full = kitchen.dequantize_mxfp8(self.data, self.block_scale, dtype)
        else:
            full = kitchen.dequantize_int8_simple_dtype(self.data, self.scale, kitchen.DTYPE_TO_CODE[dtype])
        return full[: self.shape[0], : self.shape[1]]


def quantised(name: str, weight: torch.Tensor) -> QuantizedTensor:
    """Quantise with ComfyUI's own layout."""
    algorithm, options = FORMATS[name]
    return QuantizedTensor.from_float(weight, QUANT_ALGOS[algorithm]["comfy_tensor_layout"], **options)


def stored(name: str, weight: QuantizedTensor) -> Stored:
    """The tensors of a quantised weight."""
    params = weight._params
    shape = (weight.shape[0], weight.shape[1])
    if name == "mxfp8":
        return Stored(name, weight._qdata, None, params.scale, shape)
    return Stored(name, weight._qdata, params.scale, getattr(params, "block_scale", None), shape)


def random_weight(shape: tuple[int, int]) -> torch.Tensor:
    """A weight with a row and a run of zeros, a large and a small row."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.05
    weight[shape[0] // 2, : max(1, shape[1] // 2)] = 0
    weight[-1:] *= 1e-3
    weight[1:2] = 0
    weight[2:3] *= 1e3
    return weight


def random_codes(name: str, shape: tuple[int, int], scale: float = 3e-4) -> Stored:
    """Every code and every finite scale at random, also in the padding: what no quantiser writes."""
    generator = torch.Generator().manual_seed(sum(shape))
    like = stored(name, quantised(name, torch.ones(shape)))

    def random_bytes(tensor: torch.Tensor, high: int) -> torch.Tensor:
        return torch.randint(0, high, tensor.shape, dtype=torch.uint8, generator=generator)

    data = random_bytes(like.data, 256)
    if name == "nvfp4":
        blocks = random_bytes(like.block_scale, 256)
        blocks[(blocks & 0x7F) == 0x7F] = 0  # NaN
        return like._replace(data=data, block_scale=blocks.view(torch.float8_e4m3fn), scale=torch.tensor(scale))
    if name == "mxfp8":
        data[(data & 0x7F) == 0x7F] = 0  # NaN
        blocks = random_bytes(like.block_scale, 255).view(torch.float8_e8m0fnu)
        return like._replace(data=data.view(torch.float8_e4m3fn), block_scale=blocks)
    scales = (
        torch.rand(like.scale.shape, generator=generator) * 10.0 ** -(torch.arange(like.scale.numel()) % 40)[:, None]
    )
    return like._replace(data=data.view(torch.int8), scale=scales.reshape(like.scale.shape))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare shapes, dtypes and bits, the sign of zero included; any NaN equals any other."""
    view, number = BITS[a.element_size()], ~b.float().isnan()
    same_numbers = a.shape == b.shape and torch.equal(~a.float().isnan(), number)
    return a.dtype == b.dtype and same_numbers and torch.equal(a.view(view)[number], b.view(view)[number])


def differences(weight: Stored) -> list[str]:
    """Return the names of our results that are not the bits of comfy-kitchen's weight."""
    found = {str(dtype): same_bits(weight.decode(dtype), weight.expected(dtype).contiguous()) for dtype in DTYPES}
    exact = weight.expected(torch.float32)
    absmax = exact.abs().amax(1)
    scale = torch.where(absmax == 0, 1.0, absmax / 448)
    found["scales"] = same_bits(weight.row_scales(), scale)
    for factor in (1.0, 0.01, 300.0):  # 0.01 saturates, 300 gives subnormal FP8 numbers
        expected = (exact * (1.0 / (scale * factor))[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        found[f"fp8 x{factor}"] = same_bits(weight.fp8(scale * factor), expected)
    return [name for name, equal in found.items() if not equal]


def cases(name: str) -> dict[str, Stored]:
    """Weights of one format: random codes of every shape, and extreme scales."""
    found = {f"codes {shape}": random_codes(name, shape) for shape in SHAPES}
    for scale in NVFP4_SCALES if name == "nvfp4" else ():
        found[f"scale {scale}"] = random_codes(name, (5, 64), scale)
    return found


def check_triton(name: str) -> dict[str, list[str]]:
    """Compare what the operators give with comfy-kitchen, in a process where they take Triton."""
    found = {case: differences(weight) for case, weight in cases(name).items()}
    found["backend"] = [] if ops.backend(torch.zeros(1))[0] == "triton" else ["eager"]
    return found


@functools.cache
def triton_results() -> dict[str, dict[str, list[str]]]:
    """Run `check_triton` for all formats, once."""
    return checked_by_interpreter("test_native_decode", "FORMATS")


@pytest.mark.parametrize("name", FORMATS)
def test_eager_equals_comfy_kitchen(name):
    for case, weight in cases(name).items():
        assert not differences(weight), case
    for shape in SHAPES:
        assert not differences(stored(name, quantised(name, random_weight(shape)))), shape


@pytest.mark.parametrize("name", FORMATS)
def test_triton_equals_comfy_kitchen(name):
    results = triton_results()[name]
    assert len(results) > len(SHAPES)  # and the backend
    assert not any(results.values()), {case: names for case, names in results.items() if names}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_float_weight_equals_that_of_comfyuis_tensor(name, dtype):
    weight = quantised(name, random_weight((40, 200)))
    assert same_bits(stored(name, weight).decode(dtype), weight.to(dtype).dequantize().contiguous())


@pytest.mark.parametrize("name", FORMATS)
def test_fp8_weight_on_its_row_scales_is_close_to_the_weight(name):
    weight = stored(name, quantised(name, random_weight((48, 80))))
    scale, exact = weight.row_scales(), weight.expected(torch.float32)
    error = (weight.fp8(scale).float() * scale[:, None] - exact).abs()
    # Half a step of E4M3 is 2**-4 of a normal number, and 2**-10 of the scale below.
    assert (error <= torch.maximum(exact.abs() / 16, scale[:, None] / 1024) * 1.001).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_have_scale_one_and_stay_zeros(name):
    weight = random_codes(name, (20, 40))
    weight.data.view(torch.uint8).zero_()
    assert torch.equal(weight.row_scales(), torch.ones(20))
    assert not weight.decode(torch.bfloat16).any()
    assert not weight.fp8(torch.ones(20)).float().any()


@pytest.mark.parametrize("name", FORMATS)
def test_weight_is_decoded_in_chunks_with_the_same_result(name, monkeypatch):
    monkeypatch.setattr(eager, "CHUNK", 3 * 80)
    assert not differences(random_codes(name, (136, 80)))


def test_padding_is_no_part_of_a_row():
    weight = random_codes("nvfp4", (4, 70))
    weight.data[:, 35:] = 0x77  # columns 70 to 79
    weight.block_scale.view(torch.uint8).fill_(0x38)  # 1
    weight.data[:, :35] = 0x11  # 0.5
    assert torch.equal(weight.row_scales(), (0.5 * weight.scale / 448).expand(4))


def test_mxfp8_scale_of_byte_255_is_infinity_as_in_comfy_kitchen():
    weight = random_codes("mxfp8", (4, 64))
    weight.block_scale.view(torch.uint8).fill_(255)
    weight.data.fill_(1.0)
    assert weight.decode(torch.bfloat16).isinf().all()
    assert same_bits(weight.decode(torch.float32), weight.expected(torch.float32))


def test_scales_as_in_older_files_are_read():
    for name in ("nvfp4", "mxfp8"):  # bytes instead of small floats, flat
        weight = random_codes(name, (40, 200))
        flat = weight._replace(block_scale=weight.block_scale.view(torch.uint8).flatten())
        assert same_bits(flat.decode(torch.bfloat16), weight.expected(torch.bfloat16).contiguous())
    weight = random_codes("int8_rows", (40, 200))
    half = weight._replace(scale=weight.scale.bfloat16().flatten())
    expected = weight._replace(scale=weight.scale.bfloat16().float()).expected(torch.float32)
    assert same_bits(half.decode(torch.float32), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_view_that_is_not_contiguous_is_decoded(name):
    weight = random_codes(name, (48, 80))
    assert not differences(weight._replace(data=weight.data.t().contiguous().t()))


def nvfp4(**changes: Any) -> torch.Tensor:
    return random_codes("nvfp4", (48, 80))._replace(**changes).decode(torch.float32)


def mxfp8(**changes: Any) -> torch.Tensor:
    return random_codes("mxfp8", (48, 80))._replace(**changes).decode(torch.float32)


def int8(**changes: Any) -> torch.Tensor:
    return random_codes("int8_rows", (48, 80))._replace(**changes).decode(torch.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nvfp4(data=torch.ones(48, 40)), r"NVFP4 data is torch.float32 \(48, 40\) on cpu; needed: torch.uint8"),
        (lambda: nvfp4(data=torch.ones(48, 41).byte()), r"\(48, 41\) on cpu; needed: .* whole groups of 16 columns"),
        (lambda: nvfp4(data=torch.tensor(1).byte()), r"NVFP4 data is torch.uint8 \(\) .* two dimensions"),
        (lambda: nvfp4(shape=(49, 80)), r"holds \(48, 80\) weights; shape \(49, 80\) is not part"),
        (lambda: nvfp4(shape=(48, 0)), r"shape \(48, 0\) is not part"),
        (lambda: nvfp4(block_scale=torch.ones(48, 5).byte()), r"block scale is .*needed: torch.float8_e4m3fn.*\(128, 8\)"),
        (lambda: nvfp4(scale=torch.ones(48)), r"NVFP4 scale is torch.float32 \(48,\) on cpu; needed: 1 floats on cpu"),
        (lambda: nvfp4(scale=torch.tensor(1)), r"NVFP4 scale is torch.int64"),
        (lambda: mxfp8(data=torch.ones(64, 96).to(torch.float8_e5m2)), r"MXFP8 data is torch.float8_e5m2"),
        (lambda: mxfp8(block_scale=torch.ones(128, 4)), r"MXFP8 block scale is torch.float32.*float8_e8m0fnu"),
        (lambda: int8(data=torch.ones(48, 80)), r"INT8 data is torch.float32 .*needed: torch.int8 of two dimensions$"),
        (lambda: int8(scale=torch.ones(47, 1)), r"INT8 scale is torch.float32 \(47, 1\).*needed: 1 or 48 floats"),
        (lambda: random_codes("mxfp8", (3, 4)).decode(torch.int8), r"MXFP8 cannot be decoded to torch.int8; allowed: "),
        (lambda: random_codes("nvfp4", (3, 4)).fp8(torch.ones(4)), r"of shape \(4,\) on cpu; needed: .*\(3,\)"),
        (lambda: random_codes("int8_rows", (3, 4)).fp8(torch.ones(3).half()), r"torch.float16 .*needed: torch.float32"),
    ],
)  # fmt: skip
def test_wrong_input_names_what_was_found_and_what_is_allowed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weight_on_the_cpu_is_decoded_by_eager():
    name, reason = ops.backend(torch.zeros(1))
    assert name == "eager"
    assert "cpu" in reason


def test_triton_that_cannot_launch_is_logged_and_the_reason_kept(caplog):
    caplog.set_level("INFO", logger="ernie_fast")
    reason = ops._triton_failure.__wrapped__(torch.device("cpu"))  # Triton has no kernels for the CPU
    assert reason
    assert f"INT8 weights are decoded without Triton, which is slower. {reason}" in caplog.text


def test_operators_are_registered_for_torch_compile():
    weight = random_codes("nvfp4", (3, 37))
    fields = ("nvfp4", weight.data, weight.scale.reshape(1), weight.block_scale.view(torch.uint8), [3, 37])
    operators, checks = torch.ops.ernie_fast, ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.native_dequantize, (*fields, torch.bfloat16), test_utils=checks)
    torch.library.opcheck(operators.native_row_scales, fields, test_utils=checks)
    torch.library.opcheck(operators.native_to_fp8, (*fields, torch.ones(3)), test_utils=checks)


def test_torch_compile_takes_the_operator_whole():
    weight = random_codes("mxfp8", (3, 37))

    def forward(data: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return ops.dequantize_mxfp8(data, blocks, (3, 37), torch.float32) * 2

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    assert same_bits(compiled(weight.data, weight.block_scale), forward(weight.data, weight.block_scale))
