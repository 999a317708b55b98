"""What came of a replay, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanorl.inspection.replay.causes import NOTHING, Cause
from nanorl.inspection.replay.difference import Difference
from nanorl.inspection.replay.past_run import UNTRAINED

MOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One rollout that was played again.

    Replayed(rollout_id="s5-g20-m1", phase="rl", step=5, version=5, is_scored=False,
             difference=None, causes=())
    """

    rollout_id: str
    phase: str
    step: int
    version: int
    is_scored: bool
    """Its tokens are of several versions: they were scored and not sampled."""
    difference: Difference | None
    causes: tuple[Cause, ...] = ()

    @property
    def is_equal(self) -> bool:
        return self.difference is None

    @property
    def reason(self) -> str:
        """The likeliest cause."""
        return str(self.causes[0]) if self.causes else NOTHING

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "rollout_id": self.rollout_id,
            "phase": self.phase,
            "step": self.step,
            "version": None if self.version == UNTRAINED else self.version,
            "is_scored": self.is_scored,
            "is_equal": self.is_equal,
            "difference": None if found is None else {"place": found.place, **found.to_json()},
            "causes": [one._asdict() for one in self.causes],
        }


@dataclass(kw_only=True)
class ReplayResult:
    """All rollouts that were played again, and what was seen on the way."""

    rollouts: list[Replayed] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    """Version -> "equal", "not recorded", or what is another one in it."""
    changed: dict[str, str] = field(default_factory=dict)
    """Parts of the manifest that are other ones now."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_equal(self) -> int:
        return sum(one.is_equal for one in self.rollouts)

    @property
    def is_equal(self) -> bool:
        return self.num_equal == len(self.rollouts)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_rollouts": len(self.rollouts),
            "num_equal": self.num_equal,
            "seconds": round(self.seconds, 1),
            "weights": {str(version): said for version, said in self.weights.items()},
            "changed": self.changed,
            "notes": self.notes,
            "rollouts": [one.to_json() for one in self.rollouts],
        }

    def text(self) -> str:
        """For people: the count, then the first rollouts that differ and why."""
        count = len(self.rollouts)
        lines = [f"{self.num_equal} of {count} rollouts came out equal to the last bit"]
        known = Counter("equal" if said == "equal" else "other" for said in self.weights.values())
        lines.append(
            f"weights: {known['equal']} of {len(self.weights)} versions are those of the run"
        )
        lines += [
            f"  version {one}: {said}" for one, said in self.weights.items() if said != "equal"
        ][:MOST_SHOWN]
        lines += [f"not as it was: {part}: {said}" for part, said in self.changed.items()]
        differing = [one for one in self.rollouts if not one.is_equal]
        for one in differing[:MOST_SHOWN]:
            lines += _shown(one)
        if len(differing) > MOST_SHOWN:
            reasons = Counter(one.causes[0].name if one.causes else NOTHING for one in differing)
            said = ", ".join(f"{name} {number}" for name, number in reasons.most_common())
            lines.append(f"... and {len(differing) - MOST_SHOWN} more; reasons of all: {said}")
        return "\n".join([*lines, *self.notes, f"time {self.seconds:.0f} s"])


def _shown(one: Replayed) -> list[str]:
    found = one.difference
    assert found is not None, "it is not equal"
    return [
        f"{one.rollout_id} ({one.phase}, step {one.step}): differs first in {found.place}, "
        f"{found.kind}",
        f"    then  {found.then}",
        f"    now   {found.now}",
        f"    why   {one.reason}",
        *(f"    also  {cause}" for cause in one.causes[1:]),
    ]
