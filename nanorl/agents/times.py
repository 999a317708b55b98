"""When what happened in a rollout: measured beside it, never stored with it, for no two runs agree.

Nanoseconds since the epoch, as OpenTelemetry counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class TurnTimes:
    """One turn: the policy's sampling, then the environment's step, where one answered it."""

    start_ns: int
    end_ns: int
    step_start_ns: int = 0
    step_end_ns: int = 0

    @property
    def step_ns(self) -> tuple[int, int]:
        """Begin and end of the step; where it was not measured, the end of the turn twice."""
        if self.step_end_ns:
            return self.step_start_ns, self.step_end_ns
        return self.end_ns, self.end_ns


@dataclass(frozen=True, kw_only=True)
class RolloutTimes:
    """One attempt at a rollout, with the turns of each of its sequences in the rollout's order."""

    start_ns: int
    end_ns: int
    sequences: Sequence[Sequence[TurnTimes]]


@dataclass
class TimesKept:
    """The times of rollouts that have ended and that nobody has asked for yet, by their ids, an
    entry for each attempt."""

    is_on: bool = False
    found: dict[str, list[RolloutTimes]] = field(default_factory=dict)

    def add(self, rollout_id: str, start_ns: int, sequences: Sequence[Sequence[TurnTimes]]) -> None:
        if self.is_on:
            times = RolloutTimes(start_ns=start_ns, end_ns=time.time_ns(), sequences=sequences)
            self.found.setdefault(rollout_id, []).append(times)

    def take(self) -> Mapping[str, list[RolloutTimes]]:
        """All of them; they are not kept any longer."""
        found, self.found = self.found, {}
        return found
