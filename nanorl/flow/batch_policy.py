"""`BatchPolicy`: which groups make a batch, and what becomes of those that do not fit.

    spoilt     the machine cost the group members, for good (collector.py tries again first)
    filtered   dynamic sampling leaves it out: all of its members earned the same
    stale      one of its tokens is older than the staleness that the run allows

Each kind is trained on as it is, dropped (the batch is smaller) or replaced by the group of another
task; what was done is counted in every step. Left out: finding the faults (assembly.py) and
weighing stale tokens (algorithms/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from nanorl.bounds import Bound, check_record

Order = Literal["task", "finish"]
Fault = Literal["spoilt", "filtered", "stale"]
Remedy = Literal["train", "drop", "replace"]
Leftover = Literal["carry", "cut"]
FAULTS: tuple[Fault, ...] = get_args(Fault)


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """The choice of the groups that make a batch, and the treatment of those that do not fit."""

    order: Order = "task"
    """task: groups are trained on in the order of their tasks, so that a synchronous run has the
    same bits whenever it is repeated. finish: as they are complete, so that no batch waits for a
    straggler."""
    oversample: int = 0
    """So many more groups than a batch needs are played at a time; order finish."""
    leftover: Leftover = "carry"
    """What becomes of over-sampled groups that are not complete when their batch is: carry goes on
    with them after the update, as partial rollouts of two policies; cut gives them up."""
    spoilt: Remedy = "train"
    """A group that lost members to failures of the machine: train on the others, drop it, or
    replace it by the next task's."""
    filtered: Literal["drop", "replace"] = "replace"
    """A group that --rl.algorithm.dynamic-sampling leaves out."""
    stale: Literal["train", "wait", "drop", "replace"] = "train"
    """A group that is older than --rl.max-staleness, which order finish allows: train on it all the
    same; wait, so that none gets so old; drop or replace it."""
    max_replacements: int | None = None
    """Groups that one batch may replace; beyond them it is smaller. None: as many as it has."""

    def __post_init__(self) -> None:
        choices = {"order": Order, "leftover": Leftover, "spoilt": Remedy}
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"--rl.batch.{name} {getattr(self, name)!r}: choose one of "
                    f"{', '.join(get_args(kind))}"
                )
        check_record(self, "rl.batch.", oversample=Bound(0, 4096, "they are held in memory"))
        if self.max_replacements is not None:
            check_record(self, "rl.batch.", max_replacements=Bound(0, 1 << 16))
        if self.oversample and self.order == "task":
            raise ValueError(
                f"--rl.batch.oversample {self.oversample} with order task: the batch would wait "
                "for its own tasks all the same; set --rl.batch.order finish, or oversample 0"
            )
        if self.leftover == "cut" and not self.oversample:
            raise ValueError(
                "--rl.batch.leftover cut: nothing is left over without over-sampling; set "
                "--rl.batch.oversample too"
            )

    @property
    def remedies(self) -> Mapping[Fault, str]:
        """The treatment of a group, by its fault."""
        found: dict[Fault, str] = {fault: getattr(self, fault) for fault in FAULTS}
        return MappingProxyType(found)
