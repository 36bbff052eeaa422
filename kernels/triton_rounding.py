# Triton reads these functions as a language of its own, which its annotations do not describe.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Rounding float32 in Triton to bfloat16 and float8_e4m3fn with integers, for hardware that does not, and for the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def bfloat16_bits(values: tl.tensor) -> tl.tensor:
    """Round float32 to bfloat16 (nearest, ties to even) with integers: the bits, as int16."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def float8_bits(values: tl.tensor) -> tl.tensor:
    """Round float32 within +-448 to float8_e4m3fn (nearest, ties to even) with integers: the bits, as uint8."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below 2**-6 FP8 counts in steps of 2**-9, which are the last mantissa bit of a float32 near 2**14: the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    rounded = tl.where(magnitude < (121 << 23), small, normal)
    rounded = tl.where(values == values, rounded, 0x7F)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_to(values: tl.tensor, dtype: tl.constexpr, rounding: tl.constexpr) -> tl.tensor:
    """Round float32 to `dtype`, that of the pointer of `target_of`, in the way that it says."""
    if rounding == "bfloat16":
        return bfloat16_bits(values)
    elif rounding == "float8_e4m3fn":
        return float8_bits(values)
    else:
        return values.to(dtype)


INTERPRETED = not isinstance(round_to, triton.JITFunction)


def casts_natively(device: torch.device) -> bool:
    """Whether the hardware converts bfloat16 and float8_e4m3fn from and to float32; Triton's interpreter does not round to either."""
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def target_of(out: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return what a kernel stores to for `out`, and its rounding.

    Returns:
        (out, "native"), or integers of the same memory (int16 or uint8) and the name of the dtype that they stand for.
    """
    if out.dtype not in (torch.bfloat16, torch.float8_e4m3fn) or casts_natively(out.device):
        return out, "native"
    name = str(out.dtype).removeprefix("torch.")
    return out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.uint8), name
