"""Where a run stands: the part of every checkpoint that is not the engine's.

    untrained -> warm_start -> before -> rl -> after -> no_tool -> blind -> first_hidden -> done

Left out: what a phase does (phases.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanorl.observability.results import PHASES, Phase

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
START = "start"
"""The folder, as `checkpoints`, of the checkpoint with which RL began."""
BEST = "best"
"""The folder of the checkpoint that its evaluations while RL goes on found best."""
WARMING_UP: tuple[Phase, ...] = ("untrained", "warm_start")
AFTER_RL: tuple[Phase, ...] = PHASES[PHASES.index("after") :]


def run_and_place(text: str) -> tuple[str, str]:
    """RUN@7 apart, as ("RUN", "7"); without a place (RUN, ""). A folder may have an @ in its
    name."""
    folder, _, place = text.rpartition("@")
    if not folder or Path(text).expanduser().exists():
        return text, ""
    return folder, place


@dataclass(kw_only=True)
class Cursor:
    """Everything outside the engine that resuming needs; JSON-serialisable."""

    phase: Phase = "untrained"
    step: int = 0  # the next step of the phase
    rl_steps: int | None = None  # how many RL had when it ended; None before, and in 0.1.0
    critic: str = ""  # the critic's checkpoint, where there is a critic
    tasks: str = ""  # fingerprint of the user's task file, where there is one
    flow: dict[str, Any] = field(default_factory=dict)  # of the trainer (trainer.py, `state`)
    results: dict[str, Any] = field(default_factory=dict)  # evaluation by phase
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # while RL goes on
    best: dict[str, Any] = field(default_factory=dict)  # of those; {}: there is none
    totals: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the run, by name; {}: not known
    model: str = ""  # fingerprint of the model's configuration and tokenizer; "": not known
    num_starts: int = 0  # of the run's processes, at least; 0: not known

    @property
    def place(self) -> tuple[Phase, int]:
        return self.phase, self.step

    @property
    def rl_steps_done(self) -> int:
        if self.phase in AFTER_RL:
            assert self.rl_steps is not None, "RL has ended, or `from_json` was told"
            return self.rl_steps
        return self.step if self.phase == "rl" else 0

    def add(self, name: str, amount: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + amount

    def keep_max(self, name: str, value: float) -> None:
        self.totals[name] = max(self.totals.get(name, value), value)

    def next_phase(self) -> None:
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self.step = 0

    def reopen(self, rl_steps: int, *, is_changed: bool) -> None:
        """Go back where the options ask for more than was done: to RL if it is to have more steps,
        and to the evaluations after it if any option is another one. Their results go."""
        if self.phase not in AFTER_RL:
            return
        if rl_steps > self.rl_steps_done:
            self.phase, self.step = "rl", self.rl_steps_done
        elif is_changed:
            self.phase, self.step = "after", 0
        else:
            return
        for name in AFTER_RL:
            self.results.pop(name, None)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any], *, rl_steps: int) -> Cursor:
        """The inverse of `to_json`. `rl_steps` is how long RL was to be when a checkpoint of 0.1.0,
        which does not say, was written."""
        cursor = cls(**data)
        if cursor.phase in AFTER_RL and cursor.rl_steps is None:
            cursor.rl_steps = rl_steps
        return cursor
