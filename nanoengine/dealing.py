"""One batch, dealt out to the ranks of a layout, and what they found put back in its order.

    dealt = deal(samples, layout)
    hands = [dealt.hand(samples, rank) for rank in range(layout.world)]
    logps = dealt.collect(answers)      # of each rank a list, aligned with its hand

Whoever holds the whole batch (a driver) deals it; the weights of its losses and statistics are of
the whole batch before, so no result depends on the deal but for the order of sums. Tensor-,
context- and pipeline-parallel neighbours are given the same samples.

Left out: equal numbers of samples or micro-batches (engines meet in idle passes where they must),
and the speed of single ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from nanoengine.packing import Sample, groups_of, read_tokens
from nanoengine.parallel.layout import DATA_AXES, Layout
from nanoengine.prefix_tree import Rows, added_rows, depth_first, num_shared

T = TypeVar("T")

SLACK = 1.05
"""A group stays whole where that makes no part larger than this times the mean."""


@dataclass(frozen=True)
class Deal:
    """`parts[d]` are the indices, in the order of the batch, of the samples of the ranks whose data
    coordinate is d; a part may be empty."""

    layout: Layout
    parts: tuple[tuple[int, ...], ...]

    def hand(self, samples: Sequence[T], rank: int) -> list[T]:
        """The part of the batch that `rank` is given, or of anything that is aligned with it."""
        return [samples[i] for i in self.parts[data_index(self.layout, rank)]]

    def collect(self, answers: Sequence[Sequence[T]]) -> list[T]:
        """Put the values that the ranks (all of the layout, in order) found for their samples into
        the order of the batch. Neighbours found the same; the first of them is believed."""
        found: dict[int, T] = {}
        for rank, values in enumerate(answers):
            part = self.parts[data_index(self.layout, rank)]
            for i, value in zip(part, values, strict=True):
                found.setdefault(i, value)
        return [found[i] for i in range(len(found))]


def data_index(layout: Layout, rank: int) -> int:
    """The place of `rank` among those with samples of their own: `Mesh.rank(DATA_AXES)` there."""
    place, index = layout.coordinates(rank), 0
    for axis in DATA_AXES:
        index = index * getattr(layout, axis) + place[axis]
    return index


def deal(samples: Sequence[Sample], layout: Layout, *, share_prefix: bool = False) -> Deal:
    """Parts of nearly equal numbers of rows. With `share_prefix`, as in the engine that trains, the
    members of a group stay together where that balances: apart, each rank reads what they share."""
    num_parts = 1
    for axis in DATA_AXES:
        num_parts *= getattr(layout, axis)
    if share_prefix and num_parts > 1:
        parts = _parts_of_groups(samples, num_parts)
    else:
        parts = balanced_parts(samples, num_parts)
    return Deal(layout, tuple(tuple(part) for part in parts))


def balanced_parts(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Deal a batch out to data-parallel ranks: indices of each one's samples, in the order of the
    batch, with nearly equal numbers of rows.

    Longest first, each to the part with the fewest rows so far: no part exceeds the mean by more
    than the longest sample (Graham 1969: nor the best possible by more than a third). A part is
    empty where there are fewer samples than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: must be at least 1")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].tokens), i))
    for i in order:
        lightest = loads.index(min(loads))
        parts[lightest].append(i)
        loads[lightest] += len(samples[i].tokens) - 1
    return [sorted(part) for part in parts]


@dataclass(frozen=True)
class _Group:
    """Samples that may share rows, in depth-first order, and what the model reads of them."""

    members: tuple[int, ...]
    rows: tuple[Rows, ...]

    @cached_property
    def num_rows(self) -> int:
        return sum(added_rows(self.rows))


def _parts_of_groups(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Whole groups, the largest first, each to the part with the fewest rows; the members of those
    that fit nowhere go one by one to where the part is smallest with them."""
    groups = sorted(_groups(samples), key=lambda group: (-group.num_rows, group.members))
    mean = sum(group.num_rows for group in groups) / num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    scattered = []
    for group in groups:
        lightest = loads.index(min(loads))
        if loads[lightest] + group.num_rows > SLACK * mean:
            scattered.append(group)
            continue
        parts[lightest].extend(group.members)
        loads[lightest] += group.num_rows
    for group in scattered:
        latest: list[Rows] = [()] * num_parts  # the member that each part was given last
        for i, rows in zip(group.members, group.rows, strict=True):
            loads_then = [
                load + len(rows) - num_shared(before, rows)
                for load, before in zip(loads, latest, strict=True)
            ]
            chosen = loads_then.index(min(loads_then))
            parts[chosen].append(i)
            loads[chosen], latest[chosen] = loads_then[chosen], rows
    return [sorted(part) for part in parts]


def _groups(samples: Sequence[Sample]) -> list[_Group]:
    groups = []
    for indices in groups_of(samples):
        rows = [read_tokens(samples[i]) for i in indices]
        order = depth_first(rows)
        groups.append(_Group(tuple(indices[k] for k in order), tuple(rows[k] for k in order)))
    return groups
