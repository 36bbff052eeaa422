"""Two INT4 codes in a byte, the even column in the low half, as comfy-kitchen stores them."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """Return int8 (rows, K / 2) for whole numbers from -8 to 7 of any dtype, (rows, K)."""
    halves = codes.to(torch.int8)
    return (halves[:, 0::2] & 15) | (halves[:, 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """Return the codes, int8 (rows, K), of int8 (rows, K / 2)."""
    # Shifting left, then right, copies the sign of the low half; `uint8` has no such shift.
    return torch.stack([(data << 4) >> 4, data >> 4], dim=-1).flatten(1)
