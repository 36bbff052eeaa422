"""What the decoders of quantised weights share: when Triton is used, and how operators are registered and checked."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import torch

logger = logging.getLogger("ernie_fast")

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def failure_of(launch: Callable[[], object], weights: str) -> str:
    """Call `launch`, which imports Triton and runs a small kernel; return why that failed, or "".

    An import is no proof: Triton is part of torch's packages, but needs a C compiler and Python's headers at the first launch.

    Args:
        launch: may raise anything.
        weights: the name of the weights for the log, such as "GGUF".
    """
    try:
        launch()
    except Exception as error:  # of many kinds: no package, no compiler, no driver
        reason = f"{type(error).__name__}: {error}"
        level = logging.INFO if isinstance(error, ImportError) else logging.WARNING
        logger.log(level, "%s weights are decoded without Triton, which is slower. %s", weights, reason)
        return reason
    return ""


def choose(data: torch.Tensor, triton_failure: Callable[[torch.device], str]) -> tuple[Literal["triton", "eager"], str]:
    """Return the implementation that a weight is decoded with, and the reason.

    Args:
        data: the stored weight.
        triton_failure: says why Triton does not work on a device, or "".
    """
    if not data.is_cuda and not _interpreted():
        return "eager", f"the weight is on {data.device.type}, and Triton runs on cuda"
    failure = triton_failure(data.device)
    if failure:
        return "eager", f"Triton does not work here. {failure}"
    return "triton", f"Triton works on {data.device}"


def check_row_scale(data: torch.Tensor, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the scale of the rows for FP8, contiguous. Raises ValueError unless it is float32 (rows,) beside `data`."""
    if scale.dtype != torch.float32 or tuple(scale.shape) != (rows,) or scale.device != data.device:
        raise ValueError(
            f"the scale is {scale.dtype} of shape {tuple(scale.shape)} on {scale.device}; "
            f"needed: torch.float32 of shape ({rows},) on {data.device}"
        )
    return scale.contiguous()


def register(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator `ernie_fast::name`, once per process: the package can be imported under a second name."""
    if not hasattr(torch.ops.ernie_fast, name):
        # The schema is given, because older torch cannot read it off annotations that are strings.
        operator = torch.library.custom_op(f"ernie_fast::{name}", implementation, mutates_args=(), schema=schema)
        operator.register_fake(fake)  # pyright: ignore[reportUnknownMemberType]
