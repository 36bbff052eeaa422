"""The tokenizer from a GGUF file's own vocabulary: the ids of the tekken tokenizer, or one sentence."""

from __future__ import annotations

import time

import pytest
from ernie_fast.nodes.model.checkpoint import CheckpointError
from ernie_fast.nodes.text import tokenizer as tokenizer_module
from ernie_fast.nodes.text.gguf_vocabulary import tokenizer_from_fields, tokenizer_from_gguf
from ernie_fast.nodes.text.tokenizer import tokenizer_from_tekken
from gguf_files import write_gguf
from text_files import PROMPTS, as_bytes, split_as_released, tekken, vocabulary_fields


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A tokenizer cache of the test's own."""
    monkeypatch.setattr(tokenizer_module, "CACHE_FOLDER", tmp_path / "cache")


def test_ids_equal_tekken_on_a_larger_vocabulary():  # U14
    document = split_as_released(tekken(size=6000, specials=100))
    plain = tokenizer_from_tekken(as_bytes(document), "tekken")
    ours = tokenizer_from_fields(vocabulary_fields(document), "gguf")
    fields = vocabulary_fields(document)
    without = tokenizer_from_fields({k: v for k, v in fields.items() if k != "tokenizer.ggml.merges"}, "no merges")
    assert ours.get_vocab() == plain.get_vocab()
    for text in (*PROMPTS, *("".join(PROMPTS[i::3]) for i in range(3))):
        assert ours(text) == plain(text) == without(text)
    ids = ours("Two [INST] trees, 一只 👩‍🚀")["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip) == plain.decode(ids, skip)


def test_name_of_the_split_and_unused_tokens_do_not_matter():  # U14: names vary with the converter
    fields = vocabulary_fields(tekken(size=600))
    plain = tokenizer_from_fields(fields, "x")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    padded = {**fields, "tokenizer.ggml.tokens": [*tokens, "[PAD600]"], "tokenizer.ggml.token_type": [*types, 5]}
    for change in ({"tokenizer.ggml.pre": "pixtral"}, {"tokenizer.ggml.pre": None}, {"tokenizer.ggml.bos_token_id": None}, padded):
        ours = tokenizer_from_fields({k: v for k, v in {**fields, **change}.items() if v is not None}, "x")
        assert ours("1234 don't HelloWorld [PAD600]") == plain("1234 don't HelloWorld [PAD600]")
        assert ours.size == 600


@pytest.mark.slow
def test_full_vocabulary_is_built_in_a_second(tmp_path, record_property):
    fields = vocabulary_fields(tekken(size=131072, specials=1000))
    file = write_gguf(tmp_path / "v.gguf", {}, fields=fields)
    start = time.process_time()  # of this process alone: other work on the machine does not count
    assert tokenizer_from_gguf(file, "full").size == 131072
    seconds = time.process_time() - start
    record_property("seconds", seconds)
    assert seconds < 1.5


V = "tokenizer.ggml."
SMALL = vocabulary_fields(tekken(size=300))
TOKENS = SMALL[f"{V}tokens"]
BROKEN = {
    "no model": ({"model": None}, "model is missing; 'gpt2' is needed"),
    "a sentencepiece model": ({"model": "llama"}, "model is 'llama'; 'gpt2' is needed"),
    "a model of the wrong type": ({"model": 3}, "model is 3"),
    "tokens of the wrong type": ({"tokens": [1, 2]}, "tokens is a list of another kind; a list of texts"),
    "no list": ({"tokens": "abc"}, "tokens is 'abc'"),
    "empty tokens": ({"tokens": []}, "tokens is a list of another kind"),
    "no token types": ({"token_type": None}, "token_type is missing; a list of whole numbers"),
    "token types as texts": ({"token_type": ["3"]}, "token_type is a list of another kind"),
    "too few token types": ({"token_type": [3]}, "300 tokens and 1 token types"),
    "merges as numbers": ({"merges": [1, 2]}, "merges is a list of another kind; a list of texts"),
    "merges of unknown tokens": ({"merges": ["ab cd"]}, "its merges do not fit its tokens"),
    "merges of three parts": ({"merges": ["a b c"]}, "its merges do not fit its tokens"),
    "merges of one part": ({"merges": ["a"]}, "its merges do not fit its tokens"),
    "a token twice": ({"tokens": [*TOKENS[:-1], TOKENS[50]]}, "a token is there twice"),
    "a byte missing": ({"tokens": [*TOKENS[:40], "xyz", *TOKENS[41:]]}, "not every single byte"),
    "a token of many kilobytes": ({"tokens": [*TOKENS[:-1], "a" * 5000]}, "1024 bytes"),
    "a start token outside": ({"bos_token_id": 300}, "start token is number 300 of 300"),
    "a start token as text": ({"bos_token_id": "<s>"}, "start token is number '<s>'"),
    "another start token": ({"bos_token_id": 7}, "start token is '"),
    "no start token": ({"bos_token_id": None, "tokens": [f"<{i}>" for i in range(20)] + TOKENS[20:]}, "no start token '<s>'"),
    "huge": ({"tokens": [str(i) for i in range((1 << 20) + 1)]}, "1,048,577 tokens; at most 1,048,576"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_damaged_vocabulary_is_refused_by_name(change, message):
    fields = {**SMALL, **{V + name: value for name, value in change.items()}}
    with pytest.raises(CheckpointError, match=r"^my file: ") as caught:
        tokenizer_from_fields({k: v for k, v in fields.items() if v is not None}, "my file")
    assert message in str(caught.value)


VALUES = [None, True, -1, 2**63, 1.5, float("nan"), "", "x", [], [1], ["a"], ["", ""], [1.5], [True], [-5] * 300, ["a b"]]


@pytest.mark.parametrize("name", list(SMALL))
def test_any_value_gives_a_tokenizer_or_one_sentence(name):
    for value in VALUES:
        fields = {k: v for k, v in {**SMALL, name: value}.items() if v is not None}
        try:
            result = tokenizer_from_fields(fields, "my file")("a red [INST]")["input_ids"][0]
        except CheckpointError as error:
            result = str(error)
        assert result == 1 or (str(result).startswith("my file: ") and len(str(result)) < 400)


def test_letters_of_the_vocabulary_are_those_of_llama_cpp():
    assert [TOKENS[20 + ord(letter)] for letter in " a\n"] == ["Ġ", "a", "Ċ"]
