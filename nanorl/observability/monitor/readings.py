"""The roles of a cluster with what their own answers imply, so that every reader sees the same.

    busy_s         of an inference engine: the seconds of its steps
    tokens_per_s   of an inference engine: what it sampled between its last two answers
    rss_bytes      of a process on this machine: from /proc

What a role says itself stands. Left out: memory of processes on other machines that do not say it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanorl.observability.monitor.monitor_control import ClusterControl, RoleStatus
from nanorl.observability.monitor.vitals import rss_bytes

_SILENT_S = 15.0  # so long without a new token, and a rate is no news any more


@dataclass(kw_only=True)
class TokenRate:
    """The rate between the last two totals that differed."""

    total: float
    at_s: float
    tokens_per_s: float | None = None

    def update(self, total: float, now_s: float) -> float | None:
        """None while one total alone is known."""
        if total < self.total:  # restarted: it counts from 0 again
            self.total, self.at_s, self.tokens_per_s = total, now_s, None
        elif total > self.total:
            passed_s = max(now_s - self.at_s, 1e-9)
            self.tokens_per_s = (total - self.total) / passed_s
            self.total, self.at_s = total, now_s
        elif now_s - self.at_s > _SILENT_S:
            self.tokens_per_s = 0.0
        return self.tokens_per_s


class RoleReadings:
    """Reads `control`, whose answers change with every heartbeat. `clock` is for tests."""

    def __init__(self, control: ClusterControl, clock: Callable[[], float]) -> None:
        self.control = control
        self._clock = clock
        self._host = socket.gethostname()
        self._rates: dict[str, TokenRate] = {}

    def roles(self) -> list[RoleStatus]:
        return [self._completed(role) for role in self.control.roles()]

    def _completed(self, role: RoleStatus) -> RoleStatus:
        found = dict(role.metrics)
        if "step_s" in found:
            found.setdefault("busy_s", found["step_s"])
        if "sampled_tokens" in found:
            rate = self._rate(role.name, found["sampled_tokens"])
            if rate is not None:
                found.setdefault("tokens_per_s", rate)
        if role.pid is not None and role.host == self._host and role.state != "dead":
            memory = rss_bytes(role.pid)
            if memory is not None:
                found.setdefault("rss_bytes", memory)
        return replace(role, metrics=found)

    def _rate(self, name: str, total: float) -> float | None:
        now_s = self._clock()
        known = self._rates.setdefault(name, TokenRate(total=total, at_s=now_s))
        return known.update(total, now_s)
