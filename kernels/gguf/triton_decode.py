# Triton reads these functions as a language of its own, which its annotations do not describe.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false
"""Triton functions that decode GGUF blocks to float32, one per type; the bytes and formulas are those of `eager_k`, `eager_iq`.

A *group* is the run of consecutive weights of a block that one row of a tile decodes: 16 weights where a type has a scale per
16 (Q2_K, Q3_K, Q6_K), else 32; so a scale is decoded once per group and thread, and the bytes of a group are contiguous. What is one per group is computed on
(R,) and only then expanded: a load of shape (R, 1) would be repeated for each weight of a thread.

Every function takes the data pointer (uint8, at an even address: all types have an even number of bytes and their 16-bit
fields at even offsets) and group numbers (R,) int32, and returns float32 of shape (R, weights) or, for the grids, of a shape
(R, indices, weights per index) that is the same weights in the same order. Results equal the eager ones bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Weights per group; a type that is not named here has 32.
GROUP_16 = ("Q2_K", "Q3_K", "Q6_K")


@triton.jit
def _byte(pointer: tl.tensor) -> tl.tensor:
    return tl.load(pointer).to(tl.int32)


@triton.jit
def _half(pointer: tl.tensor) -> tl.tensor:
    return tl.load(pointer.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _block(data: tl.tensor, group: tl.tensor, groups: tl.constexpr, type_size: tl.constexpr) -> tl.tensor:
    """Pointers (R,) to the blocks of the groups. 64 bits, because a weight can exceed 2**31 bytes."""
    return data + (group // groups).to(tl.int64) * type_size


@triton.jit
def _nibbles(pointer: tl.tensor) -> tl.tensor:
    """(R, 32) of 16 bytes: all low nibbles, then all high ones."""
    i = tl.arange(0, 32)[None, :]
    return (_byte(pointer[:, None] + i % 16) >> (i // 16 * 4)) & 15


@triton.jit
def _fifth_bits(pointer: tl.tensor) -> tl.tensor:
    """(R, 32) bits of 4 bytes, moved to bit 4."""
    i = tl.arange(0, 32)[None, :]
    return ((_byte(pointer[:, None] + i // 8) >> (i % 8)) & 1) << 4


@triton.jit
def q4_0(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 1, 18)
    return _half(block)[:, None] * (_nibbles(block + 2) - 8).to(tl.float32)


@triton.jit
def q4_1(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 1, 20)
    return _half(block)[:, None] * _nibbles(block + 4).to(tl.float32) + _half(block + 2)[:, None]


@triton.jit
def q5_0(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 1, 22)
    q = _nibbles(block + 6) | _fifth_bits(block + 2)
    return _half(block)[:, None] * (q - 16).to(tl.float32)


@triton.jit
def q5_1(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 1, 24)
    q = _nibbles(block + 8) | _fifth_bits(block + 4)
    return _half(block)[:, None] * q.to(tl.float32) + _half(block + 2)[:, None]


@triton.jit
def q8_0(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 1, 34)
    q = tl.load(block[:, None] + 2 + tl.arange(0, 32)[None, :]).to(tl.int8, bitcast=True)
    return q.to(tl.float32) * _half(block)[:, None]


@triton.jit
def q2_k(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 16, 84)
    g = group % 16
    q = _byte((block + 16 + g // 8 * 32 + g % 2 * 16)[:, None] + tl.arange(0, 16)[None, :])
    q = (q >> (g % 8 // 2 * 2)[:, None]) & 3
    packed = _byte(block + g)
    scale = _half(block + 80) * (packed & 15).to(tl.float32)
    minimum = _half(block + 82) * (packed >> 4).to(tl.float32)
    return scale[:, None] * q.to(tl.float32) - minimum[:, None]


@triton.jit
def q3_k(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 16, 110)
    g = group % 16
    byte = (block + g % 2 * 16)[:, None] + tl.arange(0, 16)[None, :]
    q = (_byte(byte + (32 + g // 8 * 32)[:, None]) >> (g % 8 // 2 * 2)[:, None]) & 3
    third = (_byte(byte) >> (g // 2)[:, None]) & 1
    low = (_byte(block + 96 + g % 8) >> (g // 8 * 4)) & 15
    high = (_byte(block + 104 + g % 4) >> (g // 4 * 2)) & 3
    scale = _half(block + 108) * ((low | (high << 4)) - 32).to(tl.float32)
    return scale[:, None] * ((q | (third << 2)) - 4).to(tl.float32)


@triton.jit
def _with_minimum(block: tl.tensor, g: tl.tensor, q: tl.tensor) -> tl.tensor:
    """d * scale * q - dmin * minimum of Q4_K and Q5_K."""
    first = _byte(block + 4 + g % 4)
    second = _byte(block + 8 + g % 4)
    rest = _byte(block + 12 + g % 4)
    scale = tl.where(g < 4, first & 63, (rest & 15) | ((first >> 2) & 48))
    minimum = tl.where(g < 4, second & 63, (rest >> 4) | ((second >> 2) & 48))
    scale = _half(block) * scale.to(tl.float32)
    minimum = _half(block + 2) * minimum.to(tl.float32)
    return scale[:, None] * q.to(tl.float32) - minimum[:, None]


@triton.jit
def q4_k(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 144)
    g = group % 8
    q = _byte((block + 16 + g // 2 * 32)[:, None] + tl.arange(0, 32)[None, :])
    return _with_minimum(block, g, (q >> (g % 2 * 4)[:, None]) & 15)


@triton.jit
def q5_k(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 176)
    g = group % 8
    i = tl.arange(0, 32)[None, :]
    low = (_byte((block + 48 + g // 2 * 32)[:, None] + i) >> (g % 2 * 4)[:, None]) & 15
    fifth = (_byte((block + 16)[:, None] + i) >> g[:, None]) & 1
    return _with_minimum(block, g, low | (fifth << 4))


@triton.jit
def q6_k(data: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 16, 210)
    g = group % 16
    i = tl.arange(0, 16)[None, :]
    low = _byte((block + g // 8 * 64 + g % 4 * 16)[:, None] + i)
    high = _byte((block + 128 + g // 8 * 32 + g % 2 * 16)[:, None] + i)
    q = ((low >> (g % 8 // 4 * 4)[:, None]) & 15) | (((high >> (g % 8 // 2 * 2)[:, None]) & 3) << 4)
    scale = _half(block + 208) * tl.load(block + 192 + g).to(tl.int8, bitcast=True).to(tl.float32)
    return scale[:, None] * (q - 32).to(tl.float32)


@triton.jit
def _word(pointer: tl.tensor) -> tl.tensor:
    """32 bits at an even address."""
    halves = pointer.to(tl.pointer_type(tl.uint16))
    return tl.load(halves).to(tl.uint32) | (tl.load(halves + 1).to(tl.uint32) << 16)


@triton.jit
def _sign_bits(index: tl.tensor) -> tl.tensor:
    """Complete 7 stored sign bits by their parity."""
    parity = index ^ (index >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    return index | ((parity & 1) << 7)


@triton.jit
def _grid_8(table: tl.tensor, index: tl.tensor, signs: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Grid numbers (R, 4, 8) with signs and scale, all of which are (R, 4)."""
    v = tl.arange(0, 8)[None, None, :]
    number = scale[:, :, None] * tl.load(table + (index * 8)[:, :, None] + v).to(tl.float32)
    return tl.where(((signs[:, :, None] >> v) & 1) != 0, -number, number)


@triton.jit
def _grid_4(table: tl.tensor, index: tl.tensor, signs: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Grid numbers (R, 8, 4) with signs and scale: index and the signs of its 4 weights (R, 8), scale (R,)."""
    v = tl.arange(0, 4)[None, None, :]
    number = scale[:, None, None] * tl.load(table + (index * 4)[:, :, None] + v).to(tl.float32)
    return tl.where(((signs[:, :, None] >> v) & 1) != 0, -number, number)


@triton.jit
def iq2_xxs(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 66)
    pair = block + 2 + group % 8 * 8
    i = tl.arange(0, 4)[None, :]
    word = _word(pair + 4)
    signs = _sign_bits(((word[:, None] >> (i * 7)) & 127).to(tl.int32))
    scale = _half(block) * (0.5 + (word >> 28).to(tl.float32)) * 0.25
    return _grid_8(table, _byte(pair[:, None] + i), signs, scale[:, None])


@triton.jit
def _half_group_scales(block: tl.tensor, pointer: tl.tensor) -> tl.tensor:
    """(R, 4) scales of IQ2_XS and IQ2_S from a byte with two nibbles, one per 16 weights."""
    nibble = (_byte(pointer)[:, None] >> (tl.arange(0, 4)[None, :] // 2 * 4)) & 15
    return _half(block)[:, None] * (0.5 + nibble.to(tl.float32)) * 0.25


@triton.jit
def iq2_xs(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 74)
    g = group % 8
    entry = (block + 2 + g * 8)[:, None] + tl.arange(0, 4)[None, :] * 2
    high = _byte(entry + 1)
    scale = _half_group_scales(block, block + 66 + g)
    return _grid_8(table, _byte(entry) | ((high & 1) << 8), _sign_bits(high >> 1), scale)


@triton.jit
def iq2_s(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 82)
    g = group % 8
    i = tl.arange(0, 4)[None, :]
    entry = (block + 2 + g * 4)[:, None] + i
    high = (_byte(block + 66 + g)[:, None] >> (i * 2)) & 3
    scale = _half_group_scales(block, block + 74 + g)
    return _grid_8(table, _byte(entry) | (high << 8), _byte(entry + 32), scale)


@triton.jit
def iq3_xxs(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 98)
    g = group % 8
    i = tl.arange(0, 8)[None, :]
    word = _word(block + 66 + g * 4)
    signs = _sign_bits(((word[:, None] >> (i // 2 * 7)) & 127).to(tl.int32))
    scale = _half(block) * (0.5 + (word >> 28).to(tl.float32)) * 0.5
    return _grid_4(table, _byte((block + 2 + g * 8)[:, None] + i), signs >> (i % 2 * 4), scale)


@triton.jit
def iq3_s(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 110)
    g = group % 8
    i = tl.arange(0, 8)[None, :]
    ninth = (_byte(block + 66 + g)[:, None] >> i) & 1
    signs = _byte((block + 74 + g * 4)[:, None] + i // 2) >> (i % 2 * 4)
    scale = _half(block) * (1 + 2 * ((_byte(block + 106 + g // 2) >> (g % 2 * 4)) & 15)).to(tl.float32)
    return _grid_4(table, _byte((block + 2 + g * 8)[:, None] + i) | (ninth << 8), signs, scale)


@triton.jit
def iq4_nl(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 1, 18)
    return _half(block)[:, None] * tl.load(table + _nibbles(block + 2)).to(tl.float32)


@triton.jit
def iq4_xs(data: tl.tensor, table: tl.tensor, group: tl.tensor) -> tl.tensor:
    block = _block(data, group, 8, 136)
    g = group % 8
    high = (_byte(block + 2 + g // 4) >> (g % 4 * 2)) & 3
    low = (_byte(block + 4 + g // 2) >> (g % 2 * 4)) & 15
    scale = _half(block) * ((low | (high << 4)) - 32).to(tl.float32)
    return scale[:, None] * tl.load(table + _nibbles(block + 8 + g * 16)).to(tl.float32)


@triton.jit
def decode(data: tl.tensor, table: tl.tensor, group: tl.tensor, qtype: tl.constexpr) -> tl.tensor:
    """Decode groups (R,) of type `qtype`; table: the type's numbers, int8, unused by the Q types."""
    if qtype == "Q4_0":
        values = q4_0(data, group)
    elif qtype == "Q4_1":
        values = q4_1(data, group)
    elif qtype == "Q5_0":
        values = q5_0(data, group)
    elif qtype == "Q5_1":
        values = q5_1(data, group)
    elif qtype == "Q8_0":
        values = q8_0(data, group)
    elif qtype == "Q2_K":
        values = q2_k(data, group)
    elif qtype == "Q3_K":
        values = q3_k(data, group)
    elif qtype == "Q4_K":
        values = q4_k(data, group)
    elif qtype == "Q5_K":
        values = q5_k(data, group)
    elif qtype == "Q6_K":
        values = q6_k(data, group)
    elif qtype == "IQ2_XXS":
        values = iq2_xxs(data, table, group)
    elif qtype == "IQ2_XS":
        values = iq2_xs(data, table, group)
    elif qtype == "IQ2_S":
        values = iq2_s(data, table, group)
    elif qtype == "IQ3_XXS":
        values = iq3_xxs(data, table, group)
    elif qtype == "IQ3_S":
        values = iq3_s(data, table, group)
    elif qtype == "IQ4_NL":
        values = iq4_nl(data, table, group)
    else:
        tl.static_assert(qtype == "IQ4_XS")
        values = iq4_xs(data, table, group)
    return values
