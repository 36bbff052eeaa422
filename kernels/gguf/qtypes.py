"""The GGUF tensor types that can hold a linear weight: names, ids, and block sizes.

The sizes are those of `gguf.GGML_QUANT_SIZES`; a test compares the two. They are written out here because importing `gguf`
takes longer than ComfyUI's whole start should be delayed by one package.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QType:
    """One GGUF tensor type.

    Args:
        name: the type's name in `gguf.GGMLQuantizationType`.
        ggml_id: its number in a file.
        block_size: weights per block, along the input features.
        type_size: bytes per block.
    """

    name: str
    ggml_id: int
    block_size: int
    type_size: int

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return self.type_size * 8 / self.block_size

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of one row of `columns` weights. Raises ValueError when they are no whole number of blocks."""
        if columns % self.block_size:
            raise ValueError(f"{self.name} stores blocks of {self.block_size} weights; a row of {columns} is no multiple of that")
        return columns // self.block_size * self.type_size

    def columns(self, row_bytes: int) -> int:
        """Return the weights of a row of `row_bytes` bytes. Raises ValueError when they are no whole number of blocks."""
        if row_bytes % self.type_size:
            raise ValueError(f"{self.name} stores blocks of {self.type_size} bytes; a row of {row_bytes} is no multiple of that")
        return row_bytes // self.type_size * self.block_size


# Weights stored as plain numbers: GGUF id -> dtype name of the safetensors header.
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}

QTYPES: dict[str, QType] = {
    q.name: q
    for q in (
        QType("Q4_0", 2, 32, 18),
        QType("Q4_1", 3, 32, 20),
        QType("Q5_0", 6, 32, 22),
        QType("Q5_1", 7, 32, 24),
        QType("Q8_0", 8, 32, 34),
        QType("Q2_K", 10, 256, 84),
        QType("Q3_K", 11, 256, 110),
        QType("Q4_K", 12, 256, 144),
        QType("Q5_K", 13, 256, 176),
        QType("Q6_K", 14, 256, 210),
        QType("IQ2_XXS", 16, 256, 66),
        QType("IQ2_XS", 17, 256, 74),
        QType("IQ3_XXS", 18, 256, 98),
        QType("IQ4_NL", 20, 32, 18),
        QType("IQ3_S", 21, 256, 110),
        QType("IQ2_S", 22, 256, 82),
        QType("IQ4_XS", 23, 256, 136),
    )
}
QTYPES_BY_ID = {q.ggml_id: q for q in QTYPES.values()}
