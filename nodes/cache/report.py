"""What a run did: which steps were computed, what that saved, and what it held in memory."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheReport:
    """Filled during one sampling run; read after it."""

    settings: str
    decisions: list[tuple[float, bool]] = field(default_factory=list)
    blocks_run: int = 0
    blocks_total: int = 0
    attention_reused: int = 0
    peak_bytes: int = 0

    @property
    def computed(self) -> int:
        """Number of positions that were computed."""
        return sum(computed for _, computed in self.decisions)

    @property
    def compute_ratio(self) -> float:
        """Blocks of the run without cache divided by the blocks that ran."""
        return self.blocks_total / self.blocks_run if self.blocks_run else 1.0

    def line(self) -> str:
        """Return the summary in one line."""
        steps = len(self.decisions)
        text = f"cache: computed {self.computed} of {steps} steps, {self.compute_ratio:.2f}x"
        return f"{text}, {steps - self.computed} skipped, at most {self.peak_bytes / 1e6:.1f} MB cached"

    def text(self) -> str:
        """Return the summary, the steps (# computed, . cached), and the settings."""
        strip = "".join("#" if computed else "." for _, computed in self.decisions)
        lines = [self.line(), f"steps: {strip}", f"settings: {self.settings}"]
        if self.attention_reused:
            lines.insert(2, f"attention was reused at {self.attention_reused} computed steps")
        return "\n".join(lines)
