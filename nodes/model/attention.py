"""ERNIE's joint attention with the hooks that ComfyUI's other models have: attention patches and a per-model override.

Symbols: B batch, S tokens (image tokens first, then text), H heads, E head size.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
import comfy.quant_ops
import torch
from comfy.ldm.modules.attention import optimized_attention


def has_attention_patches(options: dict[str, Any]) -> bool:
    """True when a patch wants to see the attention's inputs or output."""
    patches = options.get("patches", {})
    return "attn1_patch" in patches or "attn1_output_patch" in patches


def has_attention_hooks(options: dict[str, Any]) -> bool:
    """True when something wants to change the attention, so that ComfyUI's own block cannot be called."""
    return "optimized_attention_override" in options or has_attention_patches(options)


def attend(
    module: Any, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of one block, as ComfyUI's `ErnieImageAttention` computes it, with hooks.

    Args:
        module: the block's `self_attention`.
        x: (B, S, H * E), the normalised and modulated input.
        rope: (B, S, 1, E / 2, 2, 2) fp32, from the model's `pos_embed`.
        mask: (B, 1, 1, S), added to the attention scores, or None.
        options: the call's `transformer_options` with "img_slice" and "block_index".

    Returns: (B, S, H * E), dtype of x.
    """
    batch, tokens, _ = x.shape
    patches = options.get("patches", {})
    query = module.to_q(x).view(batch, tokens, module.heads, module.head_dim)
    key = module.to_k(x).view(batch, tokens, module.heads, module.head_dim)
    value = module.to_v(x)
    if "attn1_patch" in patches:
        query, key, value, mask = _patched(module, query, key, value, rope, mask, options)
    else:
        query, key = _norm_and_rotate(module, query, key, rope)
    query, key = query.reshape(batch, tokens, -1), key.reshape(batch, tokens, -1)
    out = optimized_attention(query, key, value, module.heads, mask=mask, transformer_options=options)
    extra_options = {**options, "n_heads": module.heads, "dim_head": module.head_dim}
    for patch in patches.get("attn1_output_patch", ()):
        out = patch(out, extra_options)
    return module.to_out[0](out)


def _norm_and_rotate(
    module: Any, query: torch.Tensor, key: torch.Tensor, rope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm and rotation of query and key, (B, S, H, E) each, in comfy-kitchen's one pass."""
    q_scale, _, q_stream = comfy.ops.cast_bias_weight(module.norm_q, query, offloadable=True)
    k_scale, _, k_stream = comfy.ops.cast_bias_weight(module.norm_k, key, offloadable=True)
    query, key = comfy.quant_ops.ck.rms_rope_split_half(query, key, rope, q_scale, k_scale, module.norm_q.eps)
    comfy.ops.uncast_bias_weight(module.norm_q, q_scale, None, q_stream)
    comfy.ops.uncast_bias_weight(module.norm_k, k_scale, None, k_stream)
    return query, key


def _patched(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rope: torch.Tensor,
    mask: torch.Tensor | None, options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Hand normalised query, key and value to the patches as (B, H, S, E), before the rotation, as Flux does."""
    batch, tokens = query.shape[:2]
    q, k = module.norm_q(query).transpose(1, 2), module.norm_k(key).transpose(1, 2)
    v = value.view(batch, tokens, module.heads, module.head_dim).transpose(1, 2)
    extra_options = {**options, "n_heads": module.heads, "dim_head": module.head_dim}
    for patch in options["patches"]["attn1_patch"]:
        out = patch(q, k, v, pe=rope, attn_mask=mask, extra_options=extra_options)
        q, k, v = out.get("q", q), out.get("k", k), out.get("v", v)
        rope, mask = out.get("pe", rope), out.get("attn_mask", mask)
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    q, k = comfy.quant_ops.ck.apply_rope_split_half(q, k, rope)
    return q, k, v.transpose(1, 2).reshape(batch, tokens, -1), mask
