"""`BatchAssembler`: takes finished groups from the transfer queue until a batch is complete.

A group that does not fit is trained on all the same, dropped or replaced (batch_policy.py). For one
that is replaced the staleness controller lets another start, and the assembler waits for it; so in
a synchronous run in task order the batch is a function of the seed and the weights alone. Left out:
what a batch is made into (batching.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter

from nanorl.batch_metrics import has_signal
from nanorl.flow.batch_policy import FAULTS, BatchPolicy, Fault
from nanorl.flow.group import FinishedGroup
from nanorl.flow.staleness import StalenessController
from nanorl.flow.transfer_queue import Consumer, Row
from nanorl.types import Rollout


@dataclass(kw_only=True)
class GroupBatch:
    """The groups of an optimizer batch by index, and those that did not become part of it."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[FinishedGroup] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """Groups by what was wrong with them, trained on or not."""
    num_replaced: int = 0
    num_dropped: int = 0

    @property
    def groups(self) -> list[FinishedGroup]:
        return [row.group for row in self.rows]

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of groups that did not fit, by fault and by what was done with them, and of
        the sampled tokens that this cost."""
        counts = {f"groups_{fault}": float(self.faults[fault]) for fault in FAULTS}
        return counts | {
            "groups_replaced": float(self.num_replaced),
            "groups_dropped": float(self.num_dropped),
            "wasted_tokens": float(sum(group.num_action_tokens for group in self.left_out)),
        }


class BatchAssembler:
    """Makes the batches of a run, one after another."""

    def __init__(
        self,
        policy: BatchPolicy,
        consumer: Consumer,
        staleness: StalenessController,
        *,
        num_groups: int,
        group_size: int,
        needs_signal: bool,
        earned: Callable[[Rollout], Hashable] = attrgetter("total_reward"),
    ) -> None:
        """`num_groups` of `group_size` make a batch; `needs_signal`: those whose members all
        `earned` the same have nothing to teach (dynamic sampling)."""
        self._policy, self._consumer, self._staleness = policy, consumer, staleness
        self._num_groups, self._group_size = num_groups, group_size
        self._needs_signal, self._earned = needs_signal, earned
        most = policy.max_replacements
        self._most_replaced = num_groups if most is None else most

    async def next_batch(self, version: int) -> GroupBatch:
        """The groups that policy `version` is updated with; waits until they are played."""
        batch = GroupBatch()
        wanted = self._num_groups
        while wanted:
            before = batch.num_replaced
            for row in await self._consumer.take(wanted, first=self._urgent(version)):
                self._staleness.leave(row.index)
                self._sort(row, batch, version)
            wanted = batch.num_replaced - before
        batch.rows.sort(key=lambda row: row.index)
        return batch

    def _urgent(self, version: int) -> set[int]:
        if self._policy.stale != "wait":
            return set()
        return self._staleness.overdue(version)

    def _sort(self, row: Row, batch: GroupBatch, version: int) -> None:
        """Put a group into the batch, or beside it."""
        fault = self._fault_of(row.group, version)
        remedy = "train"
        if fault is not None:
            batch.faults[fault] += 1
            remedy = self._policy.remedies[fault]
        if remedy in ("train", "wait"):
            batch.rows.append(row)
        elif remedy == "replace" and batch.num_replaced < self._most_replaced:
            batch.num_replaced += 1
            batch.left_out.append(row.group)
            self._staleness.reject(self._group_size)
        else:
            batch.num_dropped += 1
            if fault == "filtered":  # the learner counts it among the others and leaves it out
                batch.rows.append(row)
            else:
                batch.left_out.append(row.group)

    def _fault_of(self, group: FinishedGroup, version: int) -> Fault | None:
        if not group.is_whole:
            return "spoilt"
        oldest = group.oldest_version
        if oldest >= 0 and version - oldest > self._staleness.max_staleness:
            return "stale"
        if self._needs_signal and not self._has_signal(group):
            return "filtered"
        return None

    def _has_signal(self, group: FinishedGroup) -> bool:
        things = [self._earned(rollout) for rollout in group.rollouts]
        return all(has_signal(things, [group.index] * len(things)))
