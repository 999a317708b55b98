"""Sequences that begin alike, as a tree: every distinct row is read once.

    1 2 3 4 5                       1 2 ─┬─ 3 ─┬─ 4 5
    1 2 3 6          segments:           │     └─ 6
    1 2 7                                └─ 7

A segment is a run of rows without a fork; it continues its parent's last row. A sequence that is a
prefix of another, or equal to it, adds no row. In depth-first order (`depth_first`) a sequence
shares most with the one just before it, so whatever must be cut into several trees is cut between
neighbours (`cut`), and a tree is laid out from the common prefixes of neighbours alone
(`lay_out`).

Left out: sequences that meet again after they parted (a token's keys differ from there on).
Next: packing.py, which makes micro-batches of trees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

Rows = Sequence[int]  # what the model reads of a sequence, as content ids (spans.py)


@dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """The rows of one tree, segment by segment, a parent before its children.

    The tree above has seven rows in five segments; its second sequence ends in row 5:

    >>> layout = lay_out([[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7]])
    >>> layout.ids, layout.positions
    ([1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 3, 2])
    >>> layout.starts, layout.parents
    ([0, 2, 3, 5, 6], [-1, 0, 1, 1, 0])
    >>> layout.paths[1]
    [0, 1, 2, 5]
    """

    ids: list[int]
    positions: list[int]
    starts: list[int]  # the first row of each segment
    parents: list[int]  # the segment that each one continues, -1 for none
    paths: list[list[int]]  # the rows of each sequence


def num_shared(a: Rows, b: Rows) -> int:
    """The number of leading rows that both have."""
    shorter = min(len(a), len(b))
    return next((t for t in range(shorter) if a[t] != b[t]), shorter)


def depth_first(sequences: Sequence[Rows]) -> list[int]:
    """Indices of the sequences, those below a fork side by side.

    Among branches the one with the longest sequence comes first, ties in the order of the first
    index; a sequence that ends at a fork comes after its branches.
    """
    by_rows = sorted(range(len(sequences)), key=lambda i: (sequences[i], i))
    order: list[int] = []
    stack = [(by_rows, 0)]
    while stack:
        members, depth = stack.pop()
        if len(members) == 1 or depth == len(sequences[members[-1]]):  # they are equal
            order += members
            continue
        depth = num_shared(sequences[members[0]], sequences[members[-1]])
        branches: dict[int | None, list[int]] = {}
        for i in members:  # in order of their rows, so a branch's are neighbours and stay sorted
            rows = sequences[i]
            branches.setdefault(rows[depth] if len(rows) > depth else None, []).append(i)
        ranked = sorted(branches.values(), key=lambda part: _rank(sequences, part))
        stack += [(part, depth) for part in reversed(ranked)]
    return order


def _rank(sequences: Sequence[Rows], members: list[int]) -> tuple[int, int]:
    return -max(len(sequences[i]) for i in members), min(members)


def added_rows(sequences: Sequence[Rows]) -> list[int]:
    """The number of rows that each of the sequences, in depth-first order, adds to the tree of
    those before it."""
    first, *others = sequences
    parted = zip(sequences, others, strict=False)
    return [len(first), *(len(rows) - num_shared(before, rows) for before, rows in parted)]


def cut(sequences: Sequence[Rows], order: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Cut sequences in depth-first `order` into trees: apart where neighbours share nothing, and
    of at most `budget` rows. A sequence that is longer gets a tree of its own.

    Of all such cuts it is one with the fewest rows in all; of those, the one whose first trees are
    the largest.
    """
    added = added_rows([sequences[i] for i in order])
    ends = [0] * len(order)  # of the tree that begins at each place
    fewest = [0] * (len(order) + 1)  # rows from each place on
    for begin in reversed(range(len(order))):
        num_rows = len(sequences[order[begin]])
        ends[begin], fewest[begin] = begin + 1, num_rows + fewest[begin + 1]
        for end in range(begin + 1, len(order)):
            num_rows += added[end]
            if num_rows > budget or added[end] == len(sequences[order[end]]):
                break
            if num_rows + fewest[end + 1] <= fewest[begin]:
                ends[begin], fewest[begin] = end + 1, num_rows + fewest[end + 1]
    trees, begin = [], 0
    while begin < len(order):
        trees.append(tuple(order[begin : ends[begin]]))
        begin = ends[begin]
    return trees


def lay_out(sequences: Sequence[Rows]) -> TreeLayout:
    """The tree of sequences in depth-first order."""
    ids: list[int] = []
    positions: list[int] = []
    paths: list[list[int]] = []
    continued = {0: -1}  # the first row of each branch -> the row that it continues
    before: Rows = ()
    path: list[int] = []
    for rows in sequences:
        shared = num_shared(before, rows)
        path = path[:shared]
        last, first = path[-1] if path else -1, len(ids)
        if shared < len(rows) and last != first - 1:
            continued[first] = last
        ids += rows[shared:]
        positions += range(shared, len(rows))
        path += range(first, len(ids))
        paths.append(path)
        before = rows
    # A segment ends where a branch begins, and where one goes on from the middle of a run.
    starts = sorted({*continued, *(row + 1 for row in continued.values())})
    parents = [bisect_right(starts, continued.get(start, start - 1)) - 1 for start in starts]
    return TreeLayout(ids=ids, positions=positions, starts=starts, parents=parents, paths=paths)
