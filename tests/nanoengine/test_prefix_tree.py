"""Prefix trees against their definition: a distinct prefix is one row, a cut is the cheapest."""

from __future__ import annotations

import doctest
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine import prefix_tree
from nanoengine.prefix_tree import added_rows, cut, depth_first, lay_out, num_shared

token_rows = st.lists(st.integers(0, 2), min_size=1, max_size=8)
families = st.lists(token_rows, min_size=1, max_size=9)


def distinct_prefixes(sequences: list[list[int]]) -> int:
    return len({tuple(rows[: t + 1]) for rows in sequences for t in range(len(rows))})


@settings(max_examples=150, deadline=None)
@given(families)
def test_every_distinct_prefix_is_one_row_below_its_own_ancestors(
    sequences: list[list[int]],
) -> None:
    ordered = [sequences[i] for i in depth_first(sequences)]
    assert sorted(ordered) == sorted(sequences)
    layout = lay_out(ordered)
    assert len(layout.ids) == distinct_prefixes(sequences) == sum(added_rows(ordered))
    bounds = [*layout.starts, len(layout.ids)]
    assert all(lo < hi for lo, hi in pairwise(bounds))  # no empty segment
    above: list[list[int]] = []  # the rows of each segment and its ancestors
    for (lo, hi), parent in zip(pairwise(bounds), layout.parents, strict=True):
        assert parent < len(above)
        above.append([*(above[parent] if parent >= 0 else []), *range(lo, hi)])
    for rows, path in zip(ordered, layout.paths, strict=True):
        assert [layout.ids[row] for row in path] == rows
        assert [layout.positions[row] for row in path] == list(range(len(rows)))
        seen = next(a for a in above if path[-1] in a)
        assert seen[: len(path)] == path  # so a query sees its sequence's rows and no other
    # As few segments as there can be: a run ends only at a fork, at a leaf, or before a root.
    following = {tuple(rows[: t + 1]): set() for rows in sequences for t in range(len(rows))}
    for rows in sequences:
        for t in range(1, len(rows)):
            following[tuple(rows[:t])].add(rows[t])
    forks = [f for f in following.values() if len(f) > 1]
    roots = len({rows[0] for rows in sequences})
    assert len(layout.starts) == roots + sum(map(len, forks))


@settings(max_examples=100, deadline=None)
@given(families, st.integers(1, 25))
def test_a_cut_is_the_cheapest_of_all(sequences: list[list[int]], budget: int) -> None:
    order = depth_first(sequences)
    trees = cut(sequences, order, budget)
    assert [i for tree in trees for i in tree] == order

    def rows_of(parts: list[tuple[int, ...]]) -> int:
        return sum(distinct_prefixes([sequences[i] for i in part]) for part in parts)

    def is_allowed(part: tuple[int, ...]) -> bool:
        rows = [sequences[i] for i in part]
        is_one_tree = len({row[0] for row in rows}) == 1
        return len(part) == 1 or (is_one_tree and distinct_prefixes(rows) <= budget)

    assert all(map(is_allowed, trees))
    places = range(1, len(order))
    cheapest = min(
        rows_of(parts)
        for count in range(len(order))
        for chosen in combinations(places, count)
        if all(
            map(
                is_allowed,
                parts := [tuple(order[a:b]) for a, b in pairwise([0, *chosen, len(order)])],
            )
        )
    )
    assert rows_of(trees) == cheapest


def test_branches_come_longest_first_and_a_chain_is_one_segment() -> None:
    sequences = [[1, 2], [1, 2, 3, 4], [1, 2, 3], [1, 5, 5, 5, 5], [1, 2]]
    order = depth_first(sequences)
    assert order == [3, 1, 2, 0, 4]
    layout = lay_out([sequences[i] for i in order])
    assert layout.ids == [1, 5, 5, 5, 5, 2, 3, 4]
    assert (layout.starts, layout.parents) == ([0, 1, 5], [-1, 0, 0])
    chain = lay_out([[1], [1, 2], [1, 2, 3]])  # in any order that is depth-first
    assert (chain.ids, chain.starts, chain.parents) == ([1, 2, 3], [0], [-1])


def test_a_cut_of_one_level_fills_the_first_trees() -> None:
    sequences = [[1, 2, m, m] for m in range(7)]
    trees = cut(sequences, depth_first(sequences), 2 + 3 * 2)
    assert trees == [(0, 1, 2), (3, 4, 5), (6,)]


def test_num_shared_by_hand() -> None:
    assert num_shared([1, 2, 3], [1, 2, 3]) == 3
    assert num_shared([1, 2, 3], [1, 2, 4, 5]) == 2
    assert num_shared([], [1]) == num_shared([2], [1]) == 0


def test_a_thousand_nested_sequences_need_no_recursion() -> None:
    sequences = [[0] * n for n in range(1, 1001)]
    order = depth_first(sequences)
    assert order == list(range(999, -1, -1))
    assert cut(sequences, order, 1000) == [tuple(order)]


def test_the_example_in_the_docstring_holds() -> None:
    found = doctest.testmod(prefix_tree)
    assert found.attempted >= 3 and not found.failed
