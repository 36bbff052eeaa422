"""Read the header of a GGUF file: key-value data and tensor descriptions, without the tensors.

Written after the GGUF specification (ggml, docs/gguf.md). `gguf.GGUFReader` is not used here: it never returns from a file
with a forged array length, and takes 10 s for a vocabulary of 131,072 tokens.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels.gguf.qtypes import PLAIN, QTYPES, QTYPES_BY_ID

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_NAME_BYTES = 1024
_MAX_STRING_BYTES = 64 * 1024 * 1024
# Far above real files; a forged count stops here instead of running for hours.
_MAX_ENTRIES = 1 << 16
_MAX_ARRAY = 1 << 22
_MAX_DIMS = 4
_MAX_SIZE = 1 << 40

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class GGUFError(ValueError):
    """The file is no complete GGUF file. The message says why, as the second half of a sentence."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: its type ("F32", "Q4_K", ...), its shape in torch's order, and where its bytes are in the file.

    `row` is the number of weights in one stored row; a converter may have flattened the tensor to store it.
    """

    dtype: str
    shape: tuple[int, ...]
    row: int
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file.

    Args:
        fields: key -> number, bool, text, or list of these.
        tensors: name -> GGUFTensor.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str | None:
        """What the file says in `general.architecture`: only a hint, as converters write what they please."""
        value = self.fields.get("general.architecture")
        return value if isinstance(value, str) else None


def read_header(file: Path) -> GGUFHeader:
    """Read and check a header.

    Raises:
        GGUFError: the file is damaged, incomplete, or of a kind that is not read.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        try:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # mmap's word for an empty file
            raise GGUFError("the file is empty. Download it again.") from error
        with mapped:
            return _Reader(mapped).header()


class _Reader:
    """A cursor over the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._bytes(4) != MAGIC:
            raise GGUFError("not a GGUF file. Download it again, or choose another file.")
        version = self._number("I")
        if version not in _VERSIONS:
            raise GGUFError(
                f"GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} in little-endian order are read. "
                "Convert the file again with a current tool."
            )
        tensor_count, field_count = self._count(_MAX_ENTRIES, "tensors"), self._count(_MAX_ENTRIES, "fields")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._string(_MAX_NAME_BYTES)
            fields[name] = self._value(self._number("I"))
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise GGUFError(f"general.alignment is {alignment!r:.40}; a power of two is needed. Download the file again.")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, ggml_id, shape, offset in described:
            if name in tensors:
                raise GGUFError(f"tensor '{name}' is there twice. Download the file again.")
            tensors[name] = self._placed(name, ggml_id, _original_shape(fields, name, shape), shape, start + offset)
        return GGUFHeader(fields, tensors)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string(_MAX_NAME_BYTES)
        dims = self._number("I")
        if dims > _MAX_DIMS:
            raise GGUFError(f"tensor '{name}' has {dims} dimensions; at most {_MAX_DIMS} are read. Download the file again.")
        shape = tuple(reversed([self._number("Q") for _ in range(dims)]))
        if any(not 1 <= size < _MAX_SIZE for size in shape) or math.prod(shape) >= _MAX_SIZE:
            raise GGUFError(f"tensor '{name}' has the shape {list(shape)}. The file is damaged; download it again.")
        return name, self._number("I"), shape, self._number("Q")

    def _placed(
        self, name: str, ggml_id: int, shape: tuple[int, ...], stored: tuple[int, ...], offset: int
    ) -> GGUFTensor:
        """Return a tensor with its size. Raises GGUFError when its type is not read or it ends behind the file's end."""
        if ggml_id in PLAIN:
            dtype = PLAIN[ggml_id]
            size = math.prod(stored) * _PLAIN_BYTES[dtype]
        else:
            qtype = QTYPES_BY_ID.get(ggml_id)
            if qtype is None:
                known = ", ".join((*PLAIN.values(), *QTYPES))
                raise GGUFError(
                    f"tensor '{name}' has the GGUF type {_type_name(ggml_id)}; known are {known}. Use a file in one of these."
                )
            dtype = qtype.name
            if not stored or stored[-1] % qtype.block_size:
                raise GGUFError(
                    f"tensor '{name}' is {dtype} with the shape {list(stored)}; its rows must be multiples of "
                    f"{qtype.block_size}. The file is damaged; download it again."
                )
            if len(shape) == 2 and shape[-1] != stored[-1]:
                raise GGUFError(
                    f"tensor '{name}' is {dtype} in rows of {stored[-1]}, but the file says that its shape was {list(shape)}. "
                    "The file is damaged; download it again."
                )
            size = math.prod(stored[:-1]) * qtype.row_bytes(stored[-1])
        if offset + size > self._size:
            raise GGUFError(
                f"the file is incomplete: {self._size:,} bytes, but tensor '{name}' ends at {offset + size:,}. "
                "The download was interrupted; download it again."
            )
        return GGUFTensor(dtype, shape, stored[-1] if stored else 1, offset, size)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string(_MAX_STRING_BYTES)
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise GGUFError(f"a field has the unknown type {kind}. The file is damaged; download it again.")
        item, count = self._number("I"), self._count(_MAX_ARRAY, "items of an array")
        if item == _STRING:
            return self._texts(count)
        if item not in _SCALARS:
            raise GGUFError(f"an array has items of type {item}, which is not read. Download the file again.")
        layout = f"<{count}{_SCALARS[item]}"
        return list(struct.unpack(layout, self._bytes(struct.calcsize(layout))))

    def _texts(self, count: int) -> list[str]:
        """Read an array of texts as `_string` does, in half the time: a vocabulary has 400,000 of them."""
        data, at, size = self._data, self._at, self._size
        length_at = struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            start = at + 8
            length = length_at(data, at)[0] if start <= size else size
            at = start + length
            if length > _MAX_STRING_BYTES or at > size:
                self._at = start - 8
                self._string(_MAX_STRING_BYTES)  # raises with the reason
            out.append(data[start:at].decode("utf-8", "replace"))
        self._at = at
        return out

    def _string(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise GGUFError(f"a text of {length:,} bytes where at most {limit:,} are read. The file is damaged; download it again.")
        return self._bytes(length).decode("utf-8", "replace")

    def _count(self, limit: int, what: str) -> int:
        count = self._number("Q")
        if count > limit:
            raise GGUFError(f"{count:,} {what}; at most {limit:,} are read. The file is damaged; download it again.")
        return count

    def _number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._bytes(struct.calcsize("<" + letter)))[0]

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise GGUFError(
                f"the file is incomplete: its header does not end within its {self._size:,} bytes. "
                "The download was interrupted; download it again."
            )
        data = self._data[self._at : end]
        self._at = end
        return data


def _original_shape(fields: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape before a converter flattened it, where it wrote that down (`comfy.gguf.orig_shape.<name>`)."""
    original = fields.get(f"comfy.gguf.orig_shape.{name}")
    if not isinstance(original, list) or not 1 <= len(original) <= 8:
        return shape
    if any(type(size) is not int or size < 1 for size in original) or math.prod(original) != math.prod(shape):
        raise GGUFError(f"tensor '{name}' has the shape {list(shape)}, but the file says it was {original}. Download it again.")
    return tuple(original)


def _type_name(ggml_id: int) -> str:
    import gguf  # at a fault only: it is slow to import

    try:
        return f"{gguf.GGMLQuantizationType(ggml_id).name} ({ggml_id})"
    except ValueError:
        return str(ggml_id)
