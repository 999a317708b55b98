"""The latest numbers of a run: its phase, its last step, how old its tokens were, who was idle.

One event loop writes and reads it, so there is no lock. Left out: history (see metrics.jsonl);
Prometheus keeps its own.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nanorl.observability.monitor.monitor_control import RoleStatus
from nanorl.types import Rollout


class RunBoard:
    """The things that the run has said of itself so far. `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase = "starting"
        self.step: int | None = None  # the last finished one
        self.num_steps = 0  # finished by this process
        self.metrics: dict[str, float] = {}  # of the last step, NaN included
        self.seconds: dict[str, float] = defaultdict(
            float
        )  # by what they were spent on, over all steps
        self.token_staleness: Counter[int] = Counter()  # tokens trained on by their age in versions
        self.idle: dict[str, float] = {}  # role -> idle share from the step before to the last one
        self._idle_shares = IdleShares(clock)
        self._progress_s = clock()

    @property
    def quiet_s(self) -> float:
        """Seconds since anything was finished."""
        return self._clock() - self._progress_s

    def progress(self) -> None:
        """Something was finished."""
        self._progress_s = self._clock()

    def begin_phase(self, name: str) -> None:
        self.phase = name
        self.progress()

    def observe_step(
        self, step: int, metrics: Mapping[str, Any], rollouts: Iterable[Rollout]
    ) -> None:
        """Step `step` is finished; `rollouts` are those that it trained on."""
        self.progress()
        self.step = step
        self.num_steps += 1
        numbers = flatten(metrics)
        spent = {name: value for name, value in numbers.items() if is_seconds(name)}
        self.metrics = {name: value for name, value in numbers.items() if name not in spent}
        for name, value in spent.items():
            self.seconds[name.removesuffix("_s")] += value
        for rollout in rollouts:
            sampled = Counter(v for sequence in rollout.sequences for v in sequence.versions)
            for version, count in sampled.items():
                if version >= 0:  # -1: not sampled
                    self.token_staleness[step - version] += count

    def observe_roles(self, roles: Sequence[RoleStatus]) -> None:
        """Take the idle share of each role since the last call."""
        self.idle = self._idle_shares.since_last(roles)


class IdleShares:
    """Says how much of its time each role did not work, from its `busy_s`. `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_s: dict[str, float] = {}
        self._at_s = clock()

    def since_last(self, roles: Sequence[RoleStatus]) -> dict[str, float]:
        """The idle share since the last call, by the role's name. A role that is new, or was
        restarted in between, has none."""
        now_s = self._clock()
        busy_s = {role.name: role.metrics["busy_s"] for role in roles if "busy_s" in role.metrics}
        passed_s = now_s - self._at_s
        shares = {
            name: min(1.0, max(0.0, 1.0 - (total_s - self._busy_s[name]) / passed_s))
            for name, total_s in busy_s.items()
            if passed_s > 0 and total_s >= self._busy_s.get(name, math.inf)
        }
        self._busy_s, self._at_s = busy_s, now_s
        return shares


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers, also NaN, which is what an alert is about; nested ones by their path."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = float(value)
    return flat


def is_seconds(name: str) -> bool:
    """True for `train_s`, not for `tokens_per_s`."""
    return name.endswith("_s") and not name.endswith("_per_s")
