"""The Mistral tokenizer, built from a `tekken` description without transformers, and kept on disk once built.

ComfyUI builds it through transformers, whose converter changes between versions and takes 15 s for the full vocabulary.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ..model.checkpoint import CheckpointError

logger = logging.getLogger("ernie_fast")

BOS = "<s>"
PAD = "<pad>"
CACHE_FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
# Part of the cached file's name: raise it when the tokenizer built from the same data changes.
_BUILD = b"1"
MAX_TOKENS = 1 << 20
# Bounds the work per token, which grows with the square of its length; published vocabularies stay far below.
MAX_TOKEN_BYTES = 1024
# What the published tekken files state; used where a converter left the field out.
_DEFAULT_VOCAB_SIZE = 131072
# The pre-split of transformers' converter, used where the file has no pattern of its own.
_DEFAULT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TextTokenizer:
    """A tokenizer with the few methods that ComfyUI's text encoders call.

    Args:
        tokenizer: the token model; what it adds around a text by itself is not used.
        vocab: token text -> id, special tokens included.
        label: the name for messages.
        tekken: the data it was built from, for saving; None when it came in another format.

    Raises: CheckpointError when the vocabulary has no start token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: dict[str, int], label: str, tekken: bytes | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self.tekken = tekken
        if BOS not in self._vocab:
            raise CheckpointError(
                f"{label}: the tokenizer has no start token '{BOS}', so it is not the one of Ministral-3. "
                "Use the tekken.json or tokenizer.json that belongs to the text encoder."
            )
        self.bos_id = self._vocab[BOS]
        self.pad_id = self._vocab.get(PAD, self.bos_id)

    @property
    def size(self) -> int:
        """The highest token id plus one: the number of rows that an embedding table needs."""
        return max(self._vocab.values()) + 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return {"input_ids": the start token and the tokens of the text}."""
        return {"input_ids": [self.bos_id, *self._tokenizer.encode(text, add_special_tokens=False).ids]}

    def get_vocab(self) -> dict[str, int]:
        """Return token text -> id."""
        return self._vocab

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, by default without special tokens such as '<s>'."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@dataclass(frozen=True, slots=True)
class Tekken:
    """What a tekken file says, ready for byte-level BPE. This is also what the cache keeps.

    Args:
        specials: the special tokens; id = index.
        tokens: the vocabulary in rank order, each byte written as its letter; id = number of specials + index.
        merges: left, right, left, right, ... of every split of a token into two tokens, ordered by the token's rank.
        pattern: the regular expression that splits a text before any merging.
    """

    specials: Sequence[str]
    tokens: Sequence[str]
    merges: Sequence[str]
    pattern: str

    def vocab(self) -> dict[str, int]:
        """Return token text -> id."""
        return {text: index for index, text in enumerate((*self.specials, *self.tokens))}

    def tokenizer(self, vocab: dict[str, int]) -> Tokenizer:
        """Build the token model. Raises plain Exception, as the library does, when the parts do not fit."""
        merges = list(zip(self.merges[::2], self.merges[1::2], strict=True))
        return byte_level_bpe(vocab, merges, self.specials, self.pattern)


def byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], specials: Sequence[str], pattern: str
) -> Tokenizer:
    """Build a byte-level BPE model as Mistral's are.

    Args:
        vocab: token text -> id, bytes written as their letters, special tokens as they are.
        merges: the pairs of tokens to join, the first to be joined first.
        specials: the tokens that are found in a text before it is split.
        pattern: the regular expression that splits a text before any merging.

    Raises: plain Exception, as the library does, when the parts do not fit.
    """
    tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def tokenizer_from_tekken(data: bytes, label: str) -> TextTokenizer:
    """Build the tokenizer of a tekken file, from the cache of an earlier load where there is one.

    Args:
        data: the bytes of a `tekken.json`.
        label: the name for messages.

    Raises: CheckpointError when the data is no usable tekken file.
    """
    cached = CACHE_FOLDER / f"{hashlib.sha256(_BUILD + data).hexdigest()}.json"
    tokenizer = _from_cache(cached, label, data)
    if tokenizer is not None:
        return tokenizer
    tekken = parse_tekken(data, label)
    vocab = tekken.vocab()
    try:
        tokenizer = TextTokenizer(tekken.tokenizer(vocab), vocab, label, data)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exception; all but the pattern was checked
        raise CheckpointError(f"{label}: the tokenizer's pattern is no regular expression ({error}).") from error
    _write_cache(cached, tekken)
    return tokenizer


def tokenizer_from_json(data: bytes, label: str) -> TextTokenizer:
    """Read a Hugging Face `tokenizer.json`. Raises CheckpointError when the data is none."""
    try:
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception for anything it cannot read
        raise CheckpointError(f"{label}: not a tokenizer.json ({error}). Download it again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer, tokenizer.get_vocab(with_added_tokens=True), label)


def parse_tekken(data: bytes, label: str) -> Tekken:
    """Read and check a tekken file.

    Raises: CheckpointError naming the field that is missing or has a wrong type or size.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: the tokenizer is not valid JSON ({error}). Download it again.") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{label}: the tokenizer is a JSON {type(document).__name__}; a tekken object is needed.")
    config = _field(document, "config", dict, {}, label)
    pattern = _field(config, "pattern", str, _DEFAULT_PATTERN, label)
    vocab = _field(document, "vocab", list, None, label)
    entries = _field(document, "special_tokens", list, None, label)
    specials = _specials(entries, _count(config, "default_num_special_tokens", 0, label), label)
    size = _count(config, "default_vocab_size", min(len(specials) + len(vocab), _DEFAULT_VOCAB_SIZE), label)
    tokens = _tokens(vocab, size - len(specials), label)
    return Tekken(specials, tokens, merges_of(tokens), pattern)


def _field(document: Mapping[str, Any], name: str, kind: type, default: Any, label: str) -> Any:
    """Return a field of the given type. Raises CheckpointError when it has another one, or has no default."""
    value = document.get(name, default)
    if not isinstance(value, kind):
        found = "missing" if value is None else type(value).__name__
        raise CheckpointError(
            f"{label}: the tokenizer's '{name}' is {found}; a {kind.__name__} is needed. "
            "Use the tekken.json that belongs to the text encoder."
        )
    return value


def _count(config: Mapping[str, Any], name: str, default: int, label: str) -> int:
    value = config.get(name, default)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise CheckpointError(
            f"{label}: the tokenizer's '{name}' is {value!r:.40}; a number up to {MAX_TOKENS:,} is needed."
        )
    return value


def _specials(entries: list[Any], declared: int, label: str) -> tuple[str, ...]:
    """Return the special tokens by id; ids that the file leaves out are reserved, as Mistral's own library does."""
    by_id: dict[int, str] = {}
    for index, entry in enumerate(entries):
        rank = entry.get("rank", index) if isinstance(entry, dict) else None
        text = _special_text(entry) if rank is not None else None
        if type(rank) is not int or not text or rank in by_id or not 0 <= rank < max(declared, len(entries)):
            raise CheckpointError(
                f"{label}: special token {index} of the tokenizer is damaged: {entry!r:.80}. Download it again."
            )
        by_id[rank] = text
    specials = tuple(by_id.get(i, f"<SPECIAL_{i}>") for i in range(max(declared, len(entries))))
    if len(set(specials)) != len(specials):
        raise CheckpointError(f"{label}: the tokenizer has a special token twice. Download it again.")
    return specials


def _special_text(entry: Mapping[str, Any]) -> str | None:
    text = entry.get("token_str")
    if text is None:
        # binascii.Error and UnicodeDecodeError are ValueErrors.
        with contextlib.suppress(ValueError, TypeError):
            return base64.b64decode(entry.get("token_bytes", ""), validate=True).decode("utf-8")
    return text if isinstance(text, str) else None


def _tokens(vocab: list[Any], limit: int, label: str) -> tuple[str, ...]:
    """Return the tokens of rank 0 to `limit` - 1 in rank order, each byte written as its letter."""
    letters: Any = byte_letters()  # the type stubs do not know that a text is a valid map
    try:
        ranked = sorted((entry["rank"], entry["token_bytes"]) for entry in vocab if entry["rank"] < limit)
        raw = [base64.b64decode(text, validate=True) for _, text in ranked]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{label}: the tokenizer's vocabulary is damaged ({error!r:.80}). Download it again."
        ) from error
    tokens = tuple(codecs.charmap_decode(token, "strict", letters)[0] for token in raw)
    known = set(tokens)
    problem = None
    if [rank for rank, _ in ranked] != list(range(len(ranked))):
        problem = "its ranks are not 0, 1, 2, ..."
    elif len(known) != len(tokens):
        problem = "a token is there twice"
    elif not known.issuperset(letters):
        problem = "not every single byte is a token, so some text could not be written"
    elif max(map(len, tokens)) > MAX_TOKEN_BYTES:
        problem = f"a token has more than {MAX_TOKEN_BYTES} bytes"
    if problem:
        raise CheckpointError(f"{label}: the tokenizer's vocabulary is damaged: {problem}. Download it again.")
    return tokens


def byte_letters() -> str:
    """Return the 256 visible letters of byte-level BPE: each byte's own, or the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


def merges_of(tokens: Sequence[str]) -> list[str]:
    """Return the merges of a vocabulary as left, right, left, right, ...; the splits of one token are ordered by the rank of their left part."""
    rank = {token: index for index, token in enumerate(tokens)}
    merges: list[str] = []
    for token in tokens:
        pairs = [(left, token[i:]) for i in range(1, len(token)) if (left := token[:i]) in rank and token[i:] in rank]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: rank[pair[0]])
        for pair in pairs:
            merges += pair
    return merges


def _from_cache(file: Path, label: str, data: bytes) -> TextTokenizer | None:
    """Build the tokenizer from the cache file; None when there is none or it is damaged."""
    try:
        tekken = Tekken(**json.loads(file.read_bytes()))
        vocab = tekken.vocab()
        return TextTokenizer(tekken.tokenizer(vocab), vocab, label, data)
    except OSError:
        return None
    except Exception as error:  # a damaged file can fail in many ways, in the library with plain Exception
        logger.info("the cached tokenizer %s is damaged and is built again (%s)", file.name, error)
        return None


def _write_cache(file: Path, tekken: Tekken) -> None:
    """Write the cache file under a temporary name, then rename it: another process never sees half a file."""
    temporary = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            # dumps, not dump: the latter runs in Python and takes ten times as long.
            stream.write(json.dumps({f.name: getattr(tekken, f.name) for f in fields(tekken)}, ensure_ascii=False))
        os.replace(temporary, file)
    except OSError as error:
        logger.info(
            "the tokenizer is built at every load: %s cannot be written (%s)", file.parent, error.strerror or error
        )
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
