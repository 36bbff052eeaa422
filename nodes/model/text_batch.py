"""Prompts of different lengths in one forward, for patches that compare them.

ComfyUI runs conditions of different lengths one after another. NAG and patches like it compare the rows of prompt and negative
prompt, and do nothing then. While an attention patch is present, prompts are padded to one length, so that they share a
forward; the mask and the positions of `positions.py` keep each picture independent of the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import comfy.conds
import torch

from .attention import has_attention_patches
from .positions import TEXT_LENGTHS

_TEXT = "c_crossattn"


class TextLength:
    """A condition of ComfyUI that holds the number of text tokens before padding, one for each picture of a batch."""

    def __init__(self, cond: tuple[int, ...]) -> None:
        self.cond = cond

    def process_cond(self, batch_size: int, **_: Any) -> TextLength:
        """Repeat for a batch."""
        return TextLength(self.cond * batch_size)

    def can_concat(self, other: Any) -> bool:
        """Lengths may always stand in one batch."""
        return isinstance(other, TextLength)

    def concat(self, others: Sequence[TextLength]) -> tuple[int, ...]:
        """Return the lengths of the whole batch."""
        return sum((other.cond for other in others), self.cond)

    def size(self) -> list[int]:
        """Return the shape, for ComfyUI's memory estimate."""
        return [len(self.cond)]


def with_padding(executor: Any, model: Any, conds: list[Any], x: Any, timestep: Any, model_options: dict[str, Any]) -> Any:
    """Pad the prompts of one evaluation (CALC_COND_BATCH) where an attention patch compares them."""
    if has_attention_patches(model_options.get("transformer_options", {})):
        conds = _padded(conds)
    return executor(model, conds, x, timestep, model_options)


def _padded(conds: list[Any]) -> list[Any]:
    entries = [entry for cond in conds if cond is not None for entry in cond]
    texts = [entry.get("model_conds", {}).get(_TEXT) for entry in entries]
    lengths = {text.cond.shape[1] for text in texts if text is not None}
    if len(lengths) < 2 or any(text is None or text.cond.shape[0] != 1 for text in texts):
        return conds
    longest = max(lengths)

    def pad(entry: dict[str, Any]) -> dict[str, Any]:
        text = entry["model_conds"][_TEXT].cond
        padded = torch.nn.functional.pad(text, (0, 0, 0, longest - text.shape[1]))
        added = {_TEXT: comfy.conds.CONDRegular(padded), TEXT_LENGTHS: TextLength((text.shape[1],))}
        return {**entry, "model_conds": {**entry["model_conds"], **added}}

    return [None if cond is None else [pad(entry) for entry in cond] for cond in conds]
