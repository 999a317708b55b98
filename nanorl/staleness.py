"""Admission: how far the rollouts may run ahead of the optimizer.

A group is admitted while `accepted + running + group <= (max_staleness + version + 1) * batch`, all
counted in rollouts (AReaL, arXiv 2505.24298, section 4). With `max_staleness = 0` the rollouts of
step s start only when s optimizer steps are done, so synchronous training is a special case and
not another loop.
"""

from __future__ import annotations

import asyncio


class StalenessController:
    """Counts rollouts and holds back the producer. One event loop only."""

    def __init__(self, *, max_staleness: int, batch: int, version: int = 0) -> None:
        if max_staleness < 0 or batch < 1:
            raise ValueError(
                f"max_staleness={max_staleness}, batch={batch}: need max_staleness >= 0, batch >= 1"
            )
        self.max_staleness = max_staleness
        self.batch = batch
        self.version = version
        self.accepted = version * batch
        self.running = 0
        self._changed = asyncio.Event()

    def can_admit(self, count: int) -> bool:
        limit = (self.max_staleness + self.version + 1) * self.batch
        return self.accepted + self.running + count <= limit

    async def admit(self, count: int) -> None:
        """Wait until `count` more rollouts may run, then count them as running."""
        while not self.can_admit(count):
            self._changed.clear()
            await self._changed.wait()
        self.running += count

    def finish(self, count: int) -> None:
        """`count` running rollouts are complete and will be trained on."""
        assert self.running >= count, f"{count} rollouts finished, {self.running} running"
        self.running -= count
        self.accepted += count
        self._changed.set()

    def advance(self, version: int) -> None:
        """The optimizer has produced `version`."""
        self.version = version
        self._changed.set()
