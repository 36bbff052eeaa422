"""The tekken tokenizer: the same ids as ComfyUI's own, quick, cached, and safe against damaged data."""

from __future__ import annotations

import base64
import json
import time

import pytest
from comfy.text_encoders.flux import load_mistral_tokenizer
from comfy.utils import load_torch_file
from ernie_fast.nodes.model.checkpoint import CheckpointError
from ernie_fast.nodes.text import tokenizer as tokenizer_module
from ernie_fast.nodes.text.tokenizer import parse_tekken, tokenizer_from_json, tokenizer_from_tekken
from text_files import NANO_SIZES, PROMPTS, as_bytes, core_clip, tekken
from transformers.integrations.mistral import MistralConverter

TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setattr(tokenizer_module, "CACHE_FOLDER", tmp_path / "cache" / "tokenizers")
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture(scope="module")
def large():
    return tekken(size=6000, specials=100)


def core_ids(data: bytes, text: str) -> list[int]:
    """Return the ids of a text by ComfyUI's own conversion, without the start token."""
    return load_mistral_tokenizer(data)["tokenizer_object"].encode(text, add_special_tokens=False).ids


def test_ids_equal_comfyui_on_nano(nano):
    sd = load_torch_file(str(nano / "ministral-nano.safetensors"))
    core = core_clip(sd, sd["tekken_model"], NANO_SIZES).tokenizer.ministral3_3b.tokenizer
    ours = tokenizer_from_tekken(sd["tekken_model"].numpy().tobytes(), "nano")
    for text in PROMPTS:
        assert ours(text)["input_ids"] == [1, *core(text)["input_ids"]]


def test_whole_tokenizer_equals_comfyui_on_a_larger_vocabulary(large):
    document = json.loads(as_bytes(large))  # without a pattern both take the converter's
    core = load_mistral_tokenizer(as_bytes(document))["tokenizer_object"]
    ours = tokenizer_from_tekken(as_bytes(document), "large")
    for text in PROMPTS:
        assert ours(text)["input_ids"] == [1, *core.encode(text, add_special_tokens=False).ids]
    assert ours.get_vocab() == core.get_vocab()
    ids = ours("Two [INST] trees, 一只 👩‍🚀")["input_ids"]
    assert ours.decode(ids) == core.decode(ids, skip_special_tokens=True) == "Two  trees, 一只 👩‍🚀"
    assert ours.decode(ids, skip_special_tokens=False) == "<s>Two [INST] trees, 一只 👩‍🚀"


def test_pattern_of_the_file_is_used(large):
    document = {**large, "config": {**large["config"], "pattern": TEKKEN_PATTERN}}
    vocab = {entry["token_str"]: entry["rank"] for entry in large["special_tokens"]}
    specials = list(vocab)
    vocab |= {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in large["vocab"]}
    reference = MistralConverter(vocab=vocab, pattern=TEKKEN_PATTERN, additional_special_tokens=specials).converted()
    ours = tokenizer_from_tekken(as_bytes(document), "large")
    for text in PROMPTS:
        assert ours(text)["input_ids"] == [1, *reference.encode(text, add_special_tokens=False).ids]


@pytest.mark.parametrize("missing", ["default_num_special_tokens", "default_vocab_size", "pattern", None])
def test_missing_config_fields_do_not_matter(large, missing):  # U14
    config = {k: v for k, v in large["config"].items() if k != missing} if missing else {}
    ours = tokenizer_from_tekken(as_bytes({**large, "config": config}), "large")
    assert ours("a red apple [INST]")["input_ids"][1:] == core_ids(as_bytes(large), "a red apple [INST]")


def test_special_ids_that_the_file_leaves_out_are_reserved(large):  # U14
    document = {**large, "special_tokens": large["special_tokens"][:20]}
    ours = tokenizer_from_tekken(as_bytes(document), "large")
    assert ours("a red apple")["input_ids"][1:] == core_ids(as_bytes(large), "a red apple")


def test_tokens_beyond_the_stated_size_are_left_out(large):
    smaller = {**large, "config": {**large["config"], "default_vocab_size": 3000}}
    ours = tokenizer_from_tekken(as_bytes(smaller), "large")
    assert ours.size == 3000
    assert ours("a red apple")["input_ids"][1:] == core_ids(as_bytes(smaller), "a red apple")


def test_huggingface_tokenizer_json_gives_the_same_ids(large):
    core = load_mistral_tokenizer(as_bytes(large))["tokenizer_object"]
    core.enable_truncation(4)
    core.enable_padding()
    ours = tokenizer_from_json(core.to_str().encode(), "tokenizer.json")
    for text in PROMPTS:
        assert ours(text)["input_ids"] == [1, *core_ids(as_bytes(large), text)]


def test_second_load_comes_from_the_cache(large, cache, monkeypatch):
    first = tokenizer_from_tekken(as_bytes(large), "large")
    assert [file.suffix for file in cache.iterdir()] == [".json"]
    monkeypatch.setattr(tokenizer_module, "parse_tekken", None)
    second = tokenizer_from_tekken(as_bytes(large), "large")
    assert second.get_vocab() == first.get_vocab()
    for text in PROMPTS:
        assert second(text) == first(text)


def test_another_tokenizer_is_not_taken_from_the_cache(large, cache):
    tokenizer_from_tekken(as_bytes(large), "large")
    assert tokenizer_from_tekken(as_bytes(tekken()), "small").size == 276
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '{"specials": 1, "tokens": [], "merges": [], "pattern": ""}',
                                     '{"specials": ["<s>"], "tokens": ["a"], "merges": ["x", "y"], "pattern": "a"}'])  # fmt: skip
def test_damaged_cache_file_is_built_again(large, cache, content):
    wanted = tokenizer_from_tekken(as_bytes(large), "large")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_text(content)
    assert tokenizer_from_tekken(as_bytes(large), "large")("a red apple") == wanted("a red apple")
    assert file.read_bytes() == whole


def test_folder_that_cannot_be_written_means_no_cache_and_one_log_line(large, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tokenizer_module, "CACHE_FOLDER", tmp_path / "file" / "tokenizers")
    with caplog.at_level("INFO", logger="ernie_fast"):
        assert tokenizer_from_tekken(as_bytes(large), "large").size == 6000
    assert len(caplog.records) == 1
    assert "built at every load" in caplog.text


@pytest.mark.slow
def test_full_vocabulary_loads_in_under_a_second_from_the_cache(record_property):
    data = as_bytes(tekken(size=131072, specials=1000))
    seconds = []
    for _ in range(2):
        start = time.process_time()  # of this process alone: other work on the machine does not count
        assert tokenizer_from_tekken(data, "full").size == 131072
        seconds.append(time.process_time() - start)
    record_property("seconds", seconds)
    assert seconds[0] < 6
    assert seconds[1] < 1


def changed(document, **fields):
    return as_bytes({**document, **fields})


def entry(rank, data):
    return {"rank": rank, "token_bytes": base64.b64encode(data).decode()}


SMALL = tekken()
BROKEN = {
    "no JSON": (b"\xff\xfe", "not valid JSON"),
    "empty": (b"", "not valid JSON"),
    "deep nesting": (b"[" * 100_000, "not valid JSON"),
    "a list": (b"[]", "tekken object"),
    "no vocabulary": (changed(SMALL, vocab=None), "'vocab' is missing"),
    "vocabulary of the wrong type": (changed(SMALL, vocab={}), "'vocab' is dict; a list"),
    "empty vocabulary": (changed(SMALL, vocab=[]), "single byte"),
    "config of the wrong type": (changed(SMALL, config=[]), "'config' is list"),
    "pattern of the wrong type": (changed(SMALL, config={"pattern": 3}), "'pattern' is int"),
    "pattern that is none": (changed(SMALL, config={"pattern": "("}), "regular expression"),
    "no special tokens": (changed(SMALL, special_tokens=None), "'special_tokens' is missing"),
    "special tokens of the wrong type": (changed(SMALL, special_tokens=[1]), "special token 0"),
    "special rank twice": (changed(SMALL, special_tokens=[{"rank": 0, "token_str": "<s>"}, {"rank": 0, "token_str": "b"}]), "special token 1"),
    "special text twice": (changed(SMALL, special_tokens=[{"token_str": "<s>"}, {"token_str": "<s>"}]), "twice"),
    "no start token": (changed(SMALL, special_tokens=[{"rank": 0, "token_str": "x"}]), "no start token '<s>'"),
    "huge count of special tokens": (changed(SMALL, config={"default_num_special_tokens": 10**12}), "default_num_special_tokens"),
    "negative size": (changed(SMALL, config={"default_vocab_size": -1}), "default_vocab_size"),
    "size as text": (changed(SMALL, config={"default_vocab_size": "131072"}), "default_vocab_size"),
    "no base64": (changed(SMALL, vocab=[{"rank": 0, "token_bytes": "*"}]), "vocabulary is damaged"),
    "rank as text": (changed(SMALL, vocab=[{"rank": "0", "token_bytes": "AA=="}]), "vocabulary is damaged"),
    "entries without rank": (changed(SMALL, vocab=[{"token_bytes": "AA=="}]), "vocabulary is damaged"),
    "entries of the wrong type": (changed(SMALL, vocab=[1]), "vocabulary is damaged"),
    "gap in the ranks": (changed(SMALL, vocab=SMALL["vocab"][:9] + SMALL["vocab"][10:]), "ranks are not"),
    "token twice": (changed(SMALL, vocab=[*SMALL["vocab"][:255], entry(255, b"a")]), "twice"),
    "a byte missing": (changed(SMALL, vocab=SMALL["vocab"][:200]), "single byte"),
    "a token of many kilobytes": (changed(SMALL, config={}, vocab=[*SMALL["vocab"], entry(256, b"a" * 5000)]), "1024 bytes"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_damaged_tekken_data_is_refused_by_name(data, message, cache):
    with pytest.raises(CheckpointError, match=f"^my file: .*{message}"):
        tokenizer_from_tekken(data, "my file")
    assert not cache.exists()


@pytest.mark.parametrize("data", [b"", b"\xff", b"{}", b'{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_json_is_refused(data):
    with pytest.raises(CheckpointError, match=r"^my file: not a tokenizer\.json"):
        tokenizer_from_json(data, "my file")


def test_special_token_may_be_written_as_bytes():
    special_tokens = [{"rank": e["rank"], "token_bytes": base64.b64encode(e["token_str"].encode()).decode()} for e in SMALL["special_tokens"]]
    assert parse_tekken(changed(SMALL, special_tokens=special_tokens), "x") == parse_tekken(as_bytes(SMALL), "x")
