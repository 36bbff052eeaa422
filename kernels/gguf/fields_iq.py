"""Where the bits of the IQ2 and IQ3 types lie: scales, grid indices and signs of a block, read and written as tensors.

These types store, for every 8 (IQ2) or 4 (IQ3) weights, the index of a vector of magnitudes, and for every 8 weights their
signs. The layouts are those of the `block_iq*` structs in llama.cpp's `ggml-common.h`, as `gguf.quants` decodes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .fields import Plane, gguf_quants, read, read_half, write


class Vectors(NamedTuple):
    """The blocks of a vector type: weight = scale * magnitudes[entry] * sign."""

    scale: Tensor  # float32 (N, sub-blocks)
    entries: Tensor  # int16 (N, 32) or (N, 64), rows of `magnitudes`
    signs: Tensor  # uint8 (N, 32); bit i set: weight i of the eight is negative


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """One vector type.

    Args:
        width: weights per index.
        even: whether only 7 sign bits are stored, and the eighth makes the number of negative weights even.
    """

    width: int
    even: bool
    read: Callable[[Tensor], Vectors]
    write: Callable[[Tensor, Tensor, Tensor], None]


def _even(signs: Tensor) -> Tensor:
    """Return uint8: 7 stored sign bits and the eighth (`ksigns_iq2xs`)."""
    parity = signs ^ (signs >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return (signs & 127) | (parity << 7)


def _read_words(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 4-bit scales (N, 8) and signs (N, 32), uint8, of 32-bit words, given as uint8 (N, 8, 4)."""
    words = (stored.long() << torch.arange(0, 32, 8, device=stored.device)).sum(-1, keepdim=True)
    signs = (words >> torch.arange(0, 28, 7, device=stored.device)) & 127
    return (words >> 28).squeeze(-1).to(torch.uint8), _even(signs.to(torch.uint8).flatten(1))


def _with_signs(stored: Tensor, signs: Tensor) -> Tensor:
    """Return words like `stored`, uint8 (N, 8, 4), with the same scales and with `signs`, uint8 (N, 32)."""
    seven = (signs & 127).long().view(-1, 8, 4) << torch.arange(0, 28, 7, device=stored.device)
    words = seven.sum(-1, keepdim=True) | (stored[..., 3:].long() >> 4 << 28)
    return ((words >> torch.arange(0, 32, 8, device=stored.device)) & 255).to(torch.uint8)


def _iq2_xxs_pairs(blocks: Tensor) -> Tensor:
    """Return a view, uint8 (N, 8, 8): 4 bytes of indices, then a word, for every 32 weights."""
    return blocks[:, 2:66].view(-1, 8, 8)


def _read_iq2_xxs(blocks: Tensor) -> Vectors:
    pairs = _iq2_xxs_pairs(blocks)
    scales, signs = _read_words(pairs[..., 4:])
    return Vectors(read_half(blocks, 0) * (scales + 0.5) * 0.25, pairs[..., :4].flatten(1).short(), signs)


def _write_iq2_xxs(blocks: Tensor, entries: Tensor, signs: Tensor) -> None:
    pairs = _iq2_xxs_pairs(blocks)
    pairs[..., 4:] = _with_signs(pairs[..., 4:], signs)
    pairs[..., :4] = entries.to(torch.uint8).view(-1, 8, 4)


_IQ2_XS_SCALES = (Plane(66, 8, 2, 1, 4),)


def _read_iq2_xs(blocks: Tensor) -> Vectors:
    low, high = blocks[:, 2:66:2], blocks[:, 3:66:2]
    scale = read_half(blocks, 0) * (read(blocks, _IQ2_XS_SCALES) + 0.5) * 0.25
    return Vectors(scale, low.short() | ((high & 1).short() << 8), _even(high >> 1))


def _write_iq2_xs(blocks: Tensor, entries: Tensor, signs: Tensor) -> None:
    high = ((signs & 127) << 1) | (entries >> 8).to(torch.uint8)
    blocks[:, 2:66] = torch.stack(((entries & 255).to(torch.uint8), high), -1).flatten(1)


_IQ2_S_SCALES, _IQ2_S_INDEX = (Plane(74, 8, 2, 1, 4),), (Plane(2, 1, 1, 32, 8), Plane(66, 8, 4, 1, 2))


def _read_iq2_s(blocks: Tensor) -> Vectors:
    scale = read_half(blocks, 0) * (read(blocks, _IQ2_S_SCALES) + 0.5) * 0.25
    return Vectors(scale, read(blocks, _IQ2_S_INDEX), blocks[:, 34:66])


def _write_iq2_s(blocks: Tensor, entries: Tensor, signs: Tensor) -> None:
    write(blocks, _IQ2_S_INDEX, entries)
    blocks[:, 34:66] = signs


def _read_iq3_xxs(blocks: Tensor) -> Vectors:
    scales, signs = _read_words(blocks[:, 66:98].view(-1, 8, 4))
    return Vectors(read_half(blocks, 0) * (scales + 0.5) * 0.5, blocks[:, 2:66].short(), signs)


def _write_iq3_xxs(blocks: Tensor, entries: Tensor, signs: Tensor) -> None:
    words = blocks[:, 66:98].view(-1, 8, 4)
    words.copy_(_with_signs(words, signs))
    blocks[:, 2:66] = entries.to(torch.uint8)


_IQ3_S_SCALES, _IQ3_S_INDEX = (Plane(106, 4, 2, 1, 4),), (Plane(2, 1, 1, 64, 8), Plane(66, 8, 8, 1, 1))


def _read_iq3_s(blocks: Tensor) -> Vectors:
    scale = read_half(blocks, 0) * (1 + 2 * read(blocks, _IQ3_S_SCALES))
    return Vectors(scale, read(blocks, _IQ3_S_INDEX), blocks[:, 74:106])


def _write_iq3_s(blocks: Tensor, entries: Tensor, signs: Tensor) -> None:
    write(blocks, _IQ3_S_INDEX, entries)
    blocks[:, 74:106] = signs


VECTOR_LAYOUTS: dict[str, VectorLayout] = {
    "IQ2_XXS": VectorLayout(8, True, _read_iq2_xxs, _write_iq2_xxs),
    "IQ2_XS": VectorLayout(8, True, _read_iq2_xs, _write_iq2_xs),
    "IQ2_S": VectorLayout(8, False, _read_iq2_s, _write_iq2_s),
    "IQ3_XXS": VectorLayout(4, True, _read_iq3_xxs, _write_iq3_xxs),
    "IQ3_S": VectorLayout(4, False, _read_iq3_s, _write_iq3_s),
}


def magnitudes(qtype: str, device: torch.device) -> Tensor:
    """Return float32 (entries, width): the vectors that the indices of `qtype` choose from."""
    tables = gguf_quants(qtype)
    tables.init_grid()
    return torch.from_numpy(tables.grid).flatten(0, 2).to(device)  # pyright: ignore[reportUnknownMemberType]
