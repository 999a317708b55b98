"""Where a run stands: the cursor that every checkpoint carries, and the totals of the summary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["untrained", "warm_start", "before", "rl", "after", "no_tool", "done"]
PHASES: tuple[Phase, ...] = (
    "untrained",
    "warm_start",
    "before",
    "rl",
    "after",
    "no_tool",
    "done",
)


@dataclass(kw_only=True)
class Cursor:
    """Everything outside the engine that resuming needs; JSON-serialisable."""

    phase: Phase = "untrained"
    step: int = 0  # the next step of the phase
    critic: str = ""  # the critic's checkpoint, where there is a critic
    tasks: str = ""  # fingerprint of the user's task file, where there is one
    results: dict[str, Any] = field(default_factory=dict)  # evaluation by phase
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> tuple[Phase, int]:
        return self.phase, self.step

    def add(self, name: str, amount: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + amount

    def keep_max(self, name: str, value: float) -> None:
        self.totals[name] = max(self.totals.get(name, value), value)

    def next_phase(self) -> None:
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self.step = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cursor:
        return cls(**data)
