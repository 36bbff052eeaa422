"""Open a safetensors file, a folder of shards, or a GGUF file, and describe its tensors without reading them.

The `safetensors` library reads and checks every header of its own; this module finds the files that belong together and turns
each way in which a file can be broken into one sentence for the user.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

from .gguf_file import SUFFIX as GGUF_SUFFIX
from .gguf_file import GGUFError, GGUFHeader, read_header

logger = logging.getLogger("ernie_fast")

SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
SUFFIXES = (*SAFETENSORS_SUFFIXES, GGUF_SUFFIX)
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
_MAX_JSON_BYTES = 64 * 1024 * 1024


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file, what was found, and what to do."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it: dtype name (safetensors' or GGUF's), shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def numel(self) -> int:
        """Number of elements; stored ones for safetensors, weights for GGUF."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its files, the tensors of all of them, and what is written beside them.

    Args:
        path: the file or folder that was opened.
        label: the name used in messages (what the user chose, not a full path).
        files: the files, in shard order.
        tensors: name -> TensorInfo over all files.
        metadata: the `__metadata__` strings of the headers, merged.
        config: the folder's `config.json`, or {} when there is none.
        gguf: the header of a GGUF file; None for safetensors.
    """

    path: Path
    label: str
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    config: Mapping[str, Any]
    gguf: GGUFHeader | None = None

    @property
    def size_bytes(self) -> int:
        """Size of all files on disk, in bytes."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """A text that changes when a file is replaced: path, size and modification time of each."""
        parts = []
        for file in self.files:
            stat = file.stat()
            parts.append(f"{file}|{stat.st_size}|{stat.st_mtime_ns}")
        return "\n".join(parts)


def shard_set(name: str) -> str | None:
    """Return the name of the shard set that a file name belongs to ('x-00001-of-00002.safetensors' -> 'x'), or None."""
    match = _SHARD.match(name)
    return match["stem"] if match else None


def open_checkpoint(path: Path, label: str | None = None) -> Checkpoint:
    """Open one file, one shard of a set, or a folder that holds either.

    Args:
        path: a `.safetensors` or `.gguf` file, or a folder of safetensors files.
        label: the name for messages; default: the file's or folder's name.

    Raises: CheckpointError when nothing is there, a shard is missing, or a header does not fit its file.
    """
    label = label or path.name
    try:
        if path.suffix.lower() == GGUF_SUFFIX and path.is_file():
            return _open_gguf(path, label)
        files = _files_of(path, label)
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        for file in files:
            for name, info in _read_header(file, label, metadata).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{label}: tensor '{name}' is in two shards, {tensors[name].file.name} and {file.name}. "
                        "Two downloads are mixed in this folder; download it again into an empty one."
                    )
                tensors[name] = info
        _check_index(files, tensors, label)
        return Checkpoint(path, label, tuple(files), tensors, metadata, _read_config(files[0].parent, label))
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}. Check the file and its rights.") from error


def _open_gguf(path: Path, label: str) -> Checkpoint:
    try:
        header = read_header(path)
    except GGUFError as error:
        raise CheckpointError(f"{label}: {_disguise(path) or error}") from error
    if header.fields.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{label}: one of {header.fields['split.count']} parts of a split GGUF file, which are not read. "
            "Join them with llama.cpp's gguf-split --merge, or download the file in one part."
        )
    tensors = {name: TensorInfo(t.dtype, t.shape, path) for name, t in header.tensors.items()}
    return Checkpoint(path, label, (path,), tensors, {}, _read_config(path.parent, label), header)


def _files_of(path: Path, label: str) -> list[Path]:
    if path.is_dir():
        return _files_of_folder(path, label)
    if not path.exists():
        raise CheckpointError(f"{label}: no such file. Press R in ComfyUI to refresh the list of files.")
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{label}: {path.suffix} files can run code when opened and are not read. Use a .safetensors file."
        )
    if path.suffix.lower() not in SAFETENSORS_SUFFIXES:
        raise CheckpointError(f"{label}: a file of type '{path.suffix}'; a .safetensors or .gguf file, or a folder, is needed.")
    if shard_set(path.name):
        return _shards(path.parent, path.name, label)
    return [path]


def _files_of_folder(folder: Path, label: str) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SAFETENSORS_SUFFIXES and p.is_file())
    if not found:
        raise CheckpointError(f"{label}: the folder holds no .safetensors file. Choose the folder that holds the weights.")
    sets = {shard_set(p.name) for p in found}
    if len(found) > 1 and (len(sets) > 1 or None in sets):
        names = ", ".join(p.name for p in found[:4])
        raise CheckpointError(f"{label}: the folder holds several models ({names}). Choose one file.")
    return _shards(folder, found[0].name, label) if None not in sets else found


def _shards(folder: Path, one: str, label: str) -> list[Path]:
    match = _SHARD.match(one)
    if match is None:
        raise CheckpointError(f"{label}: '{one}' is not the name of a shard.")
    count = int(match["count"])
    present = [p for p in folder.iterdir() if (m := _SHARD.match(p.name)) and (m["stem"], m["count"]) == (match["stem"], match["count"])]
    numbers = {int(m["number"]) for p in present if (m := _SHARD.match(p.name))}
    # Compared by size first: a hostile name may claim 99,999 shards.
    if len(numbers) != count or numbers != set(range(1, count + 1)):
        missing = [n for n in range(1, count + 1) if n not in numbers][:5]
        raise CheckpointError(
            f"{label}: {len(numbers)} of {count} shards found; missing number {', '.join(map(str, missing)) or 'unknown'}. "
            "Download the rest into the same folder."
        )
    return sorted(present)


def _read_header(file: Path, label: str, metadata: dict[str, str]) -> dict[str, TensorInfo]:
    where = label if file.name == label.rsplit("/", 1)[-1] else f"{label}: {file.name}"
    try:
        with safetensors.safe_open(str(file), framework="pt") as opened:
            metadata.update(opened.metadata() or {})
            out: dict[str, TensorInfo] = {}
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                view = opened.get_slice(name)
                out[name] = TensorInfo(str(view.get_dtype()), tuple(view.get_shape()), file)
            return out
    except FileNotFoundError as error:
        raise CheckpointError(f"{where}: no such file. Press R in ComfyUI to refresh the list of files.") from error
    except (safetensors.SafetensorError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: {_why_broken(file, error)}") from error


def _why_broken(file: Path, error: Exception) -> str:
    """Say in plain words why a file is no complete safetensors file."""
    disguise = _disguise(file)
    if disguise:
        return disguise
    size = file.stat().st_size
    expected = _expected_size(file)
    if expected is not None and expected > size:
        return (
            f"the file is incomplete: {size:,} bytes, but its header describes {expected:,}. "
            "The download was interrupted; download it again."
        )
    if expected is not None and expected < size:
        return f"the file is {size:,} bytes, but its header describes {expected:,}. It is damaged; download it again."
    return f"not a safetensors file ({error}). Download it again, or choose another file."


def _disguise(file: Path) -> str | None:
    """Say what a file is whose ending promises another kind, from its first bytes; None when they tell nothing."""
    with file.open("rb") as stream:
        start = stream.read(64)
    suffix = file.suffix.lower()
    if start.startswith(b"version https://git-lfs"):
        return "this is a Git LFS pointer of a few lines, not the model. Download the real file (git lfs pull)."
    if start.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "this is a web page, not a model; the download was redirected. Download the file again."
    if start.startswith(b"GGUF") and suffix != GGUF_SUFFIX:
        return "this is a GGUF file with a wrong ending. Rename it to .gguf."
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return "this is a pickle file with a wrong ending; it can run code and is not read. Use a safetensors file."
    if suffix == GGUF_SUFFIX and start[8:9] == b"{":
        return "this is a safetensors file with a wrong ending. Rename it to .safetensors."
    return None


def _expected_size(file: Path) -> int | None:
    """Return the size in bytes that the header describes, or None when the header cannot be parsed."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_JSON_BYTES:
                return None
            if length + 8 > size:
                return length + 8
            header = json.loads(stream.read(length))
        ends = [info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"]
        total = 8 + length + max(ends, default=0)
    except (struct.error, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return total if isinstance(total, int) else None


def read_json(file: Path, label: str) -> Any:
    """Return the parsed content of a small JSON file. Raises CheckpointError when it is too large or no JSON."""
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{label}: {file.name} has {file.stat().st_size:,} bytes; at most {_MAX_JSON_BYTES:,} are read.")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: {file.name} is not valid JSON ({error}). Download it again.") from error


def _read_config(folder: Path, label: str) -> Mapping[str, Any]:
    """Return the model folder's config.json; {} when there is none or it cannot be read.

    An ordinary models folder may hold a config.json of something else, so a broken one stops nothing.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = read_json(file, label)
    except CheckpointError as error:
        logger.warning("%s It is ignored", error)
        return {}
    return config if isinstance(config, dict) else {}


def _check_index(files: list[Path], tensors: Mapping[str, TensorInfo], label: str) -> None:
    """Compare the tensors with the shard set's index file, where there is one."""
    stem = shard_set(files[0].name)
    index_file = files[0].parent / f"{stem}.safetensors.index.json"
    if stem is None or not index_file.is_file():
        return
    index = read_json(index_file, label)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{label}: {index_file.name} has no 'weight_map'. Download it again or delete it.")
    missing = sorted(str(name) for name in weight_map if name not in tensors)
    if missing:
        raise CheckpointError(
            f"{label}: {len(missing)} tensors of {index_file.name} are in no shard, the first is '{missing[0]}'. "
            "The shards are from another model or incomplete; download the folder again."
        )
