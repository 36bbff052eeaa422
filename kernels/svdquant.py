"""SVDQuant W4A4: 4-bit weights and activations with a 16-bit low-rank branch, in comfy-kitchen's layout.

Li et al., "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models" (arXiv 2411.05007):

    y = Q(x / s) Q(W s - L)^T + x (L / s)^T      with L the low-rank part of W s, so that its outliers are not quantised.

The paper fits s and L to activations of a calibration run. Here the weight alone, or what is known of the largest inputs, has to do.
comfy-kitchen computes the product (`comfy_kitchen.tensor.svdquant_w4a4`); it has no quantiser.

Symbols: N outputs, K inputs of the linear layer; R rank; G = K / 64 groups of a row. `s` is the smoothing, (K,).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import int4
from .kept_codes import INT4, store

GROUP_SIZE = 64
RANK_MULTIPLE = 16
_CODE_MAX = INT4.high
_HALF = (torch.float16, torch.bfloat16)
# Scales that are tried for a group, as shares of that of the largest weight.
_CLIPPING = (1.0, 0.9, 0.8)
_CHUNK = 1 << 22  # weights at a time: ten float32 temporaries of that size are 168 MB
_OVERSAMPLING = 16
_POWER_ITERATIONS = 4
_REFITS = 8
_REFIT_GAIN = 0.002  # a refit that lowers the squared error by a smaller share is the last
_ALPHAS = (0.5, 0.65, 0.8)
_PROBES = 128
_SMOOTH_MAX = 64.0  # and 1 / 64 is the smallest: an input of almost no size must not get almost all of the range


@dataclass(frozen=True, slots=True)
class SVDQuantWeight:
    """The stored parts of a linear weight, in comfy-kitchen's natural (row-major) layout.

    Args:
        qweight: int8 (N, K / 2), two INT4 codes per byte, the even column in the low half.
        wscales: 16-bit float (G, N), the scales of the codes.
        proj_down: 16-bit float (K, R), applied to the input as it is, not divided by `s`.
        proj_up: 16-bit float (N, R).
        smooth_factor: 16-bit float (K,), what the quantised input is divided by: `s`.
    """

    qweight: Tensor
    wscales: Tensor
    proj_down: Tensor
    proj_up: Tensor
    smooth_factor: Tensor


def supports(shape: tuple[int, ...], rank: int = 32) -> str | None:
    """Say why a weight of this shape cannot be stored; None when it can.

    The rules are those of comfy-kitchen's CUDA kernel (ops/scaled_mm_svdquant_w4a4.cu): it multiplies whole groups, reads the
    scales of two outputs at once, and the low-rank branch in slices of 16. It pads the tokens to a multiple of 256 itself.

    Args:
        shape: (N, K).
        rank: R.
    """
    if len(shape) != 2:
        return f"a weight of two dimensions is needed, not {list(shape)}"
    rows, columns = shape
    if columns % GROUP_SIZE or not columns:
        return f"{columns} inputs are no multiple of {GROUP_SIZE}"
    if rows % 2 or not rows:
        return f"{rows} outputs are no multiple of 2"
    if rank % RANK_MULTIPLE or not 0 < rank <= min(rows, columns):
        return f"a rank of {rank} is no multiple of {RANK_MULTIPLE} from {RANK_MULTIPLE} to {min(rows, columns)}"
    return None


def quantize(
    weight: Tensor,
    rank: int = 32,
    smooth: Tensor | None = None,
    act_absmax: Tensor | None = None,
    refits: int = _REFITS,
) -> SVDQuantWeight:
    """Quantise the weight of a linear layer.

    Args:
        weight: (N, K), float32 or 16-bit float. Scales and branch get its dtype if that has 16 bits, else bf16.
        rank: R.
        smooth: (K,), positive, to use as `s`. None: from `act_absmax`, or 1. From the weight alone no `s` was better than 1: those
            that even out its columns gave -1.2 to +0.3 dB on the inputs of the tiny checkpoint.
        act_absmax: (K,), size of each input in any unit: the largest magnitude, or better the root mean square. See `search_smooth`.
        refits: how often at most the branch is fitted anew to what INT4 leaves. The default gains 0.4 dB (random, 4096 x 4096) to
            2.5 dB (tiny checkpoint) over 0 and takes six times as long.

    Returns:
        The parts on the device of `weight`.

    Raises:
        ValueError: when the weight cannot be stored (see `supports`), is not finite, or the vectors do not fit it.
    """
    _check(weight, rank, smooth, act_absmax)
    dtype = weight.dtype if weight.dtype in _HALF else torch.bfloat16
    w = weight.detach().float()
    if smooth is None and act_absmax is not None:
        smooth = search_smooth(w, act_absmax, rank, dtype)
    if smooth is None:
        smooth = torch.ones(w.shape[1], device=w.device)
    return _fit(w, smooth.to(w.device), rank, dtype, refits)


def search_smooth(w: Tensor, act_absmax: Tensor, rank: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Choose `s` for inputs of known size.

    SmoothQuant (arXiv 2211.10438, equation 4): s = max|x|^alpha / max|w|^(1 - alpha) per input, here with geometric mean 1.
    The alpha, or s = 1, is taken that gives the smallest error for normally distributed inputs of that size.

    Args:
        w: float32 (N, K).
        act_absmax: (K,), 0 or more.
        rank: R.
        dtype: of the scales and the branch.

    Returns:
        float32 (K,).
    """
    sizes = act_absmax.to(w.device).float()
    generator = torch.Generator(w.device).manual_seed(0)
    probe = torch.randn(_PROBES, len(sizes), generator=generator, device=w.device) * sizes
    wanted = probe @ w.T
    candidates = [torch.ones_like(sizes), *(_smoothquant(w, sizes, alpha) for alpha in _ALPHAS)]
    errors = [float((linear(probe, _fit(w, s, rank, dtype, 0)).float() - wanted).square().sum()) for s in candidates]
    return candidates[errors.index(min(errors))]


def dequantize(weight: SVDQuantWeight) -> Tensor:
    """Return the weight (N, K) as float32, with the branch and without the smoothing."""
    rows, groups = weight.qweight.shape[0], weight.wscales.shape[0]
    codes = int4.unpack(weight.qweight).view(rows, groups, -1)
    residual = (codes * weight.wscales.T.float().unsqueeze(-1)).view(rows, -1)
    return residual.div_(weight.smooth_factor.float()).addmm_(weight.proj_up.float(), weight.proj_down.float().T)


def requantize(weight: SVDQuantWeight, x: Tensor, seed: int | None = 0) -> SVDQuantWeight:
    """Store a changed weight beside the low-rank branch and on the scales that it has; see `kept_scales`.

    Args:
        weight: the weight before the change.
        x: (N, K), the changed weight, float.
        seed: above 0, keep small changes; 0 or None, round to nearest.

    Raises:
        ValueError: for an `x` of another shape.
    """
    shape = (weight.qweight.shape[0], weight.qweight.shape[1] * 2)
    if tuple(x.shape) != shape or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}; expected a float of shape {shape}, that of the stored weight"
        )
    smooth = weight.smooth_factor.float()

    def read(rows: slice) -> tuple[Tensor, Tensor]:
        part = SVDQuantWeight(
            weight.qweight[rows], weight.wscales[:, rows], weight.proj_down, weight.proj_up[rows], weight.smooth_factor
        )
        change = x[rows].detach().float() - dequantize(part).to(x.dtype).float()
        return int4.unpack(part.qweight).float(), change * smooth

    def raised(peak: Tensor, _: Tensor, __: torch.Generator | None) -> tuple[Tensor, Tensor]:
        return peak / _CODE_MAX, peak

    scales = weight.wscales.T.contiguous()
    data, scales = store(weight.qweight, scales, shape[0], read, int4.pack, INT4, raised, seed)
    return SVDQuantWeight(data, scales.T.contiguous(), weight.proj_down, weight.proj_up, weight.smooth_factor)


def has_int4_units(device: torch.device) -> bool:
    """Tell whether a GPU multiplies INT4: Ampere and Ada do. Hopper and Blackwell emulate it, ten times as slowly as BF16 on an H200."""
    return device.type == "cuda" and (8, 0) <= torch.cuda.get_device_capability(device) < (9, 0)


def expanded_linear(x: Tensor, weight: SVDQuantWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ W^T + bias with the codes expanded to the dtype of `x`, and the input as it is.

    For GPUs without INT4 units: as fast as a plain layer but for the expansion, and more exact than quantised inputs.

    Args:
        x: (..., K), float.
        bias: (N,) or None.

    Returns:
        (..., N) in the dtype of `x`.
    """
    rows, groups = weight.qweight.shape[0], weight.wscales.shape[0]
    codes = int4.unpack(weight.qweight).view(rows, groups, -1)
    residual = (codes.to(x.dtype) * weight.wscales.T.to(x.dtype).unsqueeze(-1)).view(rows, -1)
    residual /= weight.smooth_factor.to(x.dtype)
    out = torch.nn.functional.linear(x, residual, None if bias is None else bias.to(x.dtype))
    return out + (x @ weight.proj_down.to(x.dtype)) @ weight.proj_up.to(x.dtype).T


def linear(x: Tensor, weight: SVDQuantWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ W^T + bias by comfy-kitchen's operators: the input is quantised to INT4 per token and group of 64 inputs.

    comfy-kitchen needs one dtype throughout, 16 bits wide on the GPU. On the CPU a float32 input is computed in float32. On a GPU without
    INT4 units this is `expanded_linear`.

    Args:
        x: (..., K), float32 or 16-bit float.
        bias: (N,) or None.

    Returns:
        (..., N) in the dtype of `x`.
    """
    if x.is_cuda and not has_int4_units(x.device):
        return expanded_linear(x, weight, bias)
    tensor: Any = importlib.import_module("comfy_kitchen.tensor")
    dtype = weight.wscales.dtype if x.is_cuda and x.dtype not in _HALF else x.dtype
    layout: Any = tensor.TensorCoreSVDQuantW4A4Layout
    params = layout.Params(
        scale=weight.wscales.to(dtype),
        orig_dtype=dtype,
        orig_shape=(weight.qweight.shape[0], weight.qweight.shape[1] * 2),
        proj_down=weight.proj_down.to(dtype),
        proj_up=weight.proj_up.to(dtype),
        smooth_factor=weight.smooth_factor.to(dtype),
    )
    stored = tensor.QuantizedTensor(weight.qweight, layout.__name__, params)
    out = torch.nn.functional.linear(x.to(dtype).contiguous(), stored, None if bias is None else bias.to(dtype))
    return out.to(x.dtype)


def _fit(w: Tensor, smooth: Tensor, rank: int, dtype: torch.dtype, refits: int) -> SVDQuantWeight:
    """Fit branch and codes to `w`, float32 (N, K), for the smoothing `smooth`, float32 (K,).

    The branch is the best one for the whole weight first, then for what the codes leave of it, while the error falls.
    """
    factor = smooth.to(dtype)
    s = factor.float()
    smoothed = w * s
    target, least, basis = smoothed, float("inf"), None
    fitted: list[SVDQuantWeight] = []
    for _ in range(refits + 1):
        up, basis = _low_rank(target, rank, basis)
        proj_up = up.to(dtype).contiguous()
        proj_down = (basis[:, :rank] / s.unsqueeze(-1)).to(dtype).contiguous()
        # What is stored, rounded to 16 bits: INT4 also gets what the rounding leaves.
        residual = smoothed - proj_up.float() @ (proj_down.float() * s.unsqueeze(-1)).T
        codes, scales = _quantize_residual(residual, dtype)
        stored = (codes.view(*scales.shape, -1) * scales.float().unsqueeze(-1)).view_as(w)
        error = float((residual - stored).square().sum())
        if not fitted or error < least:
            fitted = [SVDQuantWeight(int4.pack(codes), scales.T.contiguous(), proj_down, proj_up, factor)]
        if error >= least * (1 - _REFIT_GAIN):
            break
        target, least = smoothed - stored, error
    return fitted[0]


def _low_rank(w: Tensor, rank: int, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the largest part of rank `rank` of `w`, float32 (N, K), by subspace iteration (Halko et al., arXiv 0909.4061).

    Args:
        start: the basis of a weight near `w`, from which fewer iterations are enough.

    Returns:
        (float32 (N, R), orthonormal float32 (K, R and more)); the part is the first times the transposed first R columns.
    """
    linalg: Any = torch.linalg  # untyped
    if start is None:
        generator = torch.Generator(w.device).manual_seed(0)
        width = min(rank + _OVERSAMPLING, *w.shape)
        start = torch.randn(w.shape[1], width, generator=generator, device=w.device)
        iterations = _POWER_ITERATIONS
    else:
        iterations = 1
    basis = start
    for _ in range(iterations):
        rows: Tensor = linalg.qr(w @ basis).Q
        basis: Tensor = linalg.qr(w.T @ rows).Q
    parts: tuple[Tensor, Tensor, Tensor] = linalg.svd(w @ basis, full_matrices=False)
    left, singular, right = parts
    return (left * singular)[:, :rank], basis @ right.T


def _quantize_residual(residual: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise float32 (N, K) to INT4 with the scale of each group that has the smallest squared error of those tried.

    Returns:
        (codes as float32 (N, K), scales of dtype `dtype` (N, G)).
    """
    codes = torch.empty_like(residual)
    scales = torch.empty(len(residual), residual.shape[1] // GROUP_SIZE, dtype=dtype, device=residual.device)
    step = max(1, _CHUNK // residual.shape[1])
    for i in range(0, len(residual), step):
        groups = residual[i : i + step].reshape(-1, GROUP_SIZE)
        best = _best_scales(groups, dtype)
        codes[i : i + step] = _round(groups, best).view(-1, residual.shape[1])
        scales[i : i + step] = best.view(-1, scales.shape[1]).to(dtype)
    return codes, scales


def _best_scales(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales, float32 (groups, 1) that `dtype` can store, for float32 (groups, 64).

    A smaller scale cuts the largest weights and rounds the others finer. For the codes of each scale tried, the scale is
    replaced by the one of least squares, <x, q> / <q, q>.
    """
    peak = groups.abs().amax(-1, keepdim=True) / _CODE_MAX
    best, least = peak.to(dtype).float(), torch.full_like(peak, float("inf"))
    for share in _CLIPPING:
        codes = _round(groups, peak * share)
        squares = codes.square().sum(-1, keepdim=True)
        scale = ((groups * codes).sum(-1, keepdim=True) / squares.clamp(min=1.0)).to(dtype).float()
        error = (groups - _round(groups, scale) * scale).square().sum(-1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _round(groups: Tensor, scale: Tensor) -> Tensor:
    """Return the INT4 codes of `groups` as float32; 0 where the scale is 0."""
    return (groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(INT4.low, INT4.high)


def _smoothquant(w: Tensor, sizes: Tensor, alpha: float) -> Tensor:
    """Return `s` for one alpha, see `search_smooth`. An input of size 0, or without weights, gets an average `s`."""
    weights = w.abs().amax(dim=0)
    known = (sizes > 0) & (weights > 0)
    logarithm = alpha * torch.where(known, sizes, 1.0).log() - (1 - alpha) * torch.where(known, weights, 1.0).log()
    mean = (logarithm * known).sum() / known.sum().clamp(min=1)
    return torch.where(known, logarithm - mean, 0.0).exp().clamp(1 / _SMOOTH_MAX, _SMOOTH_MAX)


def _check(weight: Tensor, rank: int, smooth: Tensor | None, act_absmax: Tensor | None) -> None:
    reason = supports(tuple(weight.shape), rank)
    if reason is not None:
        raise ValueError(f"SVDQuant cannot store this layer: {reason}")
    if not weight.is_floating_point() or not bool(weight.isfinite().all()):
        raise ValueError(f"the weight is {weight.dtype}, or has infinities or NaN; finite floats are needed")
    for name, vector, low in (("smooth", smooth, "above 0"), ("act_absmax", act_absmax, "0 or more")):
        if vector is None:
            continue
        inside = vector > 0 if vector is smooth else vector >= 0
        if tuple(vector.shape) != weight.shape[1:] or not bool((inside & vector.isfinite()).all()):
            raise ValueError(
                f"{name} has the shape {list(vector.shape)}; {weight.shape[1]} finite numbers {low} are needed"
            )
