"""The times of rollouts: measured beside them, never stored with them, for no two runs agree.

Nanoseconds since the epoch, as OpenTelemetry counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nanorl.agents.context import TurnTimes


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

    found: dict[str, list[RolloutTimes]] = field(default_factory=dict)

    def add(self, rollout_id: str, start_ns: int, sequences: Sequence[Sequence[TurnTimes]]) -> None:
        times = RolloutTimes(start_ns=start_ns, end_ns=time.time_ns(), sequences=sequences)
        self.found.setdefault(rollout_id, []).append(times)

    def take(self) -> Mapping[str, list[RolloutTimes]]:
        """All of them; they are not kept any longer."""
        found, self.found = self.found, {}
        return found
