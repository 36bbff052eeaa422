"""Where a text encoder's tokenizer comes from: a tensor or the vocabulary in the file, or a file beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import safetensors

from ..model.checkpoint import Checkpoint, CheckpointError
from ..model.gguf_file import SUFFIX as GGUF_SUFFIX
from .gguf_vocabulary import has_vocabulary, tokenizer_from_gguf
from .tokenizer import MAX_TOKENIZER_BYTES, TextTokenizer, tokenizer_from_json, tokenizer_from_tekken

TENSOR = "tekken_model"
FILES = ("tekken.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """One place that holds a tokenizer.

    Args:
        file: a safetensors or GGUF file, a tekken.json or a tokenizer.json.
        tensor: the tensor that holds the tekken data, for a safetensors file.
        label: the name for messages.
        place: the place in words, for the summary: "the file", "tekken.json".
    """

    file: Path
    tensor: str | None
    label: str
    place: str

    def load(self) -> TextTokenizer:
        """Read the tokenizer. Raises CheckpointError when the data cannot be read or is no tokenizer."""
        try:
            if self.file.suffix.lower() == GGUF_SUFFIX:
                return tokenizer_from_gguf(self.file, self.label)
            data = self._read()
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{self.label}: the tokenizer cannot be read ({error}).") from error
        return (
            tokenizer_from_json(data, self.label)
            if self.file.name == "tokenizer.json"
            else tokenizer_from_tekken(data, self.label)
        )

    def _read(self) -> bytes:
        if self.tensor is None:
            self._check_size(self.file.stat().st_size)
            return self.file.read_bytes()
        with safetensors.safe_open(str(self.file), framework="np") as opened:
            view = opened.get_slice(self.tensor)
            if view.get_dtype() != "U8" or len(view.get_shape()) != 1:
                raise CheckpointError(
                    f"{self.label}: '{self.tensor}' is {view.get_dtype()} {list(view.get_shape())}; bytes (U8, one "
                    "dimension) are needed. Choose another tokenizer, such as a tekken.json."
                )
            self._check_size(view.get_shape()[0])
            return opened.get_tensor(self.tensor).tobytes()

    def _check_size(self, size: int) -> None:
        if size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(
                f"{self.label}: the tokenizer has {size:,} bytes; at most {MAX_TOKENIZER_BYTES:,} are read. "
                "Use the tekken.json that belongs to the text encoder."
            )


def file_source(file: Path, label: str) -> TokenizerSource:
    """Return the source for a tekken.json or tokenizer.json."""
    return TokenizerSource(file, None, label, file.name)


def find_tokenizer(checkpoint: Checkpoint) -> TokenizerSource:
    """Find the tokenizer that belongs to a text encoder.

    Looked for in this order: the tensor `tekken_model` in the file (behind any prefix), or a GGUF file's vocabulary;
    tekken.json, then tokenizer.json, in the file's folder, in the folder `tokenizer` beside that, and in the folder above.

    Raises: CheckpointError naming the file to add when there is none.
    """
    gguf = checkpoint.gguf is not None
    if checkpoint.gguf is not None and has_vocabulary(checkpoint.gguf):
        return TokenizerSource(checkpoint.files[0], None, checkpoint.label, "the file")
    tensors = sorted(n for n in checkpoint.tensors if n == TENSOR or n.endswith(f".{TENSOR}"))
    if tensors and not gguf:
        return TokenizerSource(checkpoint.tensors[tensors[0]].file, tensors[0], checkpoint.label, "the file")
    folder = checkpoint.files[0].parent
    for place in (folder, folder.parent / "tokenizer", folder.parent):
        for name in FILES:
            if (place / name).is_file():
                return file_source(place / name, f"{checkpoint.label}: {name}")
    inside = "vocabulary" if gguf else f"tensor '{TENSOR}'"
    raise CheckpointError(
        f"{checkpoint.label}: no tokenizer. The file has no {inside}, and there is no {' or '.join(FILES)} in "
        f"'{folder.name}' or beside it. Put the model's tekken.json into the folder '{folder.name}', or choose a "
        "tokenizer in the node, for example another text encoder file that holds one."
    )
