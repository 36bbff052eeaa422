"""What the benches of kernels share: the time of a call on the GPU, and whether two results are equal bit for bit."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UP, RUNS = 5, 30


def median_ms(call: Callable[[], torch.Tensor]) -> float:
    """Return the median time of a call on the GPU."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare dtypes and bits, wherever the tensors are."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.cpu().view(view), b.cpu().view(view))
