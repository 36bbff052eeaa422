"""Row-wise FP8 (E4M3): one scale per output row of a linear weight, and per row of its input.

ComfyUI and comfy-kitchen have one scale per tensor only. `torch._scaled_mm` multiplies row-wise scaled matrices on GPUs of compute
capability 8.9 and later (with CUDA 12.8 or later); everywhere else the weight is expanded first.
"""

from __future__ import annotations

from typing import Any

import torch

FP8_MAX = 448.0  # largest float8_e4m3fn
# cuBLAS wants rows of whole 16-byte pieces.
_MULTIPLE = 16


def quantise_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to FP8, rounding to nearest.

    Args:
        x: (rows, columns), any float dtype.

    Returns: (float8_e4m3fn (rows, columns), float32 (rows, 1)); x is about their product. The scale of a zero row is 1.
    """
    scale = scales_of(x.abs().amax(dim=-1, keepdim=True).float())
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def scales_of(absmax: torch.Tensor) -> torch.Tensor:
    """Return the scales that map absmax, float32 of any shape, to the largest FP8 number; 1 for a row of zeros."""
    # Divided by a tensor: by a Python number CUDA multiplies with 1/448, which can differ from the CPU in the last bit.
    return torch.where(absmax == 0, 1.0, absmax / torch.full_like(absmax, FP8_MAX))


def dequantise_rowwise(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight (rows, columns) in `dtype`; the product is computed in float32."""
    return (data.float() * scale).to(dtype)


def why_no_product(x: torch.Tensor, data: torch.Tensor) -> str | None:
    """Say why `linear_rowwise` cannot multiply on FP8 units here; None when it can.

    Args:
        x: input (M, I).
        data: FP8 weight (O, I).
    """
    if not x.is_cuda or torch.version.cuda is None:
        return f"{x.device.type} has no FP8 product in torch"
    if torch.cuda.get_device_capability(x.device) < (8, 9):
        return "the GPU has no FP8 units (compute capability 8.9 or later is needed)"
    if x.dtype != torch.bfloat16:
        return f"the row-wise product gives bf16, and the input is {x.dtype}"
    if data.shape[0] % _MULTIPLE or data.shape[1] % _MULTIPLE:
        return f"the weight is {tuple(data.shape)}; multiples of {_MULTIPLE} are needed"
    return None


def linear_rowwise(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias for a row-wise FP8 weight.

    Where the GPU can, the input is quantised row by row and the product runs in FP8; else the weight is expanded.

    Args:
        x: input (M, I), float32, bf16 or fp16.
        data: weight, float8_e4m3fn (O, I), contiguous.
        scale: float32 (O, 1).
        bias: (O,) in x's dtype, or None.

    Returns: (M, O) in x's dtype.
    """
    if why_no_product(x, data) is not None:
        return torch.nn.functional.linear(x, dequantise_rowwise(data, scale, x.dtype), bias)
    # Powers of two: multiplying by them is exact in 16 bits, so the input is rounded once and read in few passes.
    peak = torch.maximum(x.amax(dim=-1, keepdim=True), -x.amin(dim=-1, keepdim=True)).float()
    exponent = torch.where(peak > 0, torch.log2(peak / FP8_MAX).ceil(), 0.0)
    quantised = (x * torch.exp2(-exponent).to(x.dtype)).to(torch.float8_e4m3fn)
    product: Any = getattr(torch, "_scaled_mm")  # noqa: B009 - private, and the only way to the FP8 units
    return product(quantised, data.t(), scale_a=torch.exp2(exponent), scale_b=scale.t(), bias=bias, out_dtype=x.dtype)
