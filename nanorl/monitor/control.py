"""What a watched run tells of its roles, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

RoleKind = Literal["policy", "replica", "reference", "critic", "collector", "store"]
RoleState = Literal["starting", "ready", "draining", "dead"]


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """One role as it is now."""

    name: str
    kind: RoleKind
    state: RoleState
    restarts: int = 0
    pid: int | None = None
    host: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class ClusterControl(Protocol):
    """The roles of a run, and the replicas that may come and go."""

    def roles(self) -> list[RoleStatus]: ...

    async def scale(self, replicas: int) -> None: ...

    async def add_replica(self, address: str) -> str: ...

    async def remove_replica(self, name: str) -> None: ...
