"""Where the bits of each linear GGUF type lie: scales, offsets and codes of a block, read and written as tensors.

The layouts are those of the `block_*` structs in llama.cpp's `ggml-common.h`, as `gguf.quants` decodes them. "Linear" means
that a weight is `scale * level + offset`, where the level is the code itself or, for IQ4_NL and IQ4_XS, a codebook's entry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plane:
    """Values of a few bits each, side by side in a run of bytes.

    The bytes are `groups` runs of `lanes` bytes. Within a group, value `p * lanes + l` is at bit `p * bits` of byte `l`.
    Every packed field of the K types is one such plane or, where its high bits are kept apart, two.
    """

    start: int
    groups: int
    parts: int
    lanes: int
    bits: int

    def _bytes(self, blocks: Tensor) -> Tensor:
        return blocks[:, self.start : self.start + self.groups * self.lanes].view(-1, self.groups, self.lanes)

    def _shifts(self, blocks: Tensor) -> Tensor:
        return torch.arange(0, self.parts * self.bits, self.bits, dtype=torch.uint8, device=blocks.device)[:, None]

    def read(self, blocks: Tensor) -> Tensor:
        """Return uint8 (N, groups * parts * lanes) of `blocks`, uint8 (N, type_size)."""
        values = self._bytes(blocks)[:, :, None] >> self._shifts(blocks)
        return (values & ((1 << self.bits) - 1)).flatten(1)

    def write(self, blocks: Tensor, values: Tensor) -> None:
        """Store integer `values` (N, groups * parts * lanes), each below 2 ** bits, in `blocks`, in place."""
        parts = values.to(torch.uint8).view(-1, self.groups, self.parts, self.lanes) << self._shifts(blocks)
        self._bytes(blocks).copy_(parts.sum(2, dtype=torch.uint8))


Planes = tuple[Plane, ...]  # low bits first


def read(blocks: Tensor, planes: Planes) -> Tensor:
    """Return int16 (N, count): the values whose bits are spread over `planes`."""
    values = planes[0].read(blocks).short()
    shift = planes[0].bits
    for plane in planes[1:]:
        values |= plane.read(blocks).short() << shift
        shift += plane.bits
    return values


def write(blocks: Tensor, planes: Planes, values: Tensor) -> None:
    """Store int16 `values` (N, count) in the bits of `planes` of `blocks`, in place."""
    for plane in planes:
        plane.write(blocks, values & ((1 << plane.bits) - 1))
        values = values >> plane.bits


def read_half(blocks: Tensor, at: int) -> Tensor:
    """Return float32 (N, 1): the float16 stored at byte `at` of every block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def write_half(blocks: Tensor, at: int, value: Tensor) -> None:
    """Store `value` (N, 1) as float16 at byte `at` of every block, in place."""
    blocks[:, at : at + 2] = value.to(torch.float16).contiguous().view(torch.uint8)


Q2_K_SCALES = (Plane(0, 1, 2, 16, 4),)  # 16 scales, then 16 minima
Q3_K_SCALES = (Plane(96, 1, 2, 8, 4), Plane(104, 1, 4, 4, 2))
IQ4_XS_SCALES = (Plane(4, 4, 2, 1, 4), Plane(2, 2, 4, 1, 2))
_K4_LOW = Plane(12, 1, 2, 4, 4)


def read_k4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 6-bit scales and minima of Q4_K and Q5_K, uint8 (N, 8) each (`get_scale_min_k4`)."""
    first = blocks[:, 4:12]
    last = _K4_LOW.read(blocks) | (first >> 6 << 4)
    first = first & 63
    return torch.cat((first[:, :4], last[:, :4]), 1), torch.cat((first[:, 4:], last[:, 4:]), 1)


def write_k4(blocks: Tensor, scales: Tensor, minima: Tensor) -> None:
    """Store the 6-bit `scales` and `minima`, uint8 (N, 8) each, of Q4_K and Q5_K, in place."""
    first = torch.cat((scales[:, :4], minima[:, :4]), 1)
    last = torch.cat((scales[:, 4:], minima[:, 4:]), 1)
    blocks[:, 4:12] = first | (last >> 4 << 6)
    _K4_LOW.write(blocks, last & 15)


Affine = tuple[Tensor, Tensor]  # scale and offset, float32 (N, sub-blocks)


def _scale_only(scale: Tensor) -> Affine:
    return scale, torch.zeros_like(scale)


def _d(blocks: Tensor) -> Affine:
    return _scale_only(read_half(blocks, 0))


def _d_m(blocks: Tensor) -> Affine:
    return read_half(blocks, 0), read_half(blocks, 2)


def _q2_k(blocks: Tensor) -> Affine:
    scales = read(blocks, Q2_K_SCALES)
    return read_half(blocks, 80) * scales[:, :16], -(read_half(blocks, 82) * scales[:, 16:])


def _q3_k(blocks: Tensor) -> Affine:
    return _scale_only(read_half(blocks, 108) * (read(blocks, Q3_K_SCALES) - 32))


def _q4_k(blocks: Tensor) -> Affine:
    scales, minima = read_k4(blocks)
    return read_half(blocks, 0) * scales, -(read_half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Affine:
    return _scale_only(read_half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8))


def _iq4_xs(blocks: Tensor) -> Affine:
    return _scale_only(read_half(blocks, 0) * (read(blocks, IQ4_XS_SCALES) - 32))


@dataclass(frozen=True, slots=True)
class Layout:
    """One linear type.

    Args:
        affine: reads the scale and the offset of every sub-block.
        planes: the bits of the codes.
        lowest: the code whose stored bits are 0 (after `flip`).
        flip: bits that are stored inverted: the sign bit of two's complement.
        codebook: whether the level is an entry of IQ4_NL's codebook instead of the code.
    """

    affine: Callable[[Tensor], Affine]
    planes: Planes
    lowest: int = 0
    flip: int = 0
    codebook: bool = False

    @property
    def highest(self) -> int:
        """The largest code."""
        return self.lowest + (1 << sum(plane.bits for plane in self.planes)) - 1


_NIBBLES_32 = Plane(16, 4, 2, 32, 4)
_BITS_32 = Plane(16, 1, 8, 32, 1)

LAYOUTS: dict[str, Layout] = {
    "Q8_0": Layout(_d, (Plane(2, 1, 1, 32, 8),), lowest=-128, flip=128),
    "Q4_0": Layout(_d, (Plane(2, 1, 2, 16, 4),), lowest=-8),
    "Q4_1": Layout(_d_m, (Plane(4, 1, 2, 16, 4),)),
    "Q5_0": Layout(_d, (Plane(6, 1, 2, 16, 4), Plane(2, 4, 8, 1, 1)), lowest=-16),
    "Q5_1": Layout(_d_m, (Plane(8, 1, 2, 16, 4), Plane(4, 4, 8, 1, 1))),
    "Q2_K": Layout(_q2_k, (Plane(16, 2, 4, 32, 2),)),
    "Q3_K": Layout(_q3_k, (Plane(32, 2, 4, 32, 2), Plane(0, 1, 8, 32, 1)), lowest=-4),
    "Q4_K": Layout(_q4_k, (_NIBBLES_32,)),
    "Q5_K": Layout(_q4_k, (Plane(48, 4, 2, 32, 4), _BITS_32)),
    "Q6_K": Layout(_q6_k, (Plane(0, 2, 2, 64, 4), Plane(128, 2, 4, 32, 2)), lowest=-32),
    "IQ4_NL": Layout(_d, (Plane(2, 1, 2, 16, 4),), codebook=True),
    "IQ4_XS": Layout(_iq4_xs, (Plane(8, 8, 2, 16, 4),), codebook=True),
}


class Grid(NamedTuple):
    """The blocks of a linear type: weight = scale * level + offset."""

    scale: Tensor  # float32 (N, sub-blocks, 1)
    offset: Tensor  # float32 (N, sub-blocks, 1)
    codes: Tensor  # int16 (N, sub-blocks, weights of a sub-block)


def grid(qtype: str, blocks: Tensor) -> Grid:
    """Return the scales, offsets and codes of `blocks`, uint8 (N, type_size) of the linear type `qtype`."""
    layout = LAYOUTS[qtype]
    scale, offset = layout.affine(blocks)
    codes = (read(blocks, layout.planes) ^ layout.flip) + layout.lowest
    return Grid(scale[..., None], offset[..., None], codes.view(*scale.shape, -1))


def with_codes(qtype: str, blocks: Tensor, codes: Tensor) -> Tensor:
    """Return a copy of `blocks`, uint8 (N, type_size), that holds the integer `codes` of the shape that `grid` gives."""
    layout = LAYOUTS[qtype]
    blocks = blocks.clone()
    write(blocks, layout.planes, (codes.short().flatten(1) - layout.lowest) ^ layout.flip)
    return blocks


def gguf_quants(name: str) -> Any:
    """Return the class of `gguf.quants` that holds the tables of the type `name`. Imports gguf, which takes a while."""
    return getattr(importlib.import_module("gguf.quants"), name)


def codebook(device: torch.device) -> Tensor:
    """Return float32 (16,): the ascending levels of IQ4_NL and IQ4_XS."""
    return torch.tensor(gguf_quants("IQ4_NL").kvalues, dtype=torch.float32, device=device)
