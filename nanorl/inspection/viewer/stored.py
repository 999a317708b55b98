"""Which rollouts a page shows (`Selection`).

    with open_for_reading("runs/tiny-seed0/rollouts.sqlite") as store:
        chosen = Selection(outcome="wrong", order="longest", limit=100)
        entries, total = store.page(chosen.where(), order=chosen.order, limit=chosen.limit)

Left out: searching in texts, which are tokens in the store (pages.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanorl.observability.store import Entry, Filter
from nanorl.observability.store.filter import Condition
from nanorl.observability.store.listing import NEWEST, ORDERS
from nanorl.types import Status

OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        "right": "status=finished, success",
        "wrong": "status=finished, reward<1",
        "cut": "status~truncated",
        "failed": "status=failed",
    }
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A choice of rollouts, their order, and the part of that list that is shown. ValueError for
    unknown words.

    `task` is a part of the task's id, `steps` the first and the last; `slice` is written as for
    `nanorl store --where`.
    """

    steps: tuple[int, int] | None = None
    kind: str = ""
    task: str = ""
    task_id: str = ""
    group_id: str = ""
    outcome: str = ""
    slice: str = ""
    order: str = NEWEST
    offset: int = 0
    limit: int = 100

    def __post_init__(self) -> None:
        for name, known in (("order", ORDERS), ("outcome", {"": "", **OUTCOMES})):
            if getattr(self, name) not in known:
                words = ", ".join(filter(None, known))
                raise ValueError(f"{name} {getattr(self, name)!r}: one of {words}")
        if self.offset < 0 or not 0 < self.limit <= 1000:
            raise ValueError(
                f"offset {self.offset}, limit {self.limit}: offset must not be negative, limit "
                "must be 1 to 1000"
            )
        self.where()

    def where(self) -> Filter:
        """The rollouts, as the store is asked for them."""
        equal = {"kind": self.kind, "task": self.task_id, "group": self.group_id}
        chosen = Filter.parse(OUTCOMES.get(self.outcome, "")) & Filter.parse(self.slice)
        chosen &= Filter.of(**{name: value or None for name, value in equal.items()})
        if self.steps is not None:
            chosen &= Filter((Condition("step", "..", self.steps),))
        if self.task:
            chosen &= Filter((Condition("task", "~", (self.task,)),))
        return chosen


def outcome_of(entry: Entry) -> str:
    """The name in OUTCOMES."""
    if entry.status is Status.FINISHED:
        return "right" if entry.reward >= 1.0 else "wrong"
    return "failed" if entry.status is Status.FAILED else "cut"
