"""Decides when a group may start, so that no rollout is trained on too late.

A group may start while

    accepted + running + group <= (max_staleness + version + 1) * batch + spare

all counted in rollouts (AReaL, arXiv 2505.24298, section 4). With `max_staleness = 0` the rollouts
of step s start only when s optimizer steps are done. `spare` are over-sampled: played beside a
batch, so that it need not wait for its slowest groups.

The inequality bounds how many rollouts run ahead. Where batches are made of whatever has finished
it does not bound the age of a straggler: `overdue` names those that must not wait any longer.
Left out: what is done with a group that is too old (batch_policy.py).
"""

from __future__ import annotations

import asyncio


class StalenessController:
    """Counts rollouts, and holds back whoever starts them. One event loop only."""

    def __init__(
        self,
        *,
        max_staleness: int,
        batch: int,
        version: int = 0,
        spare: int = 0,
        total: int | None = None,
    ) -> None:
        """`batch` rollouts make an optimizer batch, `total` are enough for the whole run."""
        if max_staleness < 0 or batch < 1 or spare < 0:
            raise ValueError(
                f"max_staleness={max_staleness}, batch={batch}, spare={spare}: need max_staleness "
                ">= 0, batch >= 1 and spare >= 0"
            )
        self.max_staleness = max_staleness
        self.batch = batch
        self.spare = spare
        self.total = total
        self.version = version
        self.accepted = version * batch
        self.running = 0
        self._started: dict[int, int] = {}  # version at the start of each group not yet trained on
        self._changed = asyncio.Event()

    def can_admit(self, count: int) -> bool:
        """Say whether `count` more rollouts would stay within the staleness that is allowed."""
        limit = (self.max_staleness + self.version + 1) * self.batch + self.spare
        if self.total is not None:
            limit = min(limit, self.total)
        return self.accepted + self.running + count <= limit

    async def admit(self, count: int) -> None:
        """Wait until `count` more rollouts may run, then count them as running."""
        while not self.can_admit(count):
            self._changed.clear()
            await self._changed.wait()
        self.running += count

    def start(self, index: int) -> None:
        """The group `index` starts with the present policy."""
        self._started[index] = self.version

    def finish(self, count: int) -> None:
        """`count` running rollouts are complete and will be trained on."""
        assert self.running >= count, f"{count} rollouts finished, {self.running} running"
        self.running -= count
        self.accepted += count
        self._changed.set()

    def restore(self, index: int, count: int, version: int) -> None:
        """A group of `count` that `version` began was complete before this process started."""
        self._started[index] = version
        self.accepted += count

    def reject(self, count: int) -> None:
        """`count` complete rollouts will not be trained on: others may take their places."""
        assert self.accepted >= count, f"{count} rollouts rejected, {self.accepted} accepted"
        self.accepted -= count
        self._changed.set()

    def leave(self, index: int) -> None:
        """The group `index` has gone into a batch, or out of the run."""
        self._started.pop(index, None)

    def overdue(self, version: int) -> set[int]:
        """The groups that would be older than `max_staleness` at the step after `version`."""
        oldest = version - self.max_staleness
        return {index for index, start in self._started.items() if start <= oldest}

    def advance(self, version: int) -> None:
        """The optimizer has produced `version`."""
        self.version = version
        self._changed.set()
