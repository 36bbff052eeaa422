"""The tokenizer from the vocabulary inside a GGUF file.

Nothing is kept on disk: unlike a tekken file, a GGUF file states the merges; building from them is as quick as from a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..model.checkpoint import CheckpointError
from ..model.gguf_file import GGUFError, GGUFHeader, read_header
from .tokenizer import BOS, MAX_TOKEN_BYTES, MAX_TOKENS, TextTokenizer, byte_letters, byte_level_bpe, merges_of

_START = "tokenizer.ggml."
# llama.cpp's word for byte-level BPE.
_MODEL = "gpt2"
# llama.cpp's token types: unknown, control, and user-defined ones stand for themselves in a text; unused ones for nothing.
_NORMAL_TYPE, _SPECIAL_TYPES, _UNUSED_TYPE = 1, (2, 3, 4), 5
# The split in the tekken.json of Ministral-3. A GGUF file only names one, and the names vary for the same vocabulary: 'tekken',
# 'pixtral' after transformers' converter, 'default' in Ollama's files. Which model it is, the tensors say.
_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ADVICE = "Download the file again, or choose a tekken.json or another text encoder as tokenizer in the node."


def has_vocabulary(header: GGUFHeader) -> bool:
    """True when the file holds a vocabulary, whole or not."""
    return f"{_START}tokens" in header.fields


def tokenizer_from_gguf(file: Path, label: str) -> TextTokenizer:
    """Build the tokenizer of a GGUF file.

    Args:
        file: the GGUF file.
        label: the name for messages.

    Raises:
        CheckpointError: the file has no usable vocabulary.
        OSError: the file cannot be read.
    """
    try:
        fields = read_header(file).fields
    except GGUFError as error:
        raise CheckpointError(f"{label}: {error}") from error
    return tokenizer_from_fields(fields, label)


def tokenizer_from_fields(fields: Mapping[str, Any], label: str) -> TextTokenizer:
    """Build the tokenizer from the key-value data of a GGUF file. Raises CheckpointError when it is no usable one."""
    model = fields.get(f"{_START}model")
    if model != _MODEL:
        raise CheckpointError(
            f"{label}: {_START}model is {_show(model)}; '{_MODEL}' is needed, so this is not the vocabulary of Ministral-3. {_ADVICE}"
        )
    tokens, types = _list(fields, "tokens", str, label), _list(fields, "token_type", int, label)
    problem = _problem(fields, tokens, types)
    if problem:
        raise CheckpointError(f"{label}: the vocabulary in the file is damaged: {problem}. {_ADVICE}")
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED_TYPE}
    specials = [token for index, token in enumerate(tokens) if types[index] in _SPECIAL_TYPES]
    merges = _merges(fields, [token for index, token in enumerate(tokens) if types[index] == _NORMAL_TYPE], label)
    try:
        pairs = [(left, right) for left, right in merges]
        tokenizer = byte_level_bpe(vocab, pairs, specials, _PATTERN)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            f"{label}: the vocabulary in the file is damaged: its merges do not fit its tokens ({error!s:.80}). {_ADVICE}"
        ) from error
    return TextTokenizer(tokenizer, vocab, label)


def _list(fields: Mapping[str, Any], name: str, kind: type, label: str) -> list[Any]:
    value = fields.get(_START + name)
    if not isinstance(value, list) or not value or type(value[0]) is not kind:
        needed = "texts" if kind is str else "whole numbers"
        raise CheckpointError(f"{label}: {_START}{name} is {_show(value)}; a list of {needed} is needed. {_ADVICE}")
    return value


def _merges(fields: Mapping[str, Any], normal: list[str], label: str) -> Iterable[Sequence[str]]:
    """Return the pairs of tokens to join; where the file states none, those of a tekken file with these tokens."""
    if f"{_START}merges" in fields:
        return [merge.split(" ") for merge in _list(fields, "merges", str, label)]
    flat = merges_of(normal)
    return zip(flat[::2], flat[1::2], strict=True)


def _problem(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> str | None:
    """Return what is wrong with the parts of a vocabulary, or None."""
    bos = fields.get(f"{_START}bos_token_id")
    if len(tokens) > MAX_TOKENS:
        return f"it has {len(tokens):,} tokens; at most {MAX_TOKENS:,} are read"
    if len(types) != len(tokens):
        return f"it has {len(tokens):,} tokens and {len(types):,} token types"
    known = set(tokens)
    if len(known) != len(tokens):
        return "a token is there twice"
    if not known.issuperset(byte_letters()):
        return "not every single byte is a token, so some text could not be written"
    if max(map(len, tokens)) > MAX_TOKEN_BYTES:
        return f"a token has more than {MAX_TOKEN_BYTES} bytes"
    if bos is not None and (type(bos) is not int or not 0 <= bos < len(tokens)):
        return f"the start token is number {bos!r:.40} of {len(tokens):,}"
    if bos is not None and tokens[bos] != BOS:
        return f"the start token is {tokens[bos]!r:.40}; '{BOS}' is needed"
    return None


def _show(value: Any) -> str:
    if value is None:
        return "missing"
    return repr(value)[:40] if isinstance(value, (str, int, float)) else f"a {type(value).__name__} of another kind"
