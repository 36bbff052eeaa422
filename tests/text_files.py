"""Small Ministral-3 text encoders and tekken tokenizers in every form, and ComfyUI's own loading of them to compare with."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import comfy.text_encoders.ernie as core_ernie
import comfy.text_encoders.llama as llama
import torch
from comfy.text_encoders.hunyuan_video import llama_detect
from ernie_fast.nodes.text import gguf_vocabulary
from ernie_fast.nodes.text.tokenizer import parse_tekken
from gguf_files import write_gguf

SIZES = {
    "vocab_size": 276, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
NANO_SIZES = {**SIZES, "hidden_size": 192, "intermediate_size": 512}
SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
PROMPTS = (
    "", " ", "a red apple on a blue background", "  two  spaces ", "tabs\tand\nlines\r\n\r\n  end\n", "don't we'll I'VE O'Neill",
    "HelloWorld camelCase SHOUT ÀÉÎ straße", "1 22 333 4444 55555 3.14 1,024x1,024", "(a:1.3) [b] {c|d} \\(e\\)", "一只红色的苹果，在蓝色背景上。",
    "日本語のテキスト 한국어 텍스트", "Привет, мир! مرحبا بالعالم שלום", "👩‍🚀🏽 🎨 🇫🇷 emoji", "e\u0301 ﬁ ½ ①\u200b\ufeff\u00a0x", "<s>", "</s> [INST] x [/INST]",
    "[SYSTEM_PROMPT]a[/SYSTEM_PROMPT][INST]{\"prompt\": \"b\"}[/INST]", "<SPECIAL_19> <s", "!!!???...---___///", "\x00\x01\x7f",
)  # fmt: skip


def tekken(size: int = 276, specials: int = 20, seed: int = 0, **config: Any) -> dict[str, Any]:
    """Return a tekken document: single bytes, then random pairs of earlier tokens, as byte-pair training gives.

    Args:
        size: number of tokens, special ones included.
        specials: number of special tokens.
        config: fields of `config` to add.
    """
    rng = random.Random(seed)
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    frequent = [bytes([byte]) for byte in b" etaoinshrdlucmfwypvbgkjqxz,.ETAOIN"]
    while len(tokens) < size - specials:
        left = tokens[int(len(tokens) * rng.random() ** 2)]
        right = rng.choice(frequent) if rng.random() < 0.4 else tokens[int(len(tokens) * rng.random() ** 3)]
        if len(left + right) <= 16 and left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
    names = [SPECIALS[i] if i < len(SPECIALS) else f"<SPECIAL_{i}>" for i in range(specials)]
    return {
        "config": {"default_vocab_size": size, "default_num_special_tokens": specials, **config},
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)],
    }


def split_as_released(document: dict[str, Any]) -> dict[str, Any]:
    """Return a tekken document with the pattern of Ministral-3's own, which a GGUF file leaves out."""
    return {**document, "config": {**document["config"], "pattern": gguf_vocabulary._PATTERN}}


def as_bytes(document: Any) -> bytes:
    """Return the JSON text of a document."""
    return json.dumps(document).encode()


def as_tensor(document: Any) -> torch.Tensor:
    """Return the JSON text of a document as the uint8 tensor of a text encoder file."""
    return torch.frombuffer(bytearray(as_bytes(document)), dtype=torch.uint8)


def encoder_state_dict(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> dict[str, torch.Tensor]:
    """Return random weights of a small encoder under ComfyUI's names ("model.layers...")."""
    module = llama.Ministral3_3B({**SIZES, **sizes}, torch.float32, "cpu", comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(0)
    out = {}
    for name, tensor in module.state_dict().items():
        value = torch.randn(tensor.shape, generator=generator) * (0.1 if tensor.dim() > 1 else 0.05)
        out[name] = (value + (tensor.dim() == 1)).to(dtype)
    return out


def core_clip(sd: dict[str, torch.Tensor], tekken_model: torch.Tensor, sizes: dict[str, int]) -> comfy.sd.CLIP:
    """Load an encoder with ComfyUI's own classes alone, at another size than the released one."""

    class Target:
        params: dict[str, Any] = {}  # noqa: RUF012
        clip = core_ernie.te(**llama_detect(sd))
        tokenizer = core_ernie.ErnieTokenizer

    return comfy.sd.CLIP(
        Target,
        tokenizer_data={"tekken_model": tekken_model},
        state_dict=[dict(sd)],
        model_options={"ministral3_3b_model_config": sizes},
    )


def embed(clip: comfy.sd.CLIP, text: str) -> torch.Tensor:
    """Return the condition of a text as CLIPTextEncode makes it."""
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))[0][0]


def hf_folder(folder: Path, sd: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    """Write a Hugging Face text_encoder folder and return it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(sd, str(folder / "model.safetensors"))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA_CPP_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def llama_cpp_state_dict(sd: dict[str, torch.Tensor], permute: bool = True) -> dict[str, torch.Tensor]:
    """Return an encoder's weights as llama.cpp's converter names and sorts them, with heads of 128."""
    out = {}
    for name, tensor in sd.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")) and permute:
            heads = tensor.shape[0] // 128
            tensor = tensor.reshape(heads, 2, 64, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        parts = name.removeprefix("model.").removesuffix(".weight").split(".")
        if parts[0] == "layers":
            out[f"blk.{parts[1]}.{LLAMA_CPP_NAMES['.'.join(parts[2:])]}.weight"] = tensor
        else:
            out[f"{LLAMA_CPP_NAMES[parts[0]]}.weight"] = tensor
    return out


def vocabulary_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return a tekken document as llama.cpp's converter writes it: the vocabulary of a GGUF file."""
    parsed = parse_tekken(as_bytes(document), "tekken")
    pairs = zip(parsed.merges[::2], parsed.merges[1::2], strict=True)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": [*parsed.specials, *parsed.tokens],
        "tokenizer.ggml.token_type": [3] * len(parsed.specials) + [1] * len(parsed.tokens),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    # gguf-py writes no empty list.
    return {key: value for key, value in fields.items() if value != []}


def encoder_fields(sd: dict[str, torch.Tensor], architecture: str = "mistral3") -> dict[str, Any]:
    """Return what llama.cpp's converter writes about a Ministral-3 encoder of this size."""
    start = f"{architecture}."
    return {
        f"{start}block_count": 1 + max(int(name.split(".")[2]) for name in sd if ".layers." in name),
        f"{start}context_length": 262144,
        f"{start}embedding_length": sd["model.norm.weight"].numel(),
        f"{start}feed_forward_length": sd["model.layers.0.mlp.up_proj.weight"].shape[0],
        f"{start}attention.head_count": sd["model.layers.0.self_attn.q_proj.weight"].shape[0] // 128,
        f"{start}attention.head_count_kv": sd["model.layers.0.self_attn.k_proj.weight"].shape[0] // 128,
        f"{start}attention.key_length": 128,
        f"{start}attention.value_length": 128,
        f"{start}attention.layer_norm_rms_epsilon": 1e-5,
        f"{start}attention.temperature_scale": 0.1,
        f"{start}rope.freq_base": 1e6,
        f"{start}rope.dimension_count": 128,
        f"{start}rope.scaling.type": "yarn",
        f"{start}rope.scaling.factor": 16.0,
        f"{start}rope.scaling.original_context_length": 16384,
        f"{start}rope.scaling.yarn_beta_fast": 32.0,
        f"{start}rope.scaling.yarn_beta_slow": 1.0,
        f"{start}rope.scaling.yarn_log_multiplier": 1.0,
    }


def write_gguf_encoder(
    path: Path,
    sd: dict[str, torch.Tensor],
    qtype: str = "F32",
    *,
    document: dict[str, Any] | None = None,
    architecture: str | None = "mistral3",
    fields: dict[str, Any] | None = None,
    more: dict[str, torch.Tensor] | None = None,
    types: dict[str, str] | None = None,
) -> Path:
    """Write a text encoder as llama.cpp does: its names, sorted q and k rows, vectors in FP32, its metadata, a vocabulary.

    Args:
        path: the file.
        sd: the weights under ComfyUI's names ("model.layers...").
        qtype: the GGUF type of the matrices.
        document: the tekken document of the vocabulary; None for the smallest one.
        architecture: `general.architecture`; None leaves it out.
        fields: changes to the key-value data; None as a value leaves a key out.
        more: more tensors, by their name in the file.
        types: part of a name -> another type than `qtype`.
    """
    tensors = {**llama_cpp_state_dict(sd), **(more or {})}
    stated = {**encoder_fields(sd), **vocabulary_fields(document or tekken()), **(fields or {})}
    stated = {key: value for key, value in stated.items() if value is not None}

    def type_of(name: str) -> str:
        if tensors[name].dim() == 1:
            return "F32"
        return next((other for part, other in (types or {}).items() if part in name), qtype)

    return write_gguf(path, tensors, type_of, architecture, stated)
