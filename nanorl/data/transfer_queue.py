"""Hands complete groups from the rollout side to the trainer, in task order, with back-pressure.

Groups finish in any order; the trainer takes them by index, so which groups make up an optimizer
batch never depends on timing (without staleness a resumed run is bit-equal for that reason). `put`
waits while the group lies more than `capacity` groups ahead of what the trainer has taken; the
group that the trainer waits for is always admitted, so the two sides cannot deadlock.
"""

from __future__ import annotations

import asyncio

from nanorl.types import Rollout

Group = list[Rollout]


class TransferQueue:
    """One producer side, one consumer, one event loop."""

    def __init__(self, *, capacity: int, first_index: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        self.next_index = first_index
        self._groups: dict[int, Group] = {}
        self._changed = asyncio.Condition()

    async def put(self, index: int, group: Group) -> None:
        async with self._changed:
            if index < self.next_index or index in self._groups:
                raise ValueError(f"group {index} was put twice (next to take: {self.next_index})")
            await self._changed.wait_for(lambda: index < self.next_index + self.capacity)
            self._groups[index] = group
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """The next `count` groups by index; waits until all of them are there."""
        wanted = range(self.next_index, self.next_index + count)
        async with self._changed:
            await self._changed.wait_for(lambda: all(i in self._groups for i in wanted))
            taken = [self._groups.pop(i) for i in wanted]
            self.next_index += count
            self._changed.notify_all()
        return taken
