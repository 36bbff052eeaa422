"""The tensor names and the row order of llama.cpp's GGUF files, in terms of the encoder's own.

llama.cpp rotates neighbouring pairs of a head, the encoder its two halves: the converter sorts the rows of q and k for that.
Weights in Mistral's own format have llama.cpp's order from the start, so every file with these names has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

SIGNATURE = re.compile(r"^((?:.*\.)?)blk\.\d+\.attn_q\.weight$")
# Towers for pictures and sound, in a file of their own (mmproj) or beside the language model; never needed.
TOWERS = ("v", "a", "mm")

_LAYER = re.compile(r"^blk\.(\d{1,5})\.(\w+)\.(.+)$")
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    # Of other models: only so that the message can say of which.
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# Rotary tables that some converters add; the positions come from the metadata.
_UNUSED = ("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd")


def encoder_names(names: Iterable[str]) -> dict[str, str]:
    """Return llama.cpp's name -> the encoder's, for the tensors that are part of a language model.

    Args:
        names: the names in the file, without a prefix. A name inside a layer that is not known keeps its last part.
    """
    out: dict[str, str] = {}
    for name in names:
        match = _LAYER.match(name)
        module, _, kind = name.partition(".")
        if match and match[2] not in _UNUSED:
            out[name] = f"layers.{match[1]}.{_IN_LAYER.get(match[2], match[2])}.{match[3]}"
        elif module in _WHOLE:
            out[name] = f"{_WHOLE[module]}.{kind}"
    return out


def is_permuted(name: str) -> bool:
    """True for the encoder's names of the weights whose rows llama.cpp's converter sorts."""
    return name.endswith((".self_attn.q_proj.weight", ".self_attn.k_proj.weight"))


def unpermute(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows (O, ...) of a q or k weight in the encoder's order, as a copy.

    Each row is stored on its own, so this is exact for quantised weights too.
    """
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
