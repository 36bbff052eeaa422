"""IQ blocks to float32 in plain torch: the definition of correct for these types.

Formulas: `dequantize_row_iq*` of llama.cpp's `ggml-quants.c`; results equal gguf-py's bit for bit. An IQ type stores indices
into a grid of 4 or 8 small numbers, the signs of these, and scales. The grids are gguf-py's. Every product of scale, grid
number and sign fits in float32 without rounding, so signs are applied to the int8 grid numbers, which saves memory.
Symbols: N blocks. Every decoder takes (N, type_size) uint8 and returns (N, block_size) float32 on the same device.
"""

from __future__ import annotations

import functools

import torch

from .eager_k import half, unpack, words

# The types that need a table of numbers, and whose table in gguf-py it is.
TABLES = {
    "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS", "IQ2_S": "IQ2_S", "IQ3_XXS": "IQ3_XXS", "IQ3_S": "IQ3_S",
    "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_NL",
}  # fmt: skip


@functools.cache
def table(name: str, device: torch.device) -> torch.Tensor:
    """Return the numbers that a type's indices stand for, from gguf-py, kept per device.

    Returns:
        int8 of shape (entries, numbers per entry): 8 for IQ2, 4 for IQ3, 1 for IQ4.
    """
    import gguf.quants  # not at module import: it takes longer than the whole package may

    source = getattr(gguf.quants, TABLES[name])
    if hasattr(source, "kvalues"):
        return torch.tensor(source.kvalues, dtype=torch.int8, device=device).unsqueeze(-1)
    source.init_grid()
    return torch.tensor(source.grid[0, 0].tolist(), dtype=torch.int8, device=device)


def _sign_bits(index: torch.Tensor) -> torch.Tensor:
    """Complete 7 stored sign bits by their parity, so that the number of minus signs is even (`ksigns_iq2xs`). uint8."""
    parity = index ^ (index >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    return index | ((parity & 1) << 7)


def _signed(numbers: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Negate numbers (N, A, 8) int8 where the bits of signs (N, A) uint8 are set: (N, A, 8) float32."""
    bits = unpack(signs.unsqueeze(-1), 1).squeeze(-1).view(torch.int8)
    return (numbers * (1 - 2 * bits)).float()


def _signs_and_scales(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the words of IQ2_XXS and IQ3_XXS: 4 x 7 sign bits, lowest first, then a 4-bit scale.

    Args:
        word: (N, 8) int32.

    Returns:
        signs (N, 32) uint8, one byte per 8 weights; scales (N, 8) float32.
    """
    shifts = torch.arange(0, 28, 7, dtype=torch.int32, device=word.device)
    index = ((word.unsqueeze(-1) >> shifts) & 127).to(torch.uint8)
    return _sign_bits(index).reshape(-1, 32), ((word >> 28) & 15).float()


def _grid_values(name: str, index: torch.Tensor, signs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Look up grid numbers, apply signs and scales.

    Args:
        name: type of the grid.
        index: (N, 32) or (N, 64) int32, one per 8 or 4 weights.
        signs: (N, 32) uint8, one per 8 weights.
        scales: (N, 8) or (N, 16) float32, one per 32 or 16 weights.
    """
    numbers = table(name, index.device)[index].reshape(-1, 32, 8)
    values = _signed(numbers, signs).reshape(-1, scales.shape[1], 256 // scales.shape[1])
    return (scales.unsqueeze(-1) * values).reshape(-1, 256)


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, then per 32 weights 4 grid indices and a word of signs and scale; d * (scale + 1/2) / 4 * grid."""
    pairs = blocks[:, 2:].reshape(-1, 8, 8)
    signs, scales = _signs_and_scales(words(blocks, 2, 66, torch.int32).reshape(-1, 8, 2)[..., 1])
    return _grid_values("IQ2_XXS", pairs[..., :4].reshape(-1, 32).int(), signs, half(blocks, 0) * (0.5 + scales) * 0.25)


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, per 8 weights 9 bits of grid index and 7 sign bits, 16 scales of 4 bits; d * (scale + 1/2) / 4 * grid."""
    low, high = blocks[:, 2:66].reshape(-1, 32, 2).unbind(-1)
    scales = unpack(blocks[:, 66:, None], 4).reshape(-1, 16).float()
    index = low.int() | ((high & 1).int() << 8)
    return _grid_values("IQ2_XS", index, _sign_bits(high >> 1), half(blocks, 0) * (0.5 + scales) * 0.25)


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 32 index bytes, 32 sign bytes, 8 bytes of index bits 8 and 9, 16 scales of 4 bits; as IQ2_XS."""
    high = unpack(blocks[:, 66:74, None], 2).reshape(-1, 32)
    scales = unpack(blocks[:, 74:, None], 4).reshape(-1, 16).float()
    index = blocks[:, 2:34].int() | (high.int() << 8)
    return _grid_values("IQ2_S", index, blocks[:, 34:66], half(blocks, 0) * (0.5 + scales) * 0.25)


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 64 grid indices, 8 words of signs and scale; d * (scale + 1/2) / 2 * grid."""
    signs, scales = _signs_and_scales(words(blocks, 66, 98, torch.int32))
    return _grid_values("IQ3_XXS", blocks[:, 2:66].int(), signs, half(blocks, 0) * (0.5 + scales) * 0.5)


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 64 index bytes, 8 bytes of ninth index bits, 32 sign bytes, 8 scales of 4 bits; d * (1 + 2 * scale) * grid."""
    ninth = unpack(blocks[:, 66:74, None], 1).reshape(-1, 64)
    scales = unpack(blocks[:, 106:, None], 4).reshape(-1, 8)
    index = blocks[:, 2:66].int() | (ninth.int() << 8)
    return _grid_values("IQ3_S", index, blocks[:, 74:106], half(blocks, 0) * (1 + 2 * scales).float())


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 16 bytes of nibbles that index the table; d * table[q]."""
    index = unpack(blocks[:, None, 2:], 4).reshape(-1, 32).int()
    return half(blocks, 0) * table("IQ4_NL", blocks.device).squeeze(-1)[index].float()


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 8 scales of 6 bits (2 bytes of high, 4 bytes of low bits), 128 bytes of nibbles; d * (scale - 32) * table[q]."""
    high = unpack(blocks[:, 2:4, None], 2).reshape(-1, 8)
    low = unpack(blocks[:, 4:8, None], 4).reshape(-1, 8)
    scales = half(blocks, 0) * ((low | (high << 4)).float() - 32)
    index = unpack(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32).int()
    return (scales.unsqueeze(-1) * table("IQ4_XS", blocks.device).squeeze(-1)[index].float()).reshape(-1, 256)
