"""Where each token stands: rotary tables and the text mask, for equal and for padded prompts.

Symbols: B batch, N image tokens, T text tokens, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ROPE_CACHE = "ernie_fast_rope"
TEXT_LENGTHS = "text_lengths"


class RopeCache:
    """The rotary tables of one sampling run: they depend on the sizes alone, not on the step."""

    def __init__(self) -> None:
        self.tables: dict[tuple[Any, ...], torch.Tensor] = {}


def pad_text(contexts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Put prompts of different lengths into one batch.

    Args:
        contexts: (B_i, T_i, width) each.

    Returns: (sum of B_i, longest T, width), zeros after each prompt's end; and the length of each row, which belongs into
        `transformer_options["text_lengths"]`.
    """
    longest = max(context.shape[1] for context in contexts)
    rows = [torch.nn.functional.pad(context, (0, 0, 0, longest - context.shape[1])) for context in contexts]
    return torch.cat(rows), tuple(context.shape[1] for context in contexts for _ in range(context.shape[0]))


def text_lengths(options: dict[str, Any], batch: int, text_tokens: int) -> tuple[int, ...]:
    """Return the number of text tokens of each row: all of them unless `transformer_options["text_lengths"]` says less.

    Raises: ValueError when the lengths do not fit the batch.
    """
    if TEXT_LENGTHS not in options:
        return (text_tokens,) * batch
    lengths = tuple(options[TEXT_LENGTHS])
    if len(lengths) != batch or not all(1 <= length <= text_tokens for length in lengths):
        raise ValueError(
            f"text_lengths is {lengths}; {batch} numbers from 1 to {text_tokens} are needed, one for each picture of the "
            "batch. Give the lengths that pad_text returned, in the order of the batch."
        )
    return lengths


def text_mask(
    lengths: tuple[int, ...], image_tokens: int, text_tokens: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return (B, 1, 1, N + T), 0 where a token may be looked at and the lowest number elsewhere; None without padding.

    Numbers and not booleans, because some of ComfyUI's attention functions add the mask whatever its dtype.
    """
    if all(length == text_tokens for length in lengths):
        return None
    ends = torch.tensor(lengths, device=device).view(-1, 1, 1, 1) + image_tokens
    hidden = torch.arange(image_tokens + text_tokens, device=device) >= ends
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


def rope_table(
    model: Any, lengths: tuple[int, ...], rows: int, columns: int, text_tokens: int, device: torch.device,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Return the rotary table (B, N + T, 1, E / 2, 2, 2) fp32, from the run's cache where it is there."""
    rope_options = options.get("rope_options") or {}
    # Outside of a sampling run nothing would free a table; it is not kept then.
    tables = options[ROPE_CACHE].tables if ROPE_CACHE in options else {}
    key = (lengths, rows, columns, text_tokens, device, *sorted(rope_options.items()))
    if key not in tables:
        tables[key] = model.pos_embed(position_ids(lengths, rows, columns, text_tokens, device, rope_options))
    return tables[key]


def position_ids(
    lengths: tuple[int, ...], rows: int, columns: int, text_tokens: int, device: torch.device,
    rope_options: dict[str, float],
) -> torch.Tensor:  # fmt: skip
    """Return (B, N + T, 3) fp32 positions (text index, y, x).

    Text tokens stand at index 0 to T - 1, image tokens at the index after their own row's last text token.
    """

    def axis(count: int, scale: float, shift: float) -> torch.Tensor:
        # linspace and not arange, so that a scaled axis equals ComfyUI's to the last bit.
        return torch.linspace(shift, (count - 1.0) * scale + shift, steps=count, device=device, dtype=torch.float32)

    ids = torch.zeros((len(lengths), rows * columns + text_tokens, 3), device=device, dtype=torch.float32)
    image, text = ids[:, : rows * columns].view(-1, rows, columns, 3), ids[:, rows * columns :]
    for row, length in enumerate(lengths):
        image[row, ..., 0] = length + rope_options.get("shift_t", 0.0)
    image[..., 1] = axis(rows, rope_options.get("scale_y", 1.0), rope_options.get("shift_y", 0.0)).unsqueeze(1)
    image[..., 2] = axis(columns, rope_options.get("scale_x", 1.0), rope_options.get("shift_x", 0.0))
    text[..., 0] = axis(text_tokens, 1.0, 0.0)
    return ids
