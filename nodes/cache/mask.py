"""Steps masks: which steps must be computed, by preset or by an explicit list.

The numbers of computed steps are those that cache-dit 1.5.3 documents for its `steps_mask`; between its step counts they
are interpolated. The first part of a run is computed whole, the rest evenly spaced, the last step always.
"""

from __future__ import annotations

from types import MappingProxyType

# Steps of the run -> computed steps.
MASKS = MappingProxyType(
    {
        "slow": ((8, 7), (20, 15), (28, 18), (30, 22), (50, 38)),
        "medium": ((8, 6), (20, 12), (28, 15), (30, 18), (50, 29)),
        "fast": ((8, 5), (20, 8), (28, 11), (30, 14), (50, 20)),
        "ultra": ((8, 4), (20, 5), (28, 8), (30, 10), (50, 14)),
    }
)
_LEADING = 0.4  # share of the computed steps that stand together at the start


def steps_mask(mask: str, steps: int) -> tuple[bool, ...] | None:
    """Return for each step whether it must be computed; None for an empty mask.

    Args:
        mask: a key of MASKS, or a list of 0 and 1 for the first steps; steps after its end are computed.
        steps: number of steps of the run.

    Raises: ValueError, see `parse_mask`.
    """
    if not mask:
        return None
    if mask not in MASKS:
        flags = parse_mask(mask)[:steps]
        computed = list(flags) + [True] * (steps - len(flags))
    else:
        computed = [False] * steps
        count = _computed_steps(mask, steps)
        leading = max(1, round(count * _LEADING))
        rest = count - leading
        for index in range(min(leading, steps)):
            computed[index] = True
        for index in range(1, rest + 1):
            computed[leading - 1 + round(index * (steps - leading) / rest)] = True
    if computed:
        computed[-1] = True
    return tuple(computed)


def parse_mask(text: str) -> tuple[bool, ...]:
    """Read a list like "1,1,0,0,1" or "11001".

    Raises: ValueError naming the first character that is neither 0 nor 1.
    """
    digits = [character for character in text if character not in ", \t\n"]
    for character in digits:
        if character not in "01":
            raise ValueError(
                f"steps_computation_mask holds '{character}'; {', '.join(MASKS)}, or a list of 1 (compute) and 0 (may be cached) "
                "is allowed. Write it like 1,1,1,0,0,1."
            )
    return tuple(character == "1" for character in digits)


def _computed_steps(mask: str, steps: int) -> int:
    points = MASKS[mask]
    (low, low_count), (high, high_count) = points[0], points[-1]
    if steps <= low:
        return max(min(steps, 2), round(low_count * steps / low))
    if steps >= high:
        return round(high_count * steps / high)
    index = next(i for i, (known, _) in enumerate(points) if known >= steps)
    (low, low_count), (high, high_count) = points[index - 1], points[index]
    return round(low_count + (high_count - low_count) * (steps - low) / (high - low))
