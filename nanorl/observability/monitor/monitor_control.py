"""What a monitor needs from a run of several processes: how its roles are, and the verbs that
change how many replicas there are.

The cluster implements `ClusterControl`; the HTTP server, the alerts and the live view read it. A
role reports numbers under names of its choice, with these conventions:

    num_waiting, num_running   requests in its queue and under way
    tokens_per_s               sampled, or trained on
    version                    the policy version that it holds
    rss_bytes, cache_use       memory of its process; share of the KV cache in use
    busy_s                     seconds of work since it started, a counter: gives its idle share
    *_total                    any other counter

and those of nanoinfer's `Metrics`, which are totals. Every other name is a gauge. readings.py adds
what is missing and can be known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

RoleKind = Literal["policy", "replica", "reference", "critic", "collector", "store", "judge"]
RoleState = Literal["starting", "ready", "draining", "dead"]


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """Says how one role is.

    RoleStatus(name="replica-1", kind="replica", state="ready", restarts=0, pid=4711, host="gpu3",
               metrics={"num_waiting": 2.0, "tokens_per_s": 812.0, "version": 7.0})
    """

    name: str
    kind: RoleKind
    state: RoleState
    restarts: int
    pid: int | None  # None where somebody else started it
    host: str
    metrics: Mapping[str, float]


class ClusterControl(Protocol):
    """The processes of a run, for one event loop. The verbs raise `ValueError` for what cannot be
    (a name that is not there, resources that no machine has, no replica left to play) and
    `OSError` for a server that does not answer."""

    def roles(self) -> list[RoleStatus]:
        """The roles of this moment, as the driver last heard of them; it asks nobody and returns
        at once."""
        ...

    async def scale(self, replicas: int) -> None:
        """Have so many replicas that the scheduler starts: more are started, or some are drained
        and removed. Returns when it is done."""
        ...

    async def add_replica(self, address: str) -> str:
        """Take in the `nanoinfer.server` at `address`, which somebody else started; its name."""
        ...

    async def remove_replica(self, name: str) -> None:
        """Drain a replica and let it go."""
        ...


def is_spread(roles: Sequence[RoleStatus]) -> bool:
    """True where the roles lie in more than one process."""
    return len({(role.host, role.pid) for role in roles}) > 1
