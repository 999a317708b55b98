"""`TransferQueue`: where finished groups wait, each a row of fields that are put as they are ready.

    queue = TransferQueue(capacity=8)
    trainer = queue.consumer(needs=("group", "scores"), order="task")
    scorer = queue.consumer(needs=("group",), order="finish")

    await queue.put(17, "group", group)        # by whoever plays
    [row] = await scorer.take(1)               # at once, while others still play
    await queue.put(17, "scores", scores)
    rows = await trainer.take(4)               # the next four, complete

Every consumer has a cursor of its own and is given each row once. A row goes when all have had it.
`put` of a row holds its caller back while the queue is full of rows that wait; the row that a
consumer in task order waits for is always let in, so the two sides cannot block each other.

Either side may die and start again. What is put twice is put once: a successor that plays a group
again finds that it is there. A cursor is JSON and goes into checkpoints; a consumer that is opened
with one is given what came after it once more, from the journal if the process was another one.

Left out: who computes what (trainer.py), and several event loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanorl.flow.batch_policy import Order
from nanorl.flow.group import FinishedGroup
from nanorl.flow.journal import Journal

GROUP = "group"
"""The field that makes a row."""


@dataclass(frozen=True, kw_only=True)
class QueueCursor:
    """The rows that a consumer has had: all below `next_index`, and `beyond`."""

    next_index: int = 0
    beyond: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"next_index": self.next_index, "beyond": list(self.beyond)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> QueueCursor:
        return cls(next_index=data["next_index"], beyond=tuple(data["beyond"]))

    def has_had(self, index: int) -> bool:
        return index < self.next_index or index in self.beyond


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finished group and what is known of it."""

    index: int
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> FinishedGroup:
        group: FinishedGroup = self.fields[GROUP]
        return group


class Consumer:
    """One reader of a queue. Not to be made directly: `TransferQueue.consumer`."""

    def __init__(
        self, queue: TransferQueue, needs: Sequence[str], order: Order, cursor: QueueCursor
    ) -> None:
        self._queue, self._needs, self._order = queue, tuple(needs), order
        self._next = cursor.next_index
        self._beyond = set(cursor.beyond)

    @property
    def cursor(self) -> QueueCursor:
        """The rows that it has had until now."""
        return QueueCursor(next_index=self._next, beyond=tuple(sorted(self._beyond)))

    @property
    def next_index(self) -> int:
        """The first row that it has not had."""
        return self._next

    def has_had(self, index: int) -> bool:
        return index < self._next or index in self._beyond

    async def take(self, count: int, *, first: Iterable[int] = ()) -> list[Row]:
        """`count` rows that have all that it needs, by index; waits for them. In task order they
        are the next ones; else those that were complete first, but always those of `first`, for
        which it waits."""
        wanted = {index for index in first if not self.has_had(index)}
        rows: list[Row] = []

        def is_there() -> bool:
            rows[:] = self._ready(count, wanted)
            return len(rows) == count

        await self._queue.until(is_there)
        for row in rows:
            self._pass(row.index)
        await self._queue.passed(rows)
        return sorted(rows, key=lambda row: row.index)

    def _ready(self, count: int, wanted: set[int]) -> list[Row]:
        """Up to `count` rows that may be taken now, in the order of taking them."""
        complete = {
            row.index: row
            for row in self._queue.rows
            if not self.has_had(row.index) and all(name in row.fields for name in self._needs)
        }
        if self._order == "task":
            indices = range(self._next, self._next + count)
            return [complete[i] for i in indices] if all(i in complete for i in indices) else []
        urgent = sorted(wanted)[:count]
        if any(index not in complete for index in urgent):
            return []
        others = [index for index in complete if index not in urgent]
        return [complete[index] for index in [*urgent, *others][:count]]

    def skip(self, index: int) -> None:
        """A row that will never come counts as had."""
        if not self.has_had(index):
            self._pass(index)

    def _pass(self, index: int) -> None:
        self._beyond.add(index)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1


class TransferQueue:
    """The rows that somebody still has to read. One event loop only."""

    def __init__(self, *, capacity: int, journal: Journal | None = None) -> None:
        """`capacity` is how many rows may wait."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self.capacity = capacity
        self.journal = journal
        self._rows: dict[int, Row] = {}  # in the order in which they were complete
        self._consumers: list[Consumer] = []
        self._changed = asyncio.Condition()

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def consumer(
        self, *, needs: Sequence[str] = (GROUP,), order: Order, cursor: QueueCursor | None = None
    ) -> Consumer:
        """One more reader, of rows that have all of `needs`, from `cursor` on. All are to be opened
        before the first row is put."""
        found = Consumer(self, needs, order, QueueCursor() if cursor is None else cursor)
        self._consumers.append(found)
        return found

    def restore(self, groups: Iterable[FinishedGroup]) -> None:
        """Take in what a journal has, before anything is put."""
        for group in groups:
            self._rows[group.index] = Row(index=group.index, fields={GROUP: group})

    async def put(self, index: int, name: str, value: Any) -> bool:
        """Add a field of a row; of a new one the group. False if it is there, or if nobody waits
        for it any more: then nothing happens."""
        async with self._changed:
            if name == GROUP:
                await self._changed.wait_for(lambda: self._has_room(index))
            row = self._rows.get(index)
            is_gone = row is None and (name != GROUP or self._is_had_by_all(index))
            if is_gone or (row is not None and name in row.fields):
                return False
            if row is None:
                row = self._rows[index] = Row(index=index)
            row.fields[name] = value
            self._changed.notify_all()
        # One that lost members may have lost them as the run was stopped: it is played again.
        if name == GROUP and self.journal is not None and value.is_whole:
            await asyncio.to_thread(self.journal.put, value)
        return True

    async def until(self, is_true: Any) -> None:
        """Wait for a condition that `put` or a consumer may bring about."""
        async with self._changed:
            await self._changed.wait_for(is_true)

    async def passed(self, rows: Iterable[Row]) -> None:
        """A consumer has had these."""
        async with self._changed:
            for row in rows:
                if self._is_had_by_all(row.index):
                    self._rows.pop(row.index, None)
            self._changed.notify_all()

    def _is_had_by_all(self, index: int) -> bool:
        return bool(self._consumers) and all(one.has_had(index) for one in self._consumers)

    def _has_room(self, index: int) -> bool:
        """Rows that a consumer in task order comes to next are let in whatever waits."""
        oldest = min((one.next_index for one in self._consumers), default=0)
        return index < oldest + self.capacity or len(self._rows) < self.capacity
