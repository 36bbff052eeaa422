"""Legacy and K-quant blocks to float32 in plain torch: the definition of correct for these types.

Formulas: `dequantize_row_*` of llama.cpp's `ggml-quants.c`, in the order of operations of gguf-py's `quants.py`, whose results
these functions equal bit for bit. Symbols: N blocks. Every decoder takes (N, type_size) uint8 and returns (N, block_size)
float32 on the same device. Bytes are unpacked as uint8, so that temporaries stay small next to the float32 result.
"""

from __future__ import annotations

import torch


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes (N, A, B) uint8 into fields of `bits` bits, lowest first: (N, A, 8 / bits, B) uint8."""
    # arange and not tensor([...]): the latter would copy from the host, and wait for the GPU, on each call.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts[:, None]) & ((1 << bits) - 1)


def words(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes start..stop of each block read as little-endian `dtype`: (N, (stop - start) / itemsize)."""
    # clone and not contiguous(): the slice of a single block is contiguous already, but can lie at an odd address.
    return blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype)


def half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the fp16 number at byte `start` of each block: (N, 1) float32."""
    return words(blocks, start, start + 2, torch.float16).float()


def _nibbles_32(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the (N, 32) uint8 nibbles of 16 bytes: all low ones, then all high ones."""
    return unpack(blocks[:, None, start : start + 16], 4).reshape(-1, 32)


def _fifth_bits_32(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the (N, 32) uint8 bits of 4 bytes, moved to bit 4."""
    return unpack(blocks[:, start : start + 4, None], 1).reshape(-1, 32) << 4


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 16 bytes of nibbles; d * (q - 8)."""
    return half(blocks, 0) * (_nibbles_32(blocks, 2).float() - 8)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """d, m fp16, 16 bytes of nibbles; d * q + m."""
    return half(blocks, 0) * _nibbles_32(blocks, 4).float() + half(blocks, 2)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 4 bytes of fifth bits, 16 bytes of nibbles; d * (q - 16)."""
    q = _nibbles_32(blocks, 6) | _fifth_bits_32(blocks, 2)
    return half(blocks, 0) * (q.float() - 16)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """d, m fp16, 4 bytes of fifth bits, 16 bytes of nibbles; d * q + m."""
    q = _nibbles_32(blocks, 8) | _fifth_bits_32(blocks, 4)
    return half(blocks, 0) * q.float() + half(blocks, 2)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """d fp16, 32 int8; d * q."""
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 bytes of (scale, min) nibbles, 64 bytes of 2-bit q, d, dmin fp16; d * scale * q - dmin * min."""
    scales = (half(blocks, 80) * (blocks[:, :16] & 0x0F).float()).unsqueeze(-1)
    minima = (half(blocks, 82) * (blocks[:, :16] >> 4).float()).unsqueeze(-1)
    q = unpack(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return (scales * q.float() - minima).reshape(-1, 256)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """32 bytes of third bits, 64 bytes of 2-bit q, 12 bytes of 6-bit scales, d fp16; d * (scale - 32) * (q - 4 where unset)."""
    low = unpack(blocks[:, None, 96:104], 4).reshape(-1, 16)
    high = unpack(blocks[:, None, 104:108], 2).reshape(-1, 16)
    scales = half(blocks, 108) * ((low | (high << 4)).float() - 32)
    q = unpack(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    third = unpack(blocks[:, None, :32], 1).reshape(-1, 16, 16) << 2
    return (scales.unsqueeze(-1) * ((q | third).float() - 4)).reshape(-1, 256)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the 12 bytes at byte 4 of Q4_K and Q5_K into 8 scales and 8 minima of 6 bits: two (N, 8) uint8."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)], dim=-1)
    minima = torch.cat([second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)], dim=-1)
    return scales, minima


def _with_minima(blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return d * scale * q - dmin * min for Q4_K and Q5_K, q (N, 8, 32) uint8: (N, 256) float32."""
    scales, minima = _scales_and_minima(blocks)
    d = (half(blocks, 0) * scales.float()).unsqueeze(-1)
    m = (half(blocks, 2) * minima.float()).unsqueeze(-1)
    return (d * q.float() - m).reshape(-1, 256)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """d, dmin fp16, 12 bytes of scales and minima, 128 bytes of nibbles."""
    return _with_minima(blocks, unpack(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """d, dmin fp16, 12 bytes of scales and minima, 32 bytes of fifth bits, 128 bytes of nibbles."""
    low = unpack(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    high = unpack(blocks[:, None, 16:48], 1).reshape(-1, 8, 32)
    return _with_minima(blocks, low | (high << 4))


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """128 bytes of nibbles, 64 bytes of high 2 bits, 16 int8 scales, d fp16; d * scale * (q - 32)."""
    low = unpack(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 8, 32)
    high = unpack(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    q = (low | (high << 4)).reshape(-1, 16, 16).float() - 32
    return (scales.unsqueeze(-1) * q).reshape(-1, 256)
