"""The storage formats of quantised linear weights: what is stored, in which dtype, with which scales.

A format is named by the word that ComfyUI's `comfy_quant` marker uses; `float8_e4m3fn_rowwise` and `svdquant_w4a4` are words of
converters, which ComfyUI 0.30.0 does not read. Dtypes are the names of the safetensors header.
Symbols: O output features, I input features of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_DTYPES = ("F32", "F16", "BF16")
FP8_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """One way to store the weight of a linear layer.

    Args:
        name: the format's word in a `comfy_quant` marker.
        title: the format's name for people.
        weight_dtype: dtype of the stored weight, shape (O, I / packing).
        packing: weights per stored element along I (2 for 4-bit formats).
        group_size: weights along I that share one block scale; 0 where the scale is per tensor or per row.
        scale_dtypes: allowed dtypes of `weight_scale`.
        global_scale: True when the format needs `weight_scale_2` (one fp32 number for the tensor).
        scale_per_row: True when `weight_scale` may hold one number per output row.
    """

    name: str
    title: str
    weight_dtype: str
    packing: int = 1
    group_size: int = 0
    scale_dtypes: tuple[str, ...] = FLOAT_DTYPES
    global_scale: bool = False
    scale_per_row: bool = False

    def logical_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return (O, I) for a stored weight shape (O, I / packing)."""
        return (*stored[:-1], stored[-1] * self.packing) if stored else stored

    def scale_sizes(self, shape: tuple[int, int]) -> set[int]:
        """Return the numbers of elements that `weight_scale` may have for a weight of logical shape (O, I).

        Block scales may be padded to the 128 x 4 tiles of the tensor-core layout (comfy-kitchen, `to_blocked`).
        """
        rows, columns = shape
        if self.group_size:
            groups = -(-columns // self.group_size)
            return {rows * groups, (-(-rows // 128) * 128) * (-(-groups // 4) * 4)}
        return {1, rows} if self.scale_per_row else {1}


FORMATS: dict[str, StorageFormat] = {
    f.name: f
    for f in (
        StorageFormat("float8_e4m3fn", "scaled FP8 (E4M3)", "F8_E4M3"),
        StorageFormat("float8_e5m2", "scaled FP8 (E5M2)", "F8_E5M2"),
        StorageFormat("float8_e4m3fn_rowwise", "row-wise FP8 (E4M3)", "F8_E4M3", scale_per_row=True),
        StorageFormat(
            "nvfp4", "NVFP4", "U8", packing=2, group_size=16, scale_dtypes=("F8_E4M3", "U8"), global_scale=True
        ),
        StorageFormat("mxfp8", "MXFP8", "F8_E4M3", group_size=32, scale_dtypes=("F8_E8M0", "U8")),
        StorageFormat("int8_tensorwise", "INT8", "I8", scale_per_row=True),
        StorageFormat("convrot_w4a4", "ConvRot W4A4", "I8", packing=2, scale_per_row=True),
        StorageFormat("svdquant_w4a4", "SVDQuant W4A4", "I8", packing=2, group_size=64),
    )
}
