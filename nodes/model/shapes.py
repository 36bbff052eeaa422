"""Check the tensors of a checkpoint against the shapes that an architecture needs: gaps, missing tensors, wrong shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .checkpoint import CheckpointError

Shape = tuple[int, ...]

# At most five digits: a hostile name cannot ask for millions of layers.
LAYER = re.compile(r"^layers\.(\d{1,5})\.")


def shape_of(shapes: Mapping[str, Shape], name: str, dims: int, label: str) -> Shape:
    """Return the shape of a tensor. Raises CheckpointError when it is missing or has other than `dims` dimensions."""
    shape = shapes.get(name)
    if shape is None:
        raise CheckpointError(f"{label}: the tensor '{name}' is missing. The file is incomplete; download it again.")
    if len(shape) != dims or min(shape) < 1:
        raise CheckpointError(f"{label}: '{name}' has shape {list(shape)}; {dims} dimensions of at least 1 are needed.")
    return shape


def count_layers(names: Iterable[str], label: str) -> int:
    """Return the number of layers ('layers.0.' to 'layers.N-1.'). Raises CheckpointError when one is missing between."""
    numbers = {int(match[1]) for name in names if (match := LAYER.match(name))}
    count = max(numbers, default=-1) + 1
    if len(numbers) != count:
        first = next(n for n in range(count) if n not in numbers)
        raise CheckpointError(
            f"{label}: layer {first} is missing ({len(numbers)} layers found, the highest is {count - 1}). "
            "The file is incomplete; download it again."
        )
    return count


def check_shapes(wanted: Iterable[tuple[str, Shape]], shapes: Mapping[str, Shape], label: str, what: str) -> None:
    """Compare all tensors of a model with the shapes that it needs.

    Args:
        wanted: (name, shape) of every tensor.
        shapes: name -> shape of the tensors found.
        label: the file, for messages.
        what: the model, for messages: "ERNIE-Image".

    Raises: CheckpointError naming the first tensor that is missing or has another shape.
    """
    missing: list[str] = []
    for name, shape in wanted:
        found = shapes.get(name)
        if found is None:
            missing.append(name)
        elif found != shape:
            raise CheckpointError(
                f"{label}: '{name}' has shape {list(found)}; {list(shape)} is needed beside the other tensors. "
                f"The file is damaged or of a model that is not {what}."
            )
    if missing:
        raise CheckpointError(
            f"{label}: {len(missing)} {what} tensors are missing, the first is '{missing[0]}'. "
            "The file is incomplete; download it again."
        )
