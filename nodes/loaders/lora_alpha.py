"""The strength that PEFT and diffusers write outside of a LoRA's tensors.

kohya-style files hold an `alpha` tensor per module. PEFT keeps it in `adapter_config.json` beside the file, diffusers in
the header as `lora_adapter_metadata`. ComfyUI reads neither and takes alpha = rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..model.checkpoint import Checkpoint, CheckpointError, read_json

_HEADER = "lora_adapter_metadata"
_PEFT_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class StatedAlpha:
    """What a configuration says of alpha: for all modules, for single ones, and whether it is rank-stabilised."""

    alpha: float | None = None
    pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False

    def of(self, module: str, rank: int) -> float | None:
        """Return the alpha to use with scale = alpha / rank; None where nothing is stated.

        Rank-stabilised LoRA scales by alpha / sqrt(rank) instead (arXiv 2312.03732).
        """
        named = (value for name, value in self.pattern.items() if module == name or module.endswith(f".{name}"))
        alpha = next(named, self.alpha)
        if alpha is None:
            return None
        return alpha * math.sqrt(rank) if self.rslora else alpha


def stated_alpha(checkpoint: Checkpoint, part: str) -> StatedAlpha:
    """Read alpha from the header, or from `adapter_config.json` beside a PEFT file.

    Args:
        checkpoint: the open LoRA file.
        part: "transformer" or "text_encoder", as diffusers prefixes the header's entries.

    Raises: CheckpointError when the configuration is broken: the strength would be a guess.
    """
    label = checkpoint.label
    if _HEADER in checkpoint.metadata:
        try:
            config = json.loads(checkpoint.metadata[_HEADER])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{label}: the header's {_HEADER} is not valid JSON ({error}). Save the LoRA again.") from error
        entries = config.items() if isinstance(config, dict) else ()
        return _parse({name.removeprefix(f"{part}."): value for name, value in entries if name.startswith(f"{part}.")}, label)
    file = checkpoint.files[0].with_name("adapter_config.json")
    if checkpoint.files[0].name == _PEFT_FILE and file.is_file():
        config = read_json(file, label)
        return _parse(config if isinstance(config, dict) else {}, label)
    return StatedAlpha()


def _parse(config: Mapping[str, Any], label: str) -> StatedAlpha:
    alpha, pattern = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    values = [*([] if alpha is None else [alpha]), *(pattern.values() if isinstance(pattern, dict) else [pattern])]
    if any(type(value) not in (int, float) or not math.isfinite(value) for value in values):
        raise CheckpointError(
            f"{label}: lora_alpha is {alpha!r:.40} and alpha_pattern {pattern!r:.80}; numbers are needed. Save the LoRA again."
        )
    return StatedAlpha(alpha, pattern, config.get("use_rslora") is True)
