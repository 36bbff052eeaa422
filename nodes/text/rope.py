"""Rotary positions of Ministral-3: YaRN, as the reference computes them, or ComfyUI's plain ones.

YaRN (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", arXiv 2309.00071) divides the
low frequencies by a factor, leaves the high ones alone and blends linearly between. ComfyUI 0.30.0 leaves it out: its
phase is off by up to 0.32 rad at token 256. The reference also scales the queries by the position (as Llama 4 does);
that scale is exactly 1 below `original_max_position_embeddings` (16,384) tokens and is not done here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.text_encoders.llama as llama
import torch

from ..model.checkpoint import CheckpointError

ROPE = ("yarn", "comfyui")
_DEFAULT_THETA = 1e6


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's numbers; the defaults are those of Ministral-3.

    Args:
        factor: what the lowest frequencies are divided by.
        original_max_position_embeddings: context length, in tokens, of the first training.
        beta_fast, beta_slow: frequencies with more (fewer) turns than this over that length stay (are divided fully).
        attention_scale: factor on cos and sin.
        truncate: round the blend's borders outwards to whole frequencies.
    """

    factor: float = 16.0
    original_max_position_embeddings: float = 16384.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_scale: float = 1.0
    truncate: bool = True

    def divisors(self, head_dim: int, theta: float) -> torch.Tensor:
        """Return (head_dim / 2,) fp32: what each frequency of plain RoPE is divided by, 1 to `factor`."""
        low, high = (self._border(turns, head_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        index = torch.arange(head_dim // 2, dtype=torch.float32)
        # A width of 0.001 for equal borders, as in the reference: a step instead of a division by zero.
        divided = ((index - low) / ((high - low) or 0.001)).clamp(0, 1)
        return 1 / (divided / self.factor + (1 - divided))

    def _border(self, turns: float, head_dim: int, theta: float) -> float:
        """Return the index of the frequency that makes this many turns over the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one encoder: the base `theta`, and YaRN or None for plain RoPE."""

    theta: float = _DEFAULT_THETA
    yarn: Yarn | None = None


def rope_from_config(config: Mapping[str, Any], choice: str, label: str, where: str = "config.json") -> Rope:
    """Read the rotary positions from a Hugging Face configuration; what it leaves out is as in Ministral-3.

    Args:
        config: the text part of a `config.json`, or {}.
        choice: one of ROPE; "comfyui" takes nothing but theta.
        label: the file, for messages.
        where: where the configuration is from, for messages.

    Raises: CheckpointError for a kind of RoPE that is not known, or a number that makes no sense.
    """
    if choice not in ROPE:
        raise CheckpointError(f"{label}: rope '{choice}'; choose one of {', '.join(ROPE)}.")
    # transformers 5 writes `rope_parameters`, transformers 4 `rope_scaling` with theta beside it.
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"{label}: {where} has RoPE parameters of type {type(found).__name__}; a map is needed."
        )
    source = f"{label}: {where}"
    theta = _number({**config, **found}, "rope_theta", _DEFAULT_THETA, source, above=1.0)
    kind = found.get("rope_type", found.get("type", "yarn"))
    if choice == "comfyui" or kind == "default":
        return Rope(theta)
    if kind != "yarn":
        raise CheckpointError(
            f"{label}: {where} asks for RoPE of type '{kind}'; 'yarn' and 'default' are known. "
            "Set rope to 'comfyui' for plain RoPE, or use the config.json of Ministral-3."
        )
    base = Yarn()
    numbers = {
        name: _number(found, name, getattr(base, name), source, above=0.0)
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    }
    scale = _attention_scale(found, numbers["factor"], source)
    return Rope(theta, Yarn(**numbers, attention_scale=scale, truncate=bool(found.get("truncate", True))))


def _attention_scale(found: Mapping[str, Any], factor: float, source: str) -> float:
    """Return the factor on cos and sin: as stated, or from the two `mscale` numbers (equal in Ministral-3: 1)."""
    if found.get("attention_factor") is not None:
        return _number(found, "attention_factor", 1.0, source, above=0.0)
    if "factor" not in found:  # nothing of YaRN is stated: Ministral-3's own numbers, with equal mscale
        return 1.0

    def growth(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):
        mscale, all_dim = (_number(found, name, 1.0, source, above=0.0) for name in ("mscale", "mscale_all_dim"))
        return growth(mscale) / growth(all_dim)
    return growth(1.0)


def _number(found: Mapping[str, Any], name: str, default: float, source: str, above: float) -> float:
    value = found.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < 1e12:
        raise CheckpointError(f"{source} has {name} = {value!r:.40}; a number above {above:g} is needed.")
    return float(value)


class RopeLlama(llama.Llama2_):
    """ComfyUI's Llama transformer with the positions of a Rope.

    ComfyUI divides its frequencies by `config.rope_scale`. One divisor per frequency there is all that YaRN needs, and
    the layout of the result stays ComfyUI's own.

    Args:
        config: ComfyUI's configuration object of this one model; `rope_theta` and `rope_scale` are set on it.
        rope: the positions.
        device, dtype, ops: as in the base class.
    """

    def __init__(self, config: Any, rope: Rope, device: Any = None, dtype: Any = None, ops: Any = None) -> None:
        config.rope_theta = rope.theta
        config.rope_scale = None if rope.yarn is None else rope.yarn.divisors(config.head_dim, rope.theta)
        super().__init__(config, device=device, dtype=dtype, ops=ops)
        self.attention_scale = 1.0 if rope.yarn is None else rope.yarn.attention_scale

    def compute_freqs_cis(self, position_ids: torch.Tensor, device: torch.device) -> Any:
        """Return ComfyUI's (cos, sin, -sin) for positions (B, N), on `device`, in fp32."""
        if self.config.rope_scale is not None:
            self.config.rope_scale = self.config.rope_scale.to(device)
        freqs = super().compute_freqs_cis(position_ids, device)
        return freqs if self.attention_scale == 1.0 else tuple(part * self.attention_scale for part in freqs)
