"""Damaged and hostile tokenizer data: a tokenizer that works, or our error."""

from __future__ import annotations

import copy
import json

import pytest
from ernie_fast.nodes.model.checkpoint import CheckpointError
from ernie_fast.nodes.text import tokenizer as tokenizer_module
from ernie_fast.nodes.text.tokenizer import parse_tekken, tokenizer_from_json, tokenizer_from_tekken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_files import tekken

FUZZ = settings(max_examples=250, deadline=5000, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
BASE = tekken(300)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=6) | st.floats(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module", autouse=True)
def _no_cache(tmp_path_factory):
    """Keep the fuzzed tokenizers out of the package's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "CACHE_FOLDER", tmp_path_factory.mktemp("tokenizers"))
        yield


def built_or_refused(load, data):
    """Return the tokenizer, or None when it was refused with our error."""
    try:
        return load(data, "file")
    except CheckpointError as error:
        message = str(error)
    assert message.startswith("file: ")
    return None


def build(data: bytes) -> None:
    """Build the tokenizer as the loader does, and use it."""
    tokenizer = built_or_refused(tokenizer_from_tekken, data)
    if tokenizer is None:
        return
    ids = tokenizer("a red apple")["input_ids"]
    assert tokenizer.decode(ids) == "a red apple"
    assert max(ids) < tokenizer.size


@FUZZ
@given(st.data())
def test_documents_with_a_field_replaced(data):
    document = copy.deepcopy(BASE)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(["top", "config", "vocab", "special_tokens"]))
        value = data.draw(JSON_VALUES)
        if place == "top":
            document[data.draw(st.sampled_from(["config", "vocab", "special_tokens", "version"]))] = value
        elif place == "config" and isinstance(document["config"], dict):
            names = ["pattern", "default_vocab_size", "default_num_special_tokens", "num_vocab_tokens"]
            document["config"][data.draw(st.sampled_from(names))] = value
        elif isinstance(document.get(place), list) and document[place]:
            entry = document[place][data.draw(st.integers(0, len(document[place]) - 1))]
            if isinstance(entry, dict):
                entry[data.draw(st.sampled_from(["rank", "token_bytes", "token_str"]))] = value
    build(json.dumps(document).encode())


@FUZZ
@given(JSON_VALUES | st.binary(max_size=60))
def test_arbitrary_data(value):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    build(data)
    built_or_refused(tokenizer_from_json, data)


def test_base_document_is_whole():
    assert len(parse_tekken(json.dumps(BASE).encode(), "file").tokens) == 280
    build(json.dumps(BASE).encode())
