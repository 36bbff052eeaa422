"""The transformer blocks of one forward: each behind its replacement where there is one, any range of them.

Symbols: B batch, S tokens (image tokens first, then text), D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .attention import attend, has_attention_hooks

BLOCK_HOOK = "ernie_fast_blocks"
ATTENTION_HOOK = "ernie_fast_attention"


class BlockHook(Protocol):
    """What may stand in `transformer_options[BLOCK_HOOK]`: it decides which blocks run."""

    def __call__(self, blocks: Blocks, hidden_states: torch.Tensor) -> torch.Tensor:
        """Take the embedded tokens (B, S, D) and return what the last block would."""
        ...


class AttentionHook(Protocol):
    """What may stand in `transformer_options[ATTENTION_HOOK]`: it may answer in place of a block's attention."""

    def __call__(self, block: int, attention: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return (B, S, D), from `attention()` or from elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one call with all that they need.

    rope: (B, S, 1, E / 2, 2, 2) fp32. modulation: six tensors (B, 1, D), the shared AdaLN. mask: (B, 1, 1, S), added to the attention scores, or None.
    """

    layers: Any
    rope: torch.Tensor
    modulation: list[torch.Tensor]
    mask: torch.Tensor | None
    image_tokens: int
    options: dict[str, Any]

    def __len__(self) -> int:
        return len(self.layers)

    def run(self, hidden_states: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Run the blocks from `start` up to `stop` (excluded; None: the end): (B, S, D) -> (B, S, D)."""
        layers = list(self.layers)[start:stop]
        queue = _prefetch_queue(layers, hidden_states.device, self.options)
        for index, layer in enumerate(layers, start):
            self.options["block_index"] = index
            _prefetch(queue, hidden_states.device, layer)
            hidden_states = self._run_one(index, layer, hidden_states)
        _prefetch(queue, hidden_states.device, None)
        return hidden_states

    def _run_one(self, index: int, layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        replacements = self.options.get("patches_replace", {}).get("dit", {})
        own = ATTENTION_HOOK in self.options or has_attention_hooks(self.options)

        def run(x: torch.Tensor, rope: torch.Tensor, modulation: list[torch.Tensor]) -> torch.Tensor:
            if own:
                return _block(layer, x, rope, modulation, self.mask, self.options)
            return layer(x, rope, modulation, attention_mask=self.mask)

        if ("double_block", index) in replacements:
            return self._replaced(replacements["double_block", index], run, hidden_states, self.image_tokens)
        if ("single_block", index) in replacements:
            return self._replaced(replacements["single_block", index], run, hidden_states, None)
        return run(hidden_states, self.rope, self.modulation)

    def _replaced(
        self, replacement: Any, run: Callable[..., torch.Tensor], hidden_states: torch.Tensor, split: int | None
    ) -> torch.Tensor:
        """Run a replacement as Flux does: tokens split into "img" and "txt" (double block), or all as "img" (single)."""
        names = ("img",) if split is None else ("img", "txt")

        def parts(x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"img": x} if split is None else {"img": x[:, :split], "txt": x[:, split:]}

        def original(args: dict[str, Any]) -> dict[str, torch.Tensor]:
            return parts(run(torch.cat([args[name] for name in names], dim=1), args["pe"], args["vec"]))

        shared = {"vec": self.modulation, "pe": self.rope, "attn_mask": self.mask, "transformer_options": self.options}
        out = replacement({**parts(hidden_states), **shared}, {"original_block": original})
        return torch.cat([out[name] for name in names], dim=1)


def _block(
    layer: Any, x: torch.Tensor, rope: torch.Tensor, modulation: list[torch.Tensor], mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """One block as ComfyUI's `ErnieImageSharedAdaLNBlock` computes it, with our attention: (B, S, D) -> (B, S, D)."""
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation

    def attention() -> torch.Tensor:
        normalised = layer.adaLN_sa_ln(x) * (1 + scale_msa) + shift_msa
        return attend(layer.self_attention, normalised, rope, mask, options)

    hook: AttentionHook | None = options.get(ATTENTION_HOOK)
    x = x + gate_msa * (attention() if hook is None else hook(options["block_index"], attention))
    normalised = layer.adaLN_mlp_ln(x) * (1 + scale_mlp) + shift_mlp
    return x + gate_mlp * layer.mlp(normalised)


def _prefetch_queue(layers: list[Any], device: torch.device, options: dict[str, Any]) -> Any:
    """Return ComfyUI's queue for streaming the next block while this one runs; None where it is not in use."""
    try:
        from comfy.model_prefetch import make_prefetch_queue
    except ImportError:  # before ComfyUI's dynamic VRAM
        return None
    return make_prefetch_queue(layers, device, options)


def _prefetch(queue: Any, device: torch.device, layer: Any) -> None:
    if queue is not None:
        from comfy.model_prefetch import prefetch_queue_pop

        prefetch_queue_pop(queue, device, layer)
