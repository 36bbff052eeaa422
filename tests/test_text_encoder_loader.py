"""ERNIE Text Encoder Loader: every kind of file gives the same embeddings as ComfyUI's own path, or one clear sentence."""

from __future__ import annotations

import json
import os
import re
import shutil

import comfy.lora
import comfy.sd
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfy.utils import load_torch_file
from comfy_extras.nodes_textgen import TextGenerate
from ernie_fast.nodes.loaders.text_encoder_loader import ErnieFastTextEncoderLoader as Loader
from ernie_fast.nodes.model.checkpoint import CheckpointError
from ernie_fast.nodes.text import tokenizer as tokenizer_module
from ernie_files import ernie_state_dict, save, with_prefix
from text_files import (
    NANO_SIZES,
    PROMPTS,
    SIZES,
    as_bytes,
    as_tensor,
    core_clip,
    embed,
    encoder_state_dict,
    hf_folder,
    tekken,
)

TEXT = "a red apple on a blue background"
HF_CONFIG = {
    "model_type": "mistral3",
    "text_config": {"model_type": "ministral3", "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 128, "rms_norm_eps": 1e-5},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A tokenizer cache of the test's own."""
    monkeypatch.setattr(tokenizer_module, "CACHE_FOLDER", tmp_path / "cache")


@pytest.fixture(scope="module")
def sd():
    return encoder_state_dict()


@pytest.fixture(scope="module")
def wanted(sd):
    """The embedding of TEXT by ComfyUI's own classes."""
    return embed(core_clip(sd, as_tensor(tekken()), SIZES), TEXT)


@pytest.fixture(scope="module")
def nano_core(nano):
    weights = load_torch_file(str(nano / "ministral-nano.safetensors"))
    return core_clip(weights, weights["tekken_model"], NANO_SIZES)


@pytest.fixture
def nano_name(models, nano):
    shutil.copy(nano / "ministral-nano.safetensors", models / "text_encoders")
    return "ministral-nano.safetensors"


def load(name: str, tokenizer: str = "auto", rope: str = "comfyui") -> comfy.sd.CLIP:
    """Check, then load, as ComfyUI does."""
    assert Loader.validate_inputs(name, tokenizer, rope) is True
    return Loader.execute(name, tokenizer, rope).args[0]


def refused(name: str, tokenizer: str = "auto", rope: str = "yarn") -> str:
    """Return the message, which must be the same before and at run time."""
    with pytest.raises(CheckpointError) as caught:
        Loader.execute(name, tokenizer, rope)
    assert Loader.validate_inputs(name, tokenizer, rope) == str(caught.value)
    return str(caught.value)


def with_tekken(sd, name="tekken_model"):
    return {**sd, name: as_tensor(tekken())}


def test_nano_embeddings_equal_comfyui_bit_for_bit(nano_name, nano_core, caplog):
    clip = load(nano_name)
    for text in PROMPTS:
        assert clip.tokenize(text) == nano_core.tokenize(text)
    for text in PROMPTS[::4]:
        assert torch.equal(embed(clip, text), embed(nano_core, text))
    assert "clip missing" not in caplog.text


def test_summary_names_size_tokenizer_and_rope(nano_name, caplog):
    with caplog.at_level("INFO", logger="ernie_fast"):
        line = Loader.execute(nano_name, "auto", "yarn").args[1]
    assert line == "Ministral-3 text encoder, 4 layers, width 192, BF16, 3.6 MB, tokenizer 276 tokens from the file, rope yarn"
    assert line in caplog.text


def test_yarn_is_close_to_plain_positions_for_a_short_prompt_and_not_equal(nano_name, nano_core):
    ours, core = embed(load(nano_name, rope="yarn"), TEXT), embed(nano_core, TEXT)
    assert not torch.equal(ours, core)
    assert (ours - core).norm() < 0.01 * core.norm()


def test_generated_text_equals_comfyui(nano_name, nano_core):
    arguments = {"prompt": "a red", "max_length": 3, "sampling_mode": {"sampling_mode": "off"}}
    ours = TextGenerate.execute(load(nano_name), **arguments).args[0]
    assert ours == TextGenerate.execute(nano_core, **arguments).args[0] != ""
    sampled = {**arguments, "sampling_mode": {"sampling_mode": "on", "temperature": 0.7, "top_k": 5, "seed": 3}}
    assert TextGenerate.execute(load(nano_name), **sampled).args[0] == TextGenerate.execute(nano_core, **sampled).args[0]


def test_lora_keys_equal_comfyui_and_a_lora_changes_the_embedding(nano_name, nano_core):
    clip = load(nano_name)
    keys = comfy.lora.model_lora_keys_clip(clip.cond_stage_model)
    assert keys == comfy.lora.model_lora_keys_clip(nano_core.cond_stage_model)
    before = embed(clip, TEXT)
    lora = {
        "lora_te_layers_0_self_attn_q_proj.lora_up.weight": torch.randn(256, 4),
        "lora_te_layers_0_self_attn_q_proj.lora_down.weight": torch.randn(4, 192),
    }
    _, patched = comfy.sd.load_lora_for_models(None, clip, lora, 0.0, 0.5)
    assert not torch.equal(embed(patched, TEXT), before)
    assert torch.equal(embed(clip, TEXT), before)


def test_clip_can_be_built_again_for_several_gpus(nano_name, nano_core):
    clip = load(nano_name)
    factory, arguments = clip.patcher.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert again.model is not clip.patcher.model
    clone = clip.patcher.deepclone_multigpu()
    assert clone.model is not clip.patcher.model
    state, core_state = clone.model.state_dict(), nano_core.cond_stage_model.state_dict()
    assert all(torch.equal(state[name], core_state[name]) for name in core_state)


def test_saved_clip_carries_the_tokenizer_to_comfyui(models, sd, wanted):
    folder = hf_folder(models / "text_encoders" / "mine", sd)
    (folder / "tekken.json").write_bytes(as_bytes(tekken()))
    saved = load("mine/model.safetensors").state_dict_for_saving()
    start = "ministral3_3b.transformer."
    weights = {name.removeprefix(start): t for name, t in saved.items() if name.startswith(start)}
    assert torch.equal(embed(core_clip(weights, saved["tekken_model"], SIZES), TEXT), wanted)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "a.b.c."])
def test_any_prefix_is_found(models, sd, wanted, prefix):
    bare = {name.removeprefix("model."): tensor for name, tensor in sd.items()}
    vision = {"vision_tower.transformer.layers.0.attention.q_proj.weight": torch.zeros(4, 4),
              "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
              "multi_modal_projector.linear_1.weight": torch.zeros(4, 4)}  # fmt: skip
    save(models / "text_encoders" / "x.safetensors", {**with_tekken(with_prefix(bare, prefix)), **vision})
    assert torch.equal(embed(load("x.safetensors"), TEXT), wanted)


def test_all_in_one_checkpoint(models, sd, wanted):
    encoder = with_tekken(with_prefix(sd, "text_encoders.ministral3_3b.transformer."), "text_encoders.tekken_model")
    whole = {**with_prefix(ernie_state_dict(), "model.diffusion_model."), **encoder, "vae.decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}
    save(models / "checkpoints" / "aio.safetensors", whole)
    assert torch.equal(embed(load("checkpoints/aio.safetensors"), TEXT), wanted)


def test_huggingface_repository_with_tekken_beside(models, sd, wanted):
    repository = models / "diffusers" / "ERNIE-Image"
    hf_folder(repository / "text_encoder", sd, HF_CONFIG)
    for place in (repository, repository / "tokenizer", repository / "text_encoder"):
        place.mkdir(exist_ok=True)
        (place / "tekken.json").write_bytes(as_bytes(tekken()))
        result = Loader.execute("diffusers/ERNIE-Image/text_encoder", "auto", "comfyui").args
        assert torch.equal(embed(result[0], TEXT), wanted)
        assert "276 tokens from tekken.json" in result[1]
        (place / "tekken.json").unlink()
    assert "no tokenizer" in refused("diffusers/ERNIE-Image/text_encoder")


def test_huggingface_tokenizer_json_beside(models, sd, wanted):
    tekken_tokenizer = tokenizer_module.tokenizer_from_tekken(as_bytes(tekken()), "x")
    folder = hf_folder(models / "text_encoders" / "hf", sd, HF_CONFIG)
    (folder / "tokenizer.json").write_text(tekken_tokenizer._tokenizer.to_str())
    clip = load("hf/model.safetensors")
    assert torch.equal(embed(clip, TEXT), wanted)
    assert "tekken_model" not in clip.get_sd()


def test_shards(models, sd, wanted):
    folder = models / "text_encoders" / "sharded"
    names = sorted(sd)
    for number in (1, 2):
        save(folder / f"model-{number:05d}-of-00002.safetensors", {name: sd[name] for name in names[number - 1 :: 2]})
    (folder / "tekken.json").write_bytes(as_bytes(tekken()))
    assert torch.equal(embed(load("sharded"), TEXT), wanted)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "1 of 2 shards found; missing number 2" in refused("sharded")


def test_tokenizer_of_another_file_can_be_chosen(models, nano_name, sd, wanted):
    save(models / "text_encoders" / "bare.safetensors", sd)
    (models / "text_encoders" / "more").mkdir()
    (models / "text_encoders" / "more" / "tekken.json").write_bytes(as_bytes(tekken()))
    options = {i.id: i.options for i in Loader.define_schema().inputs}
    assert options["tokenizer"] == ["auto", "text_encoders/more/tekken.json", *options["clip_name"]]
    for choice in ("text_encoders/more/tekken.json", nano_name):
        assert torch.equal(embed(load("bare.safetensors", choice), TEXT), wanted)
    assert "bare.safetensors: no tokenizer" in refused(nano_name, "bare.safetensors")
    assert "no such tokenizer file" in refused(nano_name, "text_encoders/../tekken.json")
    assert "not found" in refused(nano_name, "../secret.safetensors")


def test_tied_output_head_is_dropped_and_another_one_is_used(models, sd):  # prompt enhancers in the wild have both
    embeddings = sd["model.embed_tokens.weight"]
    for name, head in (("lm_head.weight", embeddings), ("model.lm_head.weight", embeddings.flip(0))):
        save(models / "text_encoders" / "x.safetensors", with_tekken({**sd, name: head.clone()}))
        clip = load("x.safetensors")
        own = "ministral3_3b.transformer.model.lm_head.weight" in clip.cond_stage_model.state_dict()
        assert own is (name == "model.lm_head.weight")
        generated = clip.generate(clip.tokenize("a"), do_sample=False, max_length=1)
        if not own:
            tied = generated
    assert generated == [275 - tied[0]]


def quantised(sd, format_name, marker=True, layers="_proj.weight"):
    """Quantise the linear layers as published files do."""
    out = dict(sd)
    for name in [n for n in sd if n.endswith(layers)]:
        layout = QUANT_ALGOS[format_name]["comfy_tensor_layout"]
        out.update(QuantizedTensor.from_float(sd[name].float(), layout).state_dict(name))
        if marker:
            out[name.removesuffix("weight") + "comfy_quant"] = torch.tensor(list(json.dumps({"format": format_name}).encode()), dtype=torch.uint8)
    return out


@pytest.mark.parametrize("format_name", ["float8_e4m3fn", "nvfp4", "int8_tensorwise"])
def test_quantised_encoder_equals_comfyui(models, sd, wanted, format_name):
    weights = quantised(sd, format_name)
    save(models / "text_encoders" / "q.safetensors", with_tekken(weights))
    clip = load("q.safetensors")
    assert (embed(clip, TEXT) - wanted).norm() < 0.5 * wanted.norm()
    assert torch.equal(embed(clip, TEXT), embed(core_clip(weights, as_tensor(tekken()), SIZES), TEXT))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_old_fp8_notations_equal_the_new_one(models, sd, prefix):
    new = quantised(sd, "float8_e4m3fn")
    save(models / "text_encoders" / "new.safetensors", with_tekken(new))
    unmarked = {n: t for n, t in new.items() if not n.endswith(".comfy_quant")}
    old = {n.replace(".weight_scale", ".scale_weight"): t for n, t in unmarked.items()} | {"scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn)}
    marker = {prefix + "scaled_fp8": old.pop("scaled_fp8")}
    save(models / "text_encoders" / "old.safetensors", with_tekken({**with_prefix(old, prefix), **marker}))
    save(models / "text_encoders" / "unmarked.safetensors", with_tekken(with_prefix(unmarked, prefix)))
    expected = embed(load("new.safetensors"), TEXT)
    assert torch.equal(embed(load("old.safetensors"), TEXT), expected)
    assert torch.equal(embed(load("unmarked.safetensors"), TEXT), expected)


def test_quantised_embeddings_that_comfyui_cannot_look_up_are_refused(models, sd, wanted):
    for format_name in ("float8_e4m3fn", "nvfp4"):
        rows = quantised({**sd, "model.embed_tokens.weight": sd["model.embed_tokens.weight"][:272]}, format_name, layers="embed_tokens.weight")
        vocabulary = tekken(size=272, specials=16)
        save(models / "text_encoders" / f"{format_name}.safetensors", {**rows, "tekken_model": as_tensor(vocabulary)})
    assert embed(load("float8_e4m3fn.safetensors"), TEXT).isfinite().all()
    assert "embeddings are stored as nvfp4, which cannot be looked up" in refused("nvfp4.safetensors")


def test_plain_fp8_encoder_loads(models, sd, wanted):
    plain = {n: t.to(torch.float8_e4m3fn) if n.endswith("_proj.weight") else t for n, t in sd.items()}
    save(models / "text_encoders" / "x.safetensors", with_tekken(plain))
    assert (embed(load("x.safetensors"), TEXT) - wanted).norm() < 0.5 * wanted.norm()
    assert "plain FP8" in Loader.execute("x.safetensors", "auto", "yarn").args[1]


def layer(sd, number, **changes):
    return {**sd, **{f"model.layers.{number}.{name.replace('__', '.')}": t for name, t in changes.items()}}


ones = torch.ones(64, dtype=torch.bfloat16)
MISTAKES = {
    "a diffusion model": (lambda sd: ernie_state_dict(), r"no Ministral-3 text encoder.*ERNIE-Image diffusion model.*ERNIE Model Loader"),
    "a VAE": (lambda sd: {"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, r"looks like a VAE\. Load it with Load VAE"),
    "a LoRA": (lambda sd: {"diffusion_model.layers.0.x.lora_A.weight": torch.zeros(4, 4)}, "looks like a LoRA"),
    "a T5": (lambda sd: {"encoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(4, 4)}, "T5 text encoder"),
    "a Qwen3": (lambda sd: layer(sd, 0, self_attn__q_norm__weight=ones), "q_norm.weight' is not part of Ministral-3.*Qwen3"),
    "a Qwen2": (lambda sd: layer(sd, 0, self_attn__k_proj__bias=ones), "looks like a Qwen2"),
    "a Gemma": (lambda sd: layer(sd, 0, pre_feedforward_layernorm__weight=ones), "looks like a Gemma"),
    "FP8 of transformers": (lambda sd: layer(sd, 0, self_attn__q_proj__weight_scale_inv=ones[0]), "an FP8 file for transformers"),
    "unknown parts": (lambda sd: layer(sd, 0, mlp__experts__weight=ones), "another text encoder"),
    "a gap": (lambda sd: {n: t for n, t in sd.items() if ".layers.2." not in n}, r"layer 2 is missing \(3 layers found"),
    "two layers": (lambda sd: {n: t for n, t in sd.items() if ".layers.2." not in n and ".layers.3." not in n}, "2 layers found; 3 are needed"),
    "no first layer": (lambda sd: {n: t for n, t in sd.items() if ".layers.0." not in n}, "'layers.0.mlp.gate_proj.weight' is missing"),
    "no embeddings": (lambda sd: {n: t for n, t in sd.items() if "embed" not in n}, "'embed_tokens.weight' is missing"),
    "no final norm": (lambda sd: {n: t for n, t in sd.items() if n != "model.norm.weight"}, "1 Ministral-3 tensors are missing, the first is 'norm.weight'"),
    "a missing tensor": (lambda sd: {n: t for n, t in sd.items() if "3.mlp.up" not in n}, "first is 'layers.3.mlp.up_proj.weight'"),
    "a wrong shape": (lambda sd: layer(sd, 1, mlp__up_proj__weight=ones[None]), r"up_proj.weight' has shape \[1, 64\]; \[96, 64\] is needed"),
    "embeddings of one dimension": (lambda sd: {**sd, "model.embed_tokens.weight": ones}, "2 dimensions"),
    "odd heads": (lambda sd: layer(sd, 0, self_attn__k_proj__weight=ones.expand(100, 64)), "100 key rows do not divide into heads of 128"),
    "a wrong output head": (lambda sd: {**sd, "lm_head.weight": ones[None]}, r"'lm_head.weight' has shape \[1, 64\]; \[276, 64\]"),
    "two encoders": (lambda sd: {**sd, **with_prefix(sd, "pe.")}, "2 language models, behind 'model.' and 'pe.model.'"),
    "a wider Mistral": (lambda sd: encoder_state_dict(hidden_size=5120, intermediate_size=8, num_hidden_layers=3), "Mistral Small 3 24B"),
    "half of the released model": (lambda sd: encoder_state_dict(hidden_size=3072, intermediate_size=8, num_hidden_layers=3), "3 layers found; 26 are needed"),
    "no tokenizer": (lambda sd: {n: t for n, t in sd.items() if n != "tekken_model"}, "no tensor 'tekken_model'.*no tekken.json or tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_wrong_file_gets_one_sentence(models, sd, change, message):  # U21, U25
    changed = {n: t.contiguous().clone() for n, t in change(with_tekken(sd)).items()}
    save(models / "text_encoders" / "x.safetensors", changed)
    assert re.match(f"x.safetensors: .*{message}", refused("x.safetensors"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 128}, "width 64, but config.json says hidden_size = 128"),
        ({"num_hidden_layers": 26}, "4 layers found; 26 are needed"),
        ({"head_dim": 100}, "heads of 100"),
        ({"head_dim": "128"}, "head_dim = '128'"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"rms_norm_eps": 2.0}, "rms_norm_eps = 2.0"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "type 'llama3'"),
    ],
)
def test_config_that_does_not_fit_is_refused(models, sd, config, message):
    folder = hf_folder(models / "text_encoders" / "hf", sd, {"model_type": "ministral3", **config})
    (folder / "tekken.json").write_bytes(as_bytes(tekken()))
    assert message in refused("hf/model.safetensors")


def test_config_of_another_model_in_a_shared_folder_does_not_matter(models, sd, wanted):
    folder = hf_folder(models / "text_encoders" / "all", sd, {"model_type": "qwen3", "hidden_size": 9, "head_dim": 3})
    (folder / "tekken.json").write_bytes(as_bytes(tekken()))
    assert torch.equal(embed(load("all/model.safetensors"), TEXT), wanted)


def test_epsilon_and_head_size_of_the_config_are_used(models, sd):
    for text_config in ({"head_dim": 64}, {"rms_norm_eps": 0.1}):
        folder = hf_folder(models / "text_encoders" / "hf", sd, {"model_type": "mistral3", "text_config": text_config})
        (folder / "tekken.json").write_bytes(as_bytes(tekken()))
        config = load("hf/model.safetensors").cond_stage_model.ministral3_3b.transformer.model.config
        assert config.head_dim == text_config.get("head_dim", 128)
        assert config.num_attention_heads * config.head_dim == 256
        assert config.rms_norm_eps == text_config.get("rms_norm_eps", 1e-5)


def test_vocabulary_larger_than_the_embeddings_is_refused(models, sd):
    big = {**sd, "tekken_model": as_tensor(tekken(size=300))}
    save(models / "text_encoders" / "x.safetensors", big)
    with pytest.raises(CheckpointError, match=r"has 300 tokens, but the text encoder x\.safetensors has rows for 276"):
        Loader.execute("x.safetensors", "auto", "yarn")


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)])
def test_tokenizer_tensor_that_is_no_text_is_refused(models, sd, tensor):
    save(models / "text_encoders" / "x.safetensors", {**sd, "tekken_model": tensor})
    with pytest.raises(CheckpointError, match=r"x.safetensors: 'tekken_model' is .* bytes \(U8"):
        Loader.execute("x.safetensors", "auto", "yarn")


def test_huge_tokenizer_file_is_not_read(models, sd):
    folder = hf_folder(models / "text_encoders" / "hf", sd)
    with (folder / "tekken.json").open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="1,073,741,824 bytes; at most 67,108,864"):
        Loader.execute("hf/model.safetensors", "auto", "yarn")


@pytest.mark.parametrize("name", ["gone.safetensors", "", "../x.safetensors", "/etc/passwd"])
def test_name_that_is_not_in_the_list_is_refused(models, name):
    assert "not found in ComfyUI's folder 'text_encoders'" in refused(name)


def test_linked_inputs_are_left_to_the_run(models, nano_name):
    assert Loader.validate_inputs(None, None, None) is True
    assert Loader.validate_inputs(nano_name, None, None) is True
    assert Loader.fingerprint_inputs(None, "auto", "yarn") == Loader.fingerprint_inputs(None, "auto", "yarn")
    assert "rope 'ntk'; choose one of" in str(Loader.validate_inputs(nano_name, "auto", "ntk"))


def test_fingerprint_changes_with_the_files_and_the_choices(models, sd):
    folder = hf_folder(models / "text_encoders" / "hf", sd)
    (folder / "tekken.json").write_bytes(as_bytes(tekken()))
    name = "hf/model.safetensors"
    seen = {Loader.fingerprint_inputs(name, "auto", "yarn"), Loader.fingerprint_inputs(name, "auto", "comfyui")}
    for number, file in enumerate((folder / "tekken.json", folder / "model.safetensors")):
        os.utime(file, (number, number))
        seen.add(Loader.fingerprint_inputs(name, "auto", "yarn"))
    assert len(seen) == 4


def test_every_input_and_output_has_a_tooltip_and_the_help_page_names_them(request):
    schema = Loader.define_schema()
    page = (request.config.rootpath / "web" / "docs" / "ErnieFastTextEncoderLoader.md").read_text(encoding="utf-8")
    for part in (*schema.inputs, *schema.outputs):
        assert part.tooltip
    for part in schema.inputs:
        assert f"**{part.id}**" in page
