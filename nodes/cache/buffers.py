"""Tensors kept between steps, as they are or smaller.

Symbols: S rows (all dimensions but the last), D last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Largest finite value of each 8-bit type: E4M3FN of the OCP FP8 specification; symmetric INT8.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor at rest. 8-bit types have one fp32 scale per row, (..., 1)."""

    data: torch.Tensor
    scale: torch.Tensor | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def load(self) -> torch.Tensor:
        """Return the tensor in the dtype that it came in."""
        if self.scale is None:
            return self.data.to(self.dtype)
        return (self.data.to(torch.float32) * self.scale).to(self.dtype)


def store(tensor: torch.Tensor, cache_dtype: str) -> Stored:
    """Keep a tensor (..., D) of any float dtype.

    Args:
        tensor: must not be changed by the caller afterwards.
        cache_dtype: "auto" keeps it as it is; "bf16", "fp8" (E4M3, a scale per row) or "int8" (a scale per row).
    """
    target = _DTYPES.get(cache_dtype)
    if target is None or target == tensor.dtype:
        return Stored(tensor, None, tensor.dtype)
    if target not in _LARGEST:
        return Stored(tensor.to(target), None, tensor.dtype)
    # The smallest normal number, so that a row of zeros does not divide by zero.
    largest = tensor.abs().amax(dim=-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny * 512)
    scale = largest / _LARGEST[target]
    scaled = tensor / scale
    data = scaled.round_().to(target) if target == torch.int8 else scaled.to(target)
    return Stored(data, scale, tensor.dtype)
