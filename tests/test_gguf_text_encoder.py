"""Text encoders in GGUF files: the same embeddings and tokens as the safetensors file, from the file's own words alone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.utils import load_torch_file
from ernie_fast.kernels.gguf import ops
from ernie_fast.kernels.gguf.encode import quantize
from ernie_fast.nodes.loaders.lora_loader import ErnieFastLoRALoader
from ernie_fast.nodes.loaders.text_encoder_loader import ErnieFastTextEncoderLoader as Loader
from ernie_fast.nodes.model.checkpoint import CheckpointError, open_checkpoint
from ernie_fast.nodes.model.gguf_file import read_header
from ernie_fast.nodes.text import tokenizer as tokenizer_module
from ernie_fast.nodes.text.probe import probe_text_encoder
from ernie_fast.nodes.text.rope import Rope, Yarn, rope_from_config
from ernie_files import ernie_state_dict, save
from gguf_files import write_gguf
from text_files import (
    PROMPTS,
    as_bytes,
    as_tensor,
    embed,
    encoder_fields,
    encoder_state_dict,
    hf_folder,
    llama_cpp_state_dict,
    split_as_released,
    tekken,
    vocabulary_fields,
    write_gguf_encoder,
)

TEXT = "a red apple on a blue background"
NAME = "ministral.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A tokenizer cache of the test's own."""
    monkeypatch.setattr(tokenizer_module, "CACHE_FOLDER", tmp_path / "cache")


@pytest.fixture(scope="module")
def sd():
    """A BF16 encoder with two key-value heads, whose widths fit every GGUF type."""
    weights = encoder_state_dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    # Halved, so that rounding does not grow from layer to layer as no trained model lets it.
    return {name: tensor * 0.5 if tensor.dim() > 1 else tensor for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def document():
    """A tekken document with the split that real ones state."""
    return split_as_released(tekken())


@pytest.fixture
def wanted(models, sd, document):
    """The embedding of TEXT by the safetensors file."""
    save(models / "text_encoders" / "plain.safetensors", {**sd, "tekken_model": as_tensor(document)})
    return embed(load("plain.safetensors"), TEXT)


def load(name=NAME, tokenizer="auto", rope="yarn"):
    """Check, then load, as ComfyUI does."""
    assert Loader.validate_inputs(name, tokenizer, rope) is True
    return Loader.execute(name, tokenizer, rope).args[0]


def refused(name=NAME, tokenizer="auto", rope="yarn") -> str:
    """Return the message, which must be the same before and at run time."""
    with pytest.raises(CheckpointError) as caught:
        Loader.execute(name, tokenizer, rope)
    assert Loader.validate_inputs(name, tokenizer, rope) == str(caught.value)
    return str(caught.value)


def cosine(a, b) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().float(), b.flatten().float(), dim=0))


def weights_of(clip):
    return clip.cond_stage_model.ministral3_3b.transformer.model


@pytest.mark.parametrize("architecture", ["mistral3", "llama", "mistral", "pig", "cow", None])
@pytest.mark.parametrize("keys", ["mistral3", "own"])
def test_architecture_is_only_a_hint(models, sd, wanted, architecture, keys):  # U12, U29
    stated = encoder_fields(sd, (architecture if keys == "own" else None) or "mistral3")
    without = dict.fromkeys(encoder_fields(sd))
    write_gguf_encoder(models / "text_encoders" / NAME, sd, architecture=architecture, fields={**without, **stated})
    assert torch.equal(embed(load(), TEXT), wanted)


@pytest.mark.parametrize("qtype", ["F32", "BF16"])
def test_float_embeddings_equal_the_safetensors_file(models, sd, wanted, qtype):  # U13
    write_gguf_encoder(models / "text_encoders" / NAME, sd, qtype)
    clip = load()
    assert torch.equal(embed(clip, TEXT), wanted)
    assert weights_of(clip).embed_tokens.weight.dtype == {"F32": torch.float32, "BF16": torch.bfloat16}[qtype]


@pytest.mark.parametrize(("qtype", "least"), [("Q8_0", 0.9995), ("Q6_K", 0.995), ("Q4_K", 0.95)])
def test_quantised_embeddings_are_those_of_the_rounded_weights(models, sd, wanted, qtype, least):  # U12, U13
    write_gguf_encoder(models / "text_encoders" / NAME, sd, qtype)
    rounded = {n: ops.dequantize(quantize(t.float(), qtype), qtype, torch.float32) if t.dim() > 1 else t.float() for n, t in sd.items()}
    save(models / "text_encoders" / "rounded.safetensors", {**rounded, "tekken_model": as_tensor(tekken())})
    ours = embed(load(), TEXT)
    assert torch.equal(ours, embed(load("rounded.safetensors"), TEXT))
    assert cosine(ours, wanted) > least


@pytest.mark.parametrize("embedding", ["F16", "BF16", "Q6_K"])
def test_types_may_be_mixed(models, sd, wanted, embedding):  # as in every published file
    types = {"token_embd": embedding, "attn_v": "Q6_K", "attn_k": "BF16", "ffn_down": "F16", "output.": "Q6_K"}
    head = {"output.weight": sd["model.embed_tokens.weight"].clone()}
    write_gguf_encoder(models / "text_encoders" / NAME, sd, "Q8_0", types=types, more=head)
    clip = load()
    assert cosine(embed(clip, TEXT), wanted) > 0.995
    assert len(generated(clip, 2)) == 2
    assert "mixed: GGUF Q8_0, GGUF Q6_K" in Loader.execute(NAME, "auto", "yarn").args[1]


def test_rows_that_were_not_sorted_back_give_other_embeddings(models, sd, wanted, monkeypatch):  # U13: the test above can fail
    write_gguf_encoder(models / "text_encoders" / NAME, sd)
    monkeypatch.setattr("ernie_fast.nodes.text.encoder.unpermute", lambda rows, head_dim: rows)
    assert cosine(embed(load(), TEXT), wanted) < 0.99


def test_stored_rows_are_moved_whole(models, sd):
    file = write_gguf_encoder(models / "text_encoders" / NAME, sd, "Q4_K")
    raw = read_header(file).tensors["blk.0.attn_k.weight"]
    stored = torch.frombuffer(bytearray(file.read_bytes()[raw.offset : raw.offset + raw.size_bytes]), dtype=torch.uint8)
    stored = stored.view(raw.shape[0], -1)
    rows = weights_of(load()).layers[0].self_attn.k_proj.weight.data._qdata
    for row, at in ((0, 0), (1, 2), (64, 1), (127, 127), (128, 128), (129, 130)):
        assert torch.equal(rows[row], stored[at])


def test_everything_but_the_norms_stays_quantised_and_q_and_k_are_the_only_copies(models, sd):
    file = write_gguf_encoder(models / "text_encoders" / NAME, sd, "Q8_0")
    clip = load()
    model = weights_of(clip)
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(file.name)]
    copies = set()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.data, QuantizedTensor) is (parameter.dim() > 1)
        if parameter.dim() > 1:
            address = parameter.data._qdata.data_ptr()
            if not any(int(start, 16) <= address < int(end, 16) for start, end in ranges):
                copies.add(name.rpartition("self_attn.")[2])
    assert copies == {"q_proj.weight", "k_proj.weight"}
    assert "GGUF Q8_0" in Loader.execute(NAME, "auto", "yarn").args[1]


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_K"])
def test_embeddings_are_looked_up_by_rows(models, sd, qtype):
    write_gguf_encoder(models / "text_encoders" / NAME, sd, qtype)
    module = weights_of(load()).embed_tokens
    table = ops.dequantize(module.weight.data._qdata, qtype, torch.float32)
    tokens = torch.tensor([[3, 275, 0], [3, 7, 8]])
    assert torch.equal(module(tokens, out_dtype=torch.float32), table[tokens])


def test_quantised_norms_are_expanded(models, sd, wanted):  # U29
    tensors = llama_cpp_state_dict(sd)
    fields = {**encoder_fields(sd), **vocabulary_fields(tekken())}
    write_gguf(models / "text_encoders" / NAME, tensors, lambda name: "Q8_0", "mistral3", fields)
    assert cosine(embed(load(), TEXT), wanted) > 0.99


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "text_encoders.llm.model."])
def test_files_with_huggingface_names(models, sd, wanted, prefix):
    tensors = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in sd.items()}
    write_gguf(models / "text_encoders" / NAME, tensors, lambda name: "F32", None, vocabulary_fields(tekken()))
    assert torch.equal(embed(load(), TEXT), wanted)


def test_vision_parts_and_rotary_tables_in_the_file_are_left_alone(models, sd, wanted):  # U41
    zeros = torch.zeros(32, 32)
    more = {"v.blk.0.attn_q.weight": zeros, "v.blk.0.ffn_up.weight": zeros, "mm.1.weight": zeros, "v.patch_embd.weight": zeros,
            "rope_freqs.weight": torch.ones(64)}  # fmt: skip
    write_gguf_encoder(models / "text_encoders" / NAME, sd, more=more)
    assert torch.equal(embed(load(), TEXT), wanted)


def test_no_vision_file_is_searched_for(models, sd, wanted):  # U41
    folder = models / "text_encoders"
    write_gguf_encoder(folder / "renamed" / "any name.gguf", sd)
    write_gguf(folder / "renamed" / "any name.mmproj-f16.gguf", {"v.blk.0.attn_q.weight": torch.zeros(32, 32)}, architecture="clip")
    (folder / "renamed" / "mmproj-any name.gguf").write_bytes(b"GGUF")
    assert torch.equal(embed(load("renamed/any name.gguf"), TEXT), wanted)
    assert "vision part (mmproj)" in refused("renamed/any name.mmproj-f16.gguf")


@pytest.mark.parametrize("qtype", ["BF16", "Q8_0"])
def test_output_head_of_its_own_and_a_tied_one(models, sd, wanted, qtype):
    plain = generated(load("plain.safetensors"), 3)
    write_gguf_encoder(models / "text_encoders" / NAME, sd, qtype)
    assert generated(load(), 3) == plain
    flipped = sd["model.embed_tokens.weight"].flip(0).clone()
    write_gguf_encoder(models / "text_encoders" / NAME, sd, qtype, more={"output.weight": flipped})
    assert generated(load(), 1) == [275 - plain[0]]


def generated(clip, length):
    return clip.generate(clip.tokenize("a red"), do_sample=False, max_length=length)


def test_positions_are_as_the_metadata_says(models, sd):
    file = models / "text_encoders" / NAME

    def rope(fields, choice="yarn"):
        probe = probe_text_encoder(open_checkpoint(write_gguf_encoder(file, sd, fields=fields)))
        return rope_from_config(probe.config, choice, "x", probe.config_place)

    start = "mistral3.rope."
    nothing = {key: None for key in encoder_fields(sd) if key.startswith(start)}
    other = {f"{start}freq_base": 1e8, f"{start}scaling.factor": 48.0, f"{start}scaling.original_context_length": 8192,
             f"{start}scaling.yarn_beta_fast": 16.0, f"{start}scaling.yarn_beta_slow": 2.0}  # fmt: skip
    assert rope({}) == Rope(1e6, Yarn())
    assert rope(nothing) == Rope(1e6, Yarn())
    assert rope(other) == Rope(1e8, Yarn(48.0, 8192.0, 16.0, 2.0))
    assert rope(other, "comfyui") == Rope(1e8)
    assert rope({f"{start}scaling.type": "none"}) == Rope(1e6)
    unscaled = rope({f"{start}scaling.yarn_log_multiplier": None}).yarn
    assert unscaled is not None
    assert unscaled.attention_scale == pytest.approx(1.2773, abs=1e-4)  # as llama.cpp computes it then
    old = {f"{start}scaling.yarn_beta_fast": None, f"{start}scaling.beta_fast": 16.0}  # Ollama
    assert rope(old) == Rope(1e6, Yarn(beta_fast=16.0))


def test_epsilon_and_head_size_are_as_the_metadata_says(models, sd):
    fields = {"mistral3.attention.key_length": None, "mistral3.attention.layer_norm_rms_epsilon": 0.125}
    halves = {"mistral3.attention.head_count": 8, "mistral3.attention.head_count_kv": 4}
    sizes = []
    for change in ({}, halves):
        write_gguf_encoder(models / "text_encoders" / NAME, sd, fields={**fields, **change})
        sizes.append(weights_of(load()).config)
    assert [config.head_dim for config in sizes] == [128, 64]
    assert [config.rms_norm_eps for config in sizes] == [0.125, 0.125]


def test_config_file_beside_counts_only_where_the_file_says_nothing(models, sd, wanted):
    folder = hf_folder(models / "text_encoders" / "hf", sd, {"model_type": "ministral3", "head_dim": 64})
    write_gguf_encoder(folder / NAME, sd)
    assert torch.equal(embed(load(f"hf/{NAME}"), TEXT), wanted)
    write_gguf_encoder(folder / NAME, sd, fields=dict.fromkeys(encoder_fields(sd)))
    assert weights_of(load(f"hf/{NAME}")).config.head_dim == 64


def test_ids_equal_tekken_on_nano(models, nano):  # U14
    weights = load_torch_file(str(nano / "ministral-nano.safetensors"))
    data = weights.pop("tekken_model").numpy().tobytes()
    write_gguf_encoder(models / "text_encoders" / NAME, weights, "Q8_0", document=json.loads(data))
    shutil.copy(nano / "ministral-nano.safetensors", models / "text_encoders")
    gguf, plain = load(), load("ministral-nano.safetensors")
    for text in PROMPTS:
        assert gguf.tokenize(text) == plain.tokenize(text)
    assert cosine(embed(gguf, TEXT), embed(plain, TEXT)) > 0.9995
    assert gguf.decode([1, 85, 84]) == plain.decode([1, 85, 84]) != ""


def test_tokenizer_beside_the_file_and_as_a_source_for_others(models, sd, document, wanted):
    folder = models / "text_encoders"
    without = dict.fromkeys(vocabulary_fields(document))
    write_gguf_encoder(folder / "bare" / NAME, sd, fields=without)
    assert "no tokenizer. The file has no vocabulary" in refused(f"bare/{NAME}")
    write_gguf_encoder(folder / "whole.gguf", sd)
    assert torch.equal(embed(load(f"bare/{NAME}", "whole.gguf"), TEXT), wanted)
    assert torch.equal(embed(load(f"bare/{NAME}", "plain.safetensors"), TEXT), wanted)
    (folder / "bare" / "tekken.json").write_bytes(as_bytes(document))
    assert torch.equal(embed(load(f"bare/{NAME}"), TEXT), wanted)
    save(folder / "weights.safetensors", sd)
    assert torch.equal(embed(load("weights.safetensors", "whole.gguf"), TEXT), wanted)
    assert "276 tokens from whole.gguf" in Loader.execute("weights.safetensors", "whole.gguf", "yarn").args[1]
    (folder / "bare" / "tekken.json").write_bytes(b"{}")  # the vocabulary in a file comes before what is beside it
    write_gguf_encoder(folder / "bare" / NAME, sd)
    assert torch.equal(embed(load(f"bare/{NAME}"), TEXT), wanted)


def test_damaged_vocabulary_ends_the_load(models, sd):
    write_gguf_encoder(models / "text_encoders" / NAME, sd, fields={"tokenizer.ggml.token_type": None})
    with pytest.raises(CheckpointError, match=rf"^{NAME}: tokenizer\.ggml\.token_type is missing"):
        Loader.execute(NAME, "auto", "yarn")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_output_that_is_not_finite_is_an_error(models, sd, wanted, value):  # U56
    broken = dict(sd)
    broken["model.layers.1.mlp.down_proj.weight"] = torch.full_like(sd["model.layers.1.mlp.down_proj.weight"], value)
    write_gguf_encoder(models / "text_encoders" / NAME, broken, "BF16")
    with pytest.raises(CheckpointError, match=rf"^{NAME}: the text encoder's output is not finite .* Use another file"):
        embed(load(), TEXT)


def test_lora_changes_a_quantised_encoder_as_the_float_one(models, sd, wanted, model):
    write_gguf_encoder(models / "text_encoders" / NAME, sd, "Q8_0")
    generator = torch.Generator().manual_seed(1)
    module = "text_encoders.ministral3_3b.transformer.model.layers.1.mlp.up_proj"
    lora = {f"{module}.lora_A.weight": torch.randn(4, 256, generator=generator) * 0.1,
            f"{module}.lora_B.weight": torch.randn(512, 4, generator=generator) * 0.1}  # fmt: skip
    save(models / "loras" / "l.safetensors", lora)
    deltas = []
    for name in ("plain.safetensors", NAME):
        clip = load(name)
        before = embed(clip, TEXT)
        changed = ErnieFastLoRALoader.execute(model, "l.safetensors", 0.0, clip, 1.0).args[1]
        deltas.append(embed(changed, TEXT) - before)
        assert torch.equal(embed(clip, TEXT), before)
    assert deltas[0].norm() > 0
    assert cosine(*deltas) > 0.9


def test_clones_and_reloads_give_the_same_embedding(models, sd):
    write_gguf_encoder(models / "text_encoders" / NAME, sd, "Q8_0")
    clip = load()
    before = embed(clip, TEXT)
    assert torch.equal(embed(clip.clone(), TEXT), before)
    factory, arguments = clip.patcher.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert again.model is not clip.patcher.model
    copy = clip.clone()
    copy.patcher, copy.cond_stage_model = again, again.model
    assert torch.equal(embed(copy, TEXT), before)


def cut(file):
    file.write_bytes(file.read_bytes()[:-200_000])


def unknown_type(file):
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = (29).to_bytes(4, "little")
    file.write_bytes(data)


@pytest.mark.parametrize(("damage", "message"), [(cut, "the file is incomplete"), (unknown_type, "has the GGUF type IQ1_M (29); known are")])
def test_damaged_file_is_refused(models, sd, damage, message):  # U21
    damage(write_gguf_encoder(models / "text_encoders" / NAME, sd, "Q8_0"))
    assert message in refused()


ones = torch.ones(256)
MISTAKES = {
    "a diffusion model": ({}, "ERNIE-Image diffusion model. Load it with ERNIE Model Loader. The file calls itself 'wan'"),
    "a missing tensor": ({"blk.3.ffn_up.weight": None}, "first is 'layers.3.mlp.up_proj.weight'"),
    "a missing layer": ({"blk.2.": None}, "layer 2 is missing"),
    "two models": ({"pe.blk.0.attn_q.weight": torch.zeros(32, 32)}, "2 language models, behind '' and 'pe.'"),
    "a Qwen3": ({"blk.0.attn_q_norm.weight": ones}, "'blk.0.attn_q_norm.weight' is not part of Ministral-3; this looks like a Qwen3"),
    "a Qwen2": ({"blk.0.attn_q.bias": ones}, "looks like a Qwen2"),
    "a Gemma": ({"blk.0.post_ffw_norm.weight": ones}, "looks like a Gemma"),
    "a mixture of experts": ({"blk.0.ffn_gate_inp.weight": torch.zeros(32, 32)}, "another text encoder"),
    "a wrong output head": ({"output.weight": torch.zeros(1, 256)}, "'lm_head.weight' has shape [1, 256]; [276, 256]"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_wrong_file_gets_one_sentence(models, sd, change, message):  # U16, U25
    file = models / "text_encoders" / NAME
    if not change:
        write_gguf(file, ernie_state_dict())
    else:
        removed = tuple(name for name, tensor in change.items() if tensor is None)
        kept = {n: t for n, t in llama_cpp_state_dict(sd).items() if not (removed and n.startswith(removed))}
        tensors = {**kept, **{name: tensor for name, tensor in change.items() if tensor is not None}}
        fields = {**encoder_fields(sd), **vocabulary_fields(tekken())}
        write_gguf(file, tensors, lambda name: "F32", "mistral3", fields)
    assert message in refused()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("embedding_length", 512, "width 256, but its GGUF metadata says hidden_size = 512"),
        ("block_count", 26, "4 layers found; 26 are needed"),
        ("block_count", "4", "block_count = '4'; a positive whole number"),
        ("attention.head_count", 8, "the weights have 4 heads of 128, but its GGUF metadata says num_attention_heads = 8"),
        ("attention.head_count_kv", 1, "says num_key_value_heads = 1"),
        ("attention.head_count", [4, 4, 4, 4], "attention.head_count = [4, 4, 4, 4]"),
        ("attention.key_length", 100, "do not divide into heads of 100"),
        ("attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon = 0.0; a number above 0"),
        ("attention.layer_norm_rms_epsilon", 4.0, "rms_norm_eps = 4.0"),
        ("rope.freq_base", "x", "rope.freq_base = 'x'"),
        ("rope.scaling.type", "linear", "its GGUF metadata asks for RoPE of type 'linear'"),
        ("rope.scaling.type", 3, "rope.scaling.type = 3"),
        ("rope.scaling.factor", -1.0, "rope.scaling.factor = -1.0"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(models, sd, key, value, message):
    write_gguf_encoder(models / "text_encoders" / NAME, sd, fields={f"mistral3.{key}": value})
    assert message in refused()
