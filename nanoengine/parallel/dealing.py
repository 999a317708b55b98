"""One batch, dealt out to the ranks of a layout, and what they found put back in its order.

    dealt = deal(samples, layout)
    hands = [dealt.hand(samples, rank) for rank in range(layout.world)]
    logps = dealt.collect(answers)      # of each rank a list, aligned with its hand

Whoever holds the whole batch (a driver) deals it; the weights of its losses and statistics are of
the whole batch before, so no result depends on the deal but for the order of sums. Tensor-,
context- and pipeline-parallel neighbours are given the same samples.

Work is counted in rows: those of the decoder, and the patches of pictures, each picture once in a
part however many samples show it.

Left out: equal numbers of samples or micro-batches (engines meet in idle passes where they must),
and the speed of single ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from nanoengine.packing import Sample, groups_of, read_keys
from nanoengine.parallel.layout import DATA_AXES, Layout
from nanoengine.prefix_tree import Rows, added_rows, depth_first, num_shared
from nanoengine.spans import ImageSpan

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


@dataclass
class _Load:
    """The work of a part so far: rows, and the pictures that it looks at, by key."""

    rows: int = 0
    pictures: set[str] = field(default_factory=set)

    def with_more(self, rows: int, images: Sequence[ImageSpan]) -> int:
        """The rows that there would be with so many more, and these pictures."""
        new = {span.key: span.grid for span in images if span.key not in self.pictures}
        return self.rows + rows + sum(height * width for _, height, width in new.values())

    def add(self, rows: int, images: Sequence[ImageSpan]) -> None:
        self.rows = self.with_more(rows, images)
        self.pictures |= {span.key for span in images}


def balanced_parts(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Deal a batch out to data-parallel ranks: indices of each one's samples, in the order of the
    batch, with nearly equal numbers of rows.

    Longest first, each to the part that has the fewest rows with it: no part exceeds the mean by
    more than the longest sample (Graham 1969: nor the best possible by more than a third). A part
    is empty where there are fewer samples than parts.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: must be at least 1")
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [_Load() for _ in range(num_parts)]
    work = [(len(sample.tokens) - 1, sample.images) for sample in samples]
    for i in sorted(range(len(samples)), key=lambda i: (-_Load().with_more(*work[i]), i)):
        lightest = _lightest(loads, *work[i])
        parts[lightest].append(i)
        loads[lightest].add(*work[i])
    return [sorted(part) for part in parts]


def _lightest(loads: Sequence[_Load], rows: int, images: Sequence[ImageSpan]) -> int:
    """The first of the parts that have the fewest rows with so many more, and these pictures."""
    then = [load.with_more(rows, images) for load in loads]
    return then.index(min(then))


@dataclass(frozen=True)
class _Group:
    """Samples that may share rows, in depth-first order, and what the model reads of them."""

    members: tuple[int, ...]
    rows: tuple[Rows, ...]
    images: tuple[ImageSpan, ...]
    """The pictures of all members."""

    @cached_property
    def num_rows(self) -> int:
        return sum(added_rows(self.rows))

    @cached_property
    def work(self) -> int:
        """Rows and patches."""
        return _Load().with_more(self.num_rows, self.images)


def _parts_of_groups(samples: Sequence[Sample], num_parts: int) -> list[list[int]]:
    """Whole groups, the largest first, each to the part with the fewest rows; the members of those
    that fit nowhere go one by one to where the part is smallest with them."""
    groups = sorted(_groups(samples), key=lambda group: (-group.work, group.members))
    mean = sum(group.work for group in groups) / num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [_Load() for _ in range(num_parts)]
    scattered = []
    for group in groups:
        lightest = _lightest(loads, group.num_rows, group.images)
        if loads[lightest].with_more(group.num_rows, group.images) > SLACK * mean:
            scattered.append(group)
            continue
        parts[lightest].extend(group.members)
        loads[lightest].add(group.num_rows, group.images)
    for group in scattered:
        latest: list[Rows] = [()] * num_parts  # the member that each part was given last
        for i, rows in zip(group.members, group.rows, strict=True):
            images = samples[i].images
            added = [len(rows) - num_shared(before, rows) for before in latest]
            then = [load.with_more(n, images) for load, n in zip(loads, added, strict=True)]
            chosen = then.index(min(then))
            parts[chosen].append(i)
            loads[chosen].add(added[chosen], images)
            latest[chosen] = rows
    return [sorted(part) for part in parts]


def _groups(samples: Sequence[Sample]) -> list[_Group]:
    groups = []
    for indices in groups_of(samples):
        rows = [read_keys(samples[i]) for i in indices]
        order = depth_first(rows)
        images = tuple(span for i in indices for span in samples[i].images)
        members = tuple(indices[k] for k in order)
        groups.append(_Group(members, tuple(rows[k] for k in order), images))
    return groups
