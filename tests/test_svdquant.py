"""SVDQuant: how exact the stored weight and the product are, that comfy-kitchen computes the same, and what cannot be stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor, TensorCoreSVDQuantW4A4Layout
from ernie_fast.kernels import svdquant
from ernie_fast.kernels.svdquant import SVDQuantWeight
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYOUT = "TensorCoreSVDQuantW4A4Layout"
BLOCK_LINEARS = (
    "self_attention.to_q", "self_attention.to_k", "self_attention.to_v", "self_attention.to_out.0",
    "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2",
)  # fmt: skip
PARTS = ("qweight", "wscales", "proj_down", "proj_up", "smooth_factor")


def decibels(wanted: Tensor, found: Tensor) -> float:
    """Ratio of signal to error."""
    error = (wanted - found.float()).square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(wanted.square().sum() / error))


def int4(x: Tensor) -> Tensor:
    """Round to INT4 per row and group of 64, the largest number of a group being 7."""
    groups = x.view(len(x), -1, 64)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-10)
    return ((groups / scale).round() * scale).view_as(x)


def plain_w4a4(x: Tensor, weight: Tensor) -> Tensor:
    """The product of INT4 input and INT4 weight, without smoothing and branch."""
    return int4(x) @ int4(weight).T


def outlier_inputs(columns: int, tokens: int = 256) -> Tensor:
    """Inputs of unequal size, one in 50 of them ten times larger."""
    sizes = (torch.randn(columns) * 0.3).exp()
    sizes[torch.randperm(columns)[: columns // 50 + 1]] *= 10
    return torch.randn(tokens, columns) * sizes


def outlier_weight(rows: int = 384, columns: int = 512) -> Tensor:
    """Weights with large columns, and a few strong directions, as trained layers have."""
    weight = torch.randn(rows, columns) * 0.02
    weight[:, torch.randperm(columns)[:8]] *= 12
    return weight + torch.randn(rows, 8) @ torch.randn(8, columns) * 0.02


def random_weight(rows: int = 128, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns) * 0.05


def kitchen(stored: SVDQuantWeight, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    """comfy-kitchen's own tensor of a stored weight."""
    shape = (stored.proj_up.shape[0], stored.proj_down.shape[0])
    params = TensorCoreSVDQuantW4A4Layout.Params(
        stored.wscales.to(dtype),
        dtype,
        shape,
        stored.proj_down.to(dtype),
        stored.proj_up.to(dtype),
        stored.smooth_factor.to(dtype),
    )
    return QuantizedTensor(stored.qweight, LAYOUT, params)


@pytest.fixture(scope="module", params=BLOCK_LINEARS)
def nano_weight(request: pytest.FixtureRequest) -> Tensor:
    """A trained weight of the bundled tiny checkpoint, bf16."""
    file = Path(__file__).parent.parent / "assets" / "nano" / "ernie-image-nano.safetensors"
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(f"layers.5.{request.param}.weight")


def test_stored_trained_weight_is_three_decibels_better_than_plain_int4(nano_weight: Tensor):
    weight = nano_weight.float()
    assert decibels(weight, svdquant.dequantize(svdquant.quantize(nano_weight))) > decibels(weight, int4(weight)) + 3


def test_stored_weight_with_outliers_is_six_decibels_better_than_plain_int4():
    weight = outlier_weight()
    assert decibels(weight, svdquant.dequantize(svdquant.quantize(weight))) > decibels(weight, int4(weight)) + 6


def test_product_of_trained_weight_is_two_decibels_better_than_plain_w4a4(nano_weight: Tensor):
    weight = nano_weight.float()
    x = torch.randn(256, weight.shape[1])
    wanted = x @ weight.T
    assert (
        decibels(wanted, svdquant.linear(x, svdquant.quantize(nano_weight)))
        > decibels(wanted, plain_w4a4(x, weight)) + 2
    )


def test_product_with_known_input_sizes_is_four_decibels_better_than_plain_w4a4(nano_weight: Tensor):
    weight = nano_weight.float()
    x = outlier_inputs(weight.shape[1])
    wanted = x @ weight.T
    stored = svdquant.quantize(nano_weight, act_absmax=x.square().mean(0).sqrt())
    assert decibels(wanted, svdquant.linear(x, stored)) > decibels(wanted, plain_w4a4(x, weight)) + 4


@pytest.mark.parametrize("smooth", [None, torch.linspace(0.25, 4, 256)], ids=["ones", "smoothed"])
def test_smoothing_is_undone(smooth: Tensor | None):
    weight = random_weight()
    stored = svdquant.quantize(weight, smooth=smooth)
    assert decibels(weight, svdquant.dequantize(stored)) > 18
    assert torch.equal(stored.smooth_factor.float(), torch.ones(256) if smooth is None else smooth.bfloat16().float())


def test_more_rank_and_refits_lower_the_error():
    weight = outlier_weight()
    errors = [
        -decibels(weight, svdquant.dequantize(svdquant.quantize(weight, rank, refits=0))) for rank in (16, 32, 64)
    ]
    assert errors == sorted(errors, reverse=True)
    assert -decibels(weight, svdquant.dequantize(svdquant.quantize(weight, 16, refits=4))) < errors[0]


def test_quantize_gives_the_same_twice_and_leaves_the_random_state():
    weight = random_weight()
    state = torch.random.get_rng_state()
    first, second = (svdquant.quantize(weight, act_absmax=weight.abs().amax(0)) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in PARTS)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_stored_parts_have_the_shapes_and_dtypes_of_the_layout(dtype: torch.dtype, stored: torch.dtype):
    weight = svdquant.quantize(random_weight(130, 192).to(dtype))
    assert weight.qweight.shape == (130, 96)
    assert weight.qweight.dtype == torch.int8
    assert (weight.wscales.shape, weight.proj_down.shape) == ((3, 130), (192, 32))
    assert (weight.proj_up.shape, weight.smooth_factor.shape) == ((130, 32), (192,))
    assert {getattr(weight, name).dtype for name in PARTS[1:]} == {stored}
    assert all(getattr(weight, name).is_contiguous() for name in PARTS)


@pytest.mark.parametrize("value", [0.0, 0.5, 1e30], ids=["zeros", "constant", "huge"])
def test_weight_of_one_value_is_exact(value: float):
    weight = torch.full((64, 128), value)
    found = svdquant.dequantize(svdquant.quantize(weight))
    assert torch.allclose(found, weight, rtol=1e-3)


def test_input_of_no_size_gets_a_finite_smoothing():
    weight = random_weight()
    weight[:, 3] = 0
    sizes = torch.rand(256) + 0.1
    sizes[5] = 0
    smooth = svdquant.search_smooth(weight, sizes, 32)
    assert smooth.isfinite().all()
    assert smooth.min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 256), (3, 300, 256)], ids=["one token", "batch"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_kitchens_tensor(dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool):
    stored = svdquant.quantize(random_weight(), smooth=torch.rand(256) + 0.5)
    x = torch.randn(shape).to(dtype)
    bias = torch.randn(128).to(dtype) if with_bias else None
    found = svdquant.linear(x, stored, bias)
    assert found.dtype == dtype
    assert found.shape == (*shape[:-1], 128)
    assert torch.equal(found, torch.nn.functional.linear(x, kitchen(stored, dtype), bias))


def test_linear_is_the_formula_of_the_paper():
    stored = svdquant.quantize(outlier_weight(), smooth=torch.rand(512) + 0.5)
    x, bias = torch.randn(64, 512), torch.randn(384)
    smooth = stored.smooth_factor.float()
    low_rank = stored.proj_down.float() @ stored.proj_up.float().T
    residual = (svdquant.dequantize(stored) - low_rank.T) * smooth
    assert decibels(int4(x / smooth) @ residual.T + x @ low_rank + bias, svdquant.linear(x, stored, bias)) > 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_is_kitchens(dtype: torch.dtype):
    stored = svdquant.quantize(outlier_weight(), smooth=torch.rand(512) + 0.5)
    wanted = TensorCoreSVDQuantW4A4Layout.dequantize(stored.qweight, kitchen(stored, dtype)._params)
    assert decibels(wanted.float(), svdquant.dequantize(stored)) > (90 if dtype == torch.float32 else 40)


def test_parts_survive_a_file_under_kitchens_names(tmp_path: Path):
    stored = svdquant.quantize(random_weight())
    tensors = kitchen(stored).state_dict("layers.0.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "m.safetensors")
    read = load_file(tmp_path / "m.safetensors")
    suffixes = ("", "_scale", "_proj_down", "_proj_up", "_smooth_factor")
    assert set(read) == {f"layers.0.mlp.up_proj.weight{suffix}" for suffix in suffixes}
    back = SVDQuantWeight(*(read[f"layers.0.mlp.up_proj.weight{suffix}"] for suffix in suffixes))
    assert all(torch.equal(getattr(back, name), getattr(stored, name)) for name in PARTS)


def test_expanded_product_is_that_of_the_dequantised_weight():
    stored = svdquant.quantize(outlier_weight(), smooth=torch.rand(512) + 0.5)
    x, bias = torch.randn(2, 3, 512), torch.randn(len(stored.qweight))
    wanted = torch.nn.functional.linear(x, svdquant.dequantize(stored), bias)
    assert torch.allclose(svdquant.expanded_linear(x, stored, bias), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("capability", "found"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), False), ((12, 0), False)])
def test_int4_units_are_those_of_ampere_and_ada(monkeypatch, capability: tuple[int, int], found: bool):  # U53
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert svdquant.has_int4_units(torch.device("cuda")) is found
    assert not svdquant.has_int4_units(torch.device("cpu"))


@pytest.mark.parametrize("seed", [0, 7])
def test_unchanged_weight_stays_bit_for_bit(seed: int):
    stored = svdquant.quantize(outlier_weight(), smooth=torch.rand(512) + 0.5)
    again = svdquant.requantize(stored, svdquant.dequantize(stored), seed)
    assert all(torch.equal(getattr(again, name), getattr(stored, name)) for name in PARTS)


def test_small_change_survives_requantize():
    weight = random_weight(256, 512)
    stored = svdquant.quantize(weight)
    before = svdquant.dequantize(stored)
    change = torch.randn(256, 2) @ torch.randn(2, 512) * 0.002
    added = svdquant.dequantize(svdquant.requantize(stored, before + change, 3)) - before
    share = float((added * change).sum() / change.square().sum())
    assert 0.9 < share < 1.1


def test_large_change_gets_new_scales():
    stored = svdquant.quantize(random_weight())
    wanted = svdquant.dequantize(stored)
    wanted[5, 70] += 2.0
    again = svdquant.requantize(stored, wanted)
    assert float((svdquant.dequantize(again)[5, 70] - wanted[5, 70]).abs()) < 0.02
    assert int((again.wscales != stored.wscales).sum()) == 1


@pytest.mark.parametrize(
    ("shape", "rank", "reason"),
    [
        ((128, 100), 32, "100 inputs are no multiple of 64"),
        ((127, 128), 32, "127 outputs are no multiple of 2"),
        ((128, 128), 20, "a rank of 20 is no multiple of 16"),
        ((64, 128), 80, "from 16 to 64"),
        ((128, 128), 0, "a rank of 0"),
        ((128, 128, 1, 1), 32, "two dimensions"),
        ((0, 64), 16, "0 outputs"),
    ],
)
def test_layer_that_cannot_be_stored_is_refused(shape: tuple[int, ...], rank: int, reason: str):
    found = svdquant.supports(shape, rank)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=reason):
        svdquant.quantize(torch.zeros(shape), rank)


def test_layers_of_the_released_model_can_be_stored():
    assert all(svdquant.supports(shape) is None for shape in ((4096, 4096), (12288, 4096), (4096, 12288)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: svdquant.quantize(torch.zeros(64, 64, dtype=torch.int8)),
        lambda: svdquant.quantize(torch.full((64, 64), float("nan"))),
        lambda: svdquant.quantize(torch.ones(64, 64), smooth=torch.ones(63)),
        lambda: svdquant.quantize(torch.ones(64, 64), smooth=torch.zeros(64)),
        lambda: svdquant.quantize(torch.ones(64, 64), act_absmax=-torch.ones(64)),
        lambda: svdquant.requantize(svdquant.quantize(torch.ones(64, 64)), torch.ones(64, 32)),
    ],
    ids=["integers", "nan", "short smooth", "zero smooth", "negative sizes", "other shape"],
)
def test_wrong_argument_is_refused(call: Callable[[], object]):
    with pytest.raises(ValueError, match=r"needed|expected"):
        call()
