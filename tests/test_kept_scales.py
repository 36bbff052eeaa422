"""A changed weight on the scales that it has: nothing moves without reason, changes survive on average, noise stays small."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfy_kitchen.float_utils import from_blocked, to_blocked
from ernie_fast.kernels import kept_scales
from ernie_fast.kernels.rounding import E2M1, E4M3, E5M2, ceil_log2, power_of_two, round_small_float, upwards

CONVROT = {"per_channel": True, "convrot": True, "convrot_groupsize": 256}
# name -> ComfyUI's word for the format, and the options of its quantiser.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8_e4m3": ("float8_e4m3fn", {"scale": "recalculate"}),
    "fp8_e5m2": ("float8_e5m2", {"scale": "recalculate"}),
    "int8_tensor": ("int8_tensorwise", {}),
    "int8_rows": ("int8_tensorwise", {"per_channel": True}),
    "int8_convrot": ("int8_tensorwise", CONVROT),
    "int4_convrot": ("convrot_w4a4", {}),
    "nvfp4": ("nvfp4", {}),
    "mxfp8": ("mxfp8", {}),
}
ROTATED = ("int8_convrot", "int4_convrot")
BLOCKS = {"nvfp4": 16, "mxfp8": 32}
CASES = [(name, shape) for name in FORMATS for shape in ((64, 256), (144, 512))]
CASES += [(name, shape) for name in FORMATS if name not in ROTATED for shape in ((40, 200), (1, 70))]


def quantised(name: str, w: torch.Tensor) -> QuantizedTensor:
    """Quantise with ComfyUI's own layout."""
    algorithm, options = FORMATS[name]
    return QuantizedTensor.from_float(w.clone(), QUANT_ALGOS[algorithm]["comfy_tensor_layout"], **options)


def random_weight(shape: tuple[int, int] = (64, 256), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * 0.05).to(dtype)


def stored(weight: QuantizedTensor, x: torch.Tensor, seed: int | None) -> QuantizedTensor:
    """Requantise on the scales of `weight`."""
    params, data = weight._params, weight._qdata
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and params.scale.dtype != torch.float8_e8m0fnu:
        data, scale = kept_scales.requantize_fp8(data, params.scale, x, seed)
    elif params.scale.dtype == torch.float8_e8m0fnu:
        data, scale = kept_scales.requantize_mxfp8(data, params.scale, x, seed)
    elif hasattr(params, "block_scale"):
        data, blocks, scale = kept_scales.requantize_nvfp4(data, params.block_scale, params.scale, x, seed)
        params = dataclasses.replace(params, block_scale=blocks)
    elif hasattr(params, "quant_group_size"):
        data, scale = kept_scales.requantize_int4(data, params.scale, x, seed, params.convrot_groupsize)
    else:
        rotation = params.convrot_groupsize if params.convrot else 0
        data, scale = kept_scales.requantize_int8(data, params.scale, x, seed, rotation)
    return QuantizedTensor(data, weight._layout_cls, dataclasses.replace(params, scale=scale))


def tensors(weight: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The stored tensors as bytes."""
    return {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in weight.state_dict("w").items()}


def assert_same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def as_float32(weight: QuantizedTensor) -> torch.Tensor:
    return weight.to(torch.float32).dequantize()


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def low_rank(shape: tuple[int, int], size: float) -> torch.Tensor:
    """A change of rank 16 with an RMS of `size`."""
    delta = torch.randn(shape[0], 16) @ torch.randn(16, shape[1])
    return delta * (size / rms(delta))


def block_scales(name: str, weight: QuantizedTensor) -> torch.Tensor:
    """The bytes of the block scales, (rows, blocks)."""
    tiled = weight._params.block_scale if name == "nvfp4" else weight._params.scale
    rows, columns = weight.shape
    return from_blocked(tiled.view(torch.uint8), rows, columns // BLOCKS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_unchanged_weight_stays_bit_for_bit(name, shape, dtype):
    weight = quantised(name, random_weight(shape, dtype))
    for seed in (0, None, 1, 2**32 - 1):
        assert_same(stored(weight, weight.dequantize(), seed), weight)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_results_are_new_tensors_like_the_arguments(name, shape):
    weight = quantised(name, random_weight(shape))
    before = {k: v.clone() for k, v in tensors(weight).items()}
    x = weight.dequantize() + low_rank(shape, 0.1)
    copy = x.clone()
    new = stored(weight, x, 3)
    assert torch.equal(x, copy)
    for key, tensor in weight.state_dict("w").items():
        result = new.state_dict("w")[key]
        assert (result.shape, result.dtype) == (tensor.shape, tensor.dtype)
        assert result.data_ptr() != tensor.data_ptr()
        assert torch.equal(tensors(weight)[key], before[key])


@pytest.mark.parametrize("size", [0.1, 0.5])
@pytest.mark.parametrize("name", FORMATS)
def test_small_changes_survive(name, size):
    w = random_weight((128, 256))
    weight = quantised(name, w)
    old = weight.dequantize()
    delta = low_rank((128, 256), size * rms(old - w))
    change = stored(weight, old + delta, 1).dequantize() - old
    assert (change * delta).sum() / delta.pow(2).sum() == pytest.approx(1.0, abs=0.1)


def noises(weight: QuantizedTensor, x: torch.Tensor) -> tuple[float, float]:
    """The error of the stored `x` over 8 seeds: ours, and ComfyUI's."""
    ours, theirs = [], []
    for seed in range(1, 9):
        ours.append(stored(weight, x, seed).dequantize() - x)
        other = weight.requantize_from_float(x.clone(), scale="recalculate", stochastic_rounding=seed)
        theirs.append(other.dequantize() - x)
    return rms(torch.stack(ours)), rms(torch.stack(theirs))


@pytest.mark.parametrize("shape", [(64, 256), (40, 512)])
@pytest.mark.parametrize("name", FORMATS)
def test_noise_of_a_lora_is_about_the_format_error_at_most(name, shape):
    w = random_weight(shape)
    weight = quantised(name, w)
    old = weight.dequantize()
    error = rms(old - w)
    # The least variance that unbiased rounding can have is f (1 - f) steps^2 for a change of f steps: for INT8 and INT4 that is
    # 0.51 and 1.06 times the format's error at these sizes of the change.
    for part, limit in ((0.1, 0.6), (0.5, 1.1)):
        ours, theirs = noises(weight, old + low_rank(shape, part * error))
        assert ours < limit * error
        # From a weight that it has just quantised itself ComfyUI recalculates nearly the same scales, but its E2M1 rounding
        # moves numbers on the grid.
        assert ours < (0.65 if name == "nvfp4" else 1.03) * theirs


# E5M2 has two bits of mantissa: only a larger factor changes the code of the largest weight.
@pytest.mark.parametrize(
    ("name", "factor"),
    [("fp8_e4m3", 1.07), ("fp8_e5m2", 1.3), ("int8_tensor", 1.07), ("int8_rows", 1.07), ("int8_convrot", 1.07)],
)
def test_noise_of_a_lora_is_far_below_comfyui_where_the_scale_is_not_from_the_largest_weight(name, factor):
    w = random_weight()
    tight = quantised(name, w)
    params = dataclasses.replace(tight._params, scale=tight._params.scale * factor)
    weight = stored(QuantizedTensor(torch.zeros_like(tight._qdata), tight._layout_cls, params), w, 0)
    old = weight.dequantize()
    error = rms(old - w)
    for part, limit in ((0.1, 0.5), (0.5, 0.85)):
        ours, theirs = noises(weight, old + low_rank((64, 256), part * error))
        assert ours < limit * theirs


@pytest.mark.parametrize("name", ["int8_tensor", "int8_rows", "int8_convrot"])
def test_bfloat16_merge_adds_no_noise_of_its_own(name):
    w = random_weight(dtype=torch.bfloat16)
    weight = quantised(name, w)
    exact = as_float32(weight)
    error = rms(exact - w.float())
    delta = low_rank((64, 256), 0.1 * error)
    x = (weight.dequantize().float() + delta).to(torch.bfloat16)
    theirs = weight.requantize_from_float(x.clone(), scale="recalculate", stochastic_rounding=7)
    noise = rms(as_float32(stored(weight, x, 7)) - exact - delta)
    assert noise < 0.6 * error
    assert noise < 0.6 * rms(as_float32(theirs) - exact - delta)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8_tensor"])
def test_weight_beyond_the_tensor_scale_raises_it(name):
    weight = quantised(name, random_weight())
    old = weight.dequantize()
    x = old.clone()
    x[3, 5] = 3.1 * old.abs().max()
    new = stored(weight, x, 7)
    ratio = (new._params.scale / weight._params.scale).item()
    scale = new._params.scale
    if name == "int8_tensor":
        assert scale == x[3, 5] / 127
        limit = scale.expand(x.shape)
    else:
        assert ratio == 4.0  # a power of two: the other codes stay exact, but for the subnormals
        limit = torch.maximum(x.abs() * (0.125 if name == "fp8_e4m3" else 0.25), scale * 2**-9)
        normal = old.abs() > scale * 2**-6
        normal[3, 5] = False
        assert torch.equal(new.dequantize()[normal], old[normal])
    assert ((new.dequantize() - x).abs() <= limit * 1.0001).all()


def test_weight_beyond_a_row_scale_raises_that_row_alone_in_fp8():
    scale = torch.rand(8, 1) + 0.5
    data = (torch.randn(8, 64) * 100).clamp(-440, 440).to(torch.float8_e4m3fn)
    x = data.float() * scale
    x[2, 9] = 1000 * scale[2, 0]
    new, new_scale = kept_scales.requantize_fp8(data, scale, x, 3)
    others = torch.arange(8) != 2
    assert new_scale[2] == 4 * scale[2]
    assert torch.equal(new_scale[others], scale[others])
    assert torch.equal(new[others].view(torch.uint8), data[others].view(torch.uint8))
    assert (new.float() * new_scale)[2, 9] == pytest.approx(x[2, 9].item(), rel=0.07)


@pytest.mark.parametrize("name", ["int8_rows", "int8_convrot", "int4_convrot"])
def test_weight_beyond_a_row_scale_raises_that_row_alone(name):
    weight = quantised(name, random_weight())
    x = weight.dequantize().clone()
    x[3] *= 1.7
    x[3, 5] += 20 * x.abs().max()
    new = stored(weight, x, 7)
    others = torch.arange(64) != 3
    scale = new._params.scale.reshape(-1)
    assert scale[3] > weight._params.scale.reshape(-1)[3]
    assert scale[3].item() == pytest.approx(quantised(name, x)._params.scale.reshape(-1)[3].item(), rel=1e-5)
    assert torch.equal(scale[others], weight._params.scale.reshape(-1)[others])
    assert torch.equal(new._qdata[others], weight._qdata[others])
    # The rotation keeps lengths: the error per weight is below a step on average.
    assert rms((new.dequantize() - x)[3]) < scale[3] * 0.7


@pytest.mark.parametrize("name", ["int8_rows", "int4_convrot"])
def test_small_excess_leaves_the_row_on_its_scale(name):
    weight = quantised(name, random_weight())
    x = weight.dequantize() * (1.003 if name == "int8_rows" else 1.05)
    new = stored(weight, x, 7)
    assert torch.equal(new._params.scale, weight._params.scale)
    assert rms(new.dequantize() - x) < weight._params.scale.max()


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", BLOCKS)
def test_weight_beyond_a_block_scale_raises_that_block_alone(name, seed):
    group = BLOCKS[name]
    w = random_weight((144, 512))
    w[130, 2 * group : 3 * group] *= 0.1
    weight = quantised(name, w)
    x = weight.dequantize().clone()
    x[130, 2 * group] = 0.09
    new = stored(weight, x, seed)
    raised = block_scales(name, new) != block_scales(name, weight)
    assert raised.nonzero().tolist() == [[130, 2]]
    same = torch.ones_like(x, dtype=torch.bool)
    same[130, 2 * group : 3 * group] = False
    assert torch.equal(new.dequantize()[same], weight.dequantize()[same])
    # Largest step of NVFP4: a third of the largest weight; a block scale that E4M3 rounds up adds up to an eighth.
    limit = 0.09 * (1 / 3 + 1 / 8 if name == "nvfp4" else 1 / 8)
    assert ((new.dequantize() - x).abs() <= limit).all()


def test_nvfp4_weight_beyond_the_largest_block_scale_is_cut():
    weight = quantised("nvfp4", random_weight())
    x = weight.dequantize() * 100
    new = stored(weight, x, 7)
    assert torch.equal(new._params.scale, weight._params.scale)
    end = 448 * 6 * weight._params.scale
    assert (new.dequantize().abs() <= end * 1.0001).all()
    assert (new.dequantize()[x.abs() > 1.2 * end].abs() >= end * 0.999).all()


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", FORMATS)
def test_zero_weight_stays_zero_and_takes_a_change(name, seed):
    weight = quantised(name, random_weight())
    for key, tensor in weight.state_dict("w").items():
        if key != "w_scale_2":  # the global scale of NVFP4 stays, so that it must be a number above 0
            tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).zero_()
    assert_same(stored(weight, torch.zeros(64, 256), seed), weight)
    x = low_rank((64, 256), 0.01)
    new = stored(weight, x, seed).dequantize()
    assert new.isfinite().all()
    assert rms(new - x) < 0.3 * rms(x)


def test_nvfp4_global_scale_of_zero_gives_zeros():
    weight = quantised("nvfp4", random_weight())
    weight._params.scale.zero_()
    new = stored(weight, random_weight(), 7)
    assert torch.equal(new.dequantize(), torch.zeros(64, 256))


def test_zero_block_takes_a_change():
    for name, group in BLOCKS.items():
        w = random_weight((32, 256))
        w[4, :group] = 0
        weight = quantised(name, w)
        x = weight.dequantize().clone()
        x[4, :group] = torch.randn(group) * 0.02
        new = stored(weight, x, 7).dequantize()
        assert rms(new[4, :group] - x[4, :group]) < 0.005
        assert torch.equal(new[4, group:], x[4, group:])


def test_code_beyond_the_quantiser_range_stays():
    int8 = torch.tensor([[-128, 127, 5, 0]], dtype=torch.int8)
    scale = torch.tensor([[0.01]])
    assert torch.equal(kept_scales.requantize_int8(int8, scale, int8.float() * scale, 5)[0], int8)
    weight = quantised("int4_convrot", random_weight((8, 256)))
    weight._qdata[0, :4] = torch.tensor([0x88, 0x78, 0x87, 0x08], dtype=torch.uint8).view(torch.int8)
    assert_same(stored(weight, weight.dequantize(), 5), weight)


def test_padding_keeps_its_bytes():
    weight = quantised("nvfp4", random_weight((40, 200)))
    weight._qdata[40:] = 0x23
    blocks = weight._params.block_scale.view(torch.uint8)
    plain = from_blocked(blocks, *blocks.shape)
    plain[48:], plain[:, 13:] = 7, 9
    blocks.copy_(to_blocked(plain, flatten=False))
    new = stored(weight, weight.dequantize() * 1.5, 5)
    assert torch.equal(new._qdata[40:], weight._qdata[40:])
    after = from_blocked(new._params.block_scale.view(torch.uint8), *blocks.shape)
    assert torch.equal(after[48:], plain[48:])
    assert torch.equal(after[:, 13:], plain[:, 13:])
    assert not torch.equal(after, plain)


def test_chunks_do_not_change_the_result(monkeypatch):
    for name in FORMATS:
        weight = quantised(name, random_weight((300, 256)))
        x = weight.dequantize() * 1.3
        whole = stored(weight, x, 0)
        with monkeypatch.context() as patch:
            patch.setattr("ernie_fast.kernels.kept_codes._CHUNK", 1)
            assert_same(stored(weight, x, 0), whole)


def test_arguments_that_do_not_fit_are_refused():
    data, scale = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 1)
    with pytest.raises(ValueError, match="expected a float of shape"):
        kept_scales.requantize_int8(data, scale, torch.zeros(4, 65), 1)
    with pytest.raises(ValueError, match="group size 256"):
        kept_scales.requantize_int8(data, scale, torch.zeros(4, 64), 1, 256)
    with pytest.raises(ValueError, match="float8_e4m3fn or float8_e5m2"):
        kept_scales.requantize_fp8(data, scale, torch.zeros(4, 64), 1)
    with pytest.raises(ValueError, match="block_scale is"):
        kept_scales.requantize_nvfp4(data.view(torch.uint8), scale, scale[0], torch.zeros(4, 128), 1)


@pytest.mark.parametrize(("dtype", "grid"), [(torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)])
def test_small_float_rounding_keeps_the_grid_and_agrees_with_torch(dtype, grid):
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    for up in (0.0, 0.3, 0.5, 0.99):
        assert torch.equal(round_small_float(values, grid, up), values)
    x = torch.randn(10000) * torch.exp2(torch.randint(-20, 8, (10000,)).float())
    nearest = x.clamp(-grid.maximum, grid.maximum).to(dtype).float()
    assert torch.equal(round_small_float(x, grid), nearest)


@pytest.mark.parametrize(("x", "threshold", "wanted"), [(0.3, 0.5, 0.5), (0.3, 0.7, 0.0), (2.2, 0.1, 3.0), (2.2, 0.3, 2.0)])
def test_a_weight_arrives_when_it_has_gone_more_than_the_threshold(x, threshold, wanted):
    x = torch.tensor([x, -x])
    assert torch.equal(round_small_float(x, E2M1, upwards(x, threshold)), torch.tensor([wanted, -wanted]))


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    powers = power_of_two(exponents)
    assert torch.equal(powers.double(), exponents.double().exp2())
    assert torch.equal(ceil_log2(powers), exponents)
    assert torch.equal(ceil_log2(torch.nextafter(powers, torch.tensor(torch.inf)))[:-1], exponents[:-1] + 1)
