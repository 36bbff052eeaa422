"""Codes of float weights on the grid that a linear GGUF block has."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rounding import NEAREST, upwards
from .fields import LAYOUTS, Grid, codebook, grid, with_codes

CHUNK = 1 << 21  # weights at a time: ten float32 temporaries of that size are 84 MB


def round_linear(qtype: str, blocks: Tensor, x: Tensor) -> Tensor:
    """Return a copy of `blocks` whose codes are those nearest to `x` on its grid.

    Args:
        blocks: uint8 (N, type_size) of the linear type `qtype`.
        x: float32 (N, block_size).
    """
    present = grid(qtype, blocks)
    return with_codes(qtype, blocks, rounded_codes(qtype, present, x.view(present.codes.shape), NEAREST))


def rounded_codes(qtype: str, present: Grid, x: Tensor, threshold: Tensor | float) -> Tensor:
    """Return the codes of `x`, of the shape of the present ones, on the present grid; `threshold` as in `rounding.upwards`."""
    layout, levels = LAYOUTS[qtype], levels_of(qtype, present.codes)
    move = _move(present, levels, x)
    if layout.codebook:
        codes = _codebook_codes(levels, move, threshold)
    else:
        codes = (present.codes + (move + upwards(move, threshold)).floor()).clamp(layout.lowest, layout.highest)
    return torch.where(present.scale == 0, present.codes, codes)


def levels_of(qtype: str, codes: Tensor) -> Tensor:
    """Return what the scale of a block multiplies for each code: the code itself, or its entry in the codebook."""
    return codebook(codes.device)[codes.int()] if LAYOUTS[qtype].codebook else codes


def beyond_range(qtype: str, present: Grid, x: Tensor) -> Tensor:
    """Return bool (N,): which blocks have a weight more than one code beyond what their scales can hold; arguments as above."""
    layout, levels = LAYOUTS[qtype], levels_of(qtype, present.codes)
    book = codebook(x.device) if layout.codebook else None
    low, high = (layout.lowest, layout.highest) if book is None else (book[0], book[-1])
    slack = 1 if book is None else book[-1] - book[-2]
    move = _move(present, levels, x)
    target = levels + move
    return ((move != 0) & ((target > high + slack) | (target < low - slack))).flatten(1).any(1)


def _move(present: Grid, levels: Tensor, x: Tensor) -> Tensor:
    """Return how many levels `x` lies above the present value; 0 where that is no number.

    The difference comes first, then the division: where `x` is the decoded weight, the result is exactly 0, and a change far
    smaller than a step is not lost in the rounding of a large code.
    """
    move = (x - (present.scale * levels + present.offset)) / present.scale
    return torch.where(move.isnan() | (present.scale == 0), 0.0, move)


def _codebook_codes(levels: Tensor, move: Tensor, threshold: Tensor | float) -> Tensor:
    """Return int16 codes of weights that move away from `levels`, among the two codebook levels around them."""
    book = codebook(move.device)
    target = levels + move
    below = (torch.bucketize(target, book, right=True) - 1).clamp_(0, len(book) - 2)
    part = (target - book[below]) / (book[below + 1] - book[below])
    above = part + upwards(move, threshold) >= 1
    return (below + above).short()
