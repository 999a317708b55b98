"""Boxes, plans and copies against index arithmetic on whole tensors."""

from __future__ import annotations

import random

import mesh_cases
import pytest
import torch
from pool import WorkerPool
from torch import Tensor

from nanoengine.parallel.parameter_record import Slice
from nanoengine.state.checkpoint_writer import choose_writers
from nanoengine.state.reshard import Resharder
from nanoengine.state.slices import Box, Held, Piece, cut_parameter, make_piece, make_plan


def cells(box: Box) -> set[tuple[int, ...]]:
    every = torch.zeros(12, 12)
    box.of(every, Box((0, 0), (12, 12))).fill_(1)
    return {tuple(index) for index in every.nonzero().tolist()}


def random_box(chance: random.Random) -> Box:
    begin = chance.randrange(10), chance.randrange(10)
    return Box(begin, (chance.randint(1, 12 - begin[0]), chance.randint(1, 12 - begin[1])))


def test_boxes_intersect_and_leave_disjoint_rests() -> None:
    chance = random.Random(0)
    for _ in range(300):
        one, other = random_box(chance), random_box(chance)
        common = one.intersect(other)
        assert (cells(common) if common else set()) == cells(one) & cells(other)
        if common is not None:
            rest = list(one.minus(common))
            assert sum(box.numel for box in rest) == one.numel - common.numel
            assert set().union(*map(cells, rest)) == cells(one) - cells(common)


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        ((6, 7), None),
        ((6, 7), Slice(0, 12, ((6, 12),))),
        ((6, 7), Slice(1, 21, ((7, 14),))),
        ((7, 5), Slice(0, 14, ((0, 3), (6, 8), (10, 12)))),  # q, k and v of one rank of two
        ((9,), Slice(0, 18, ((4, 9), (13, 17)))),
    ],
)
def test_every_run_of_a_flat_buffer_is_cut_into_boxes_of_the_whole(
    shape: tuple[int, ...], where: Slice | None
) -> None:
    whole_shape = torch.Size(shape) if where is None else where.whole_shape(torch.Size(shape))
    whole = torch.arange(whole_shape.numel()).view(whole_shape)
    mine = (whole if where is None else where.take(whole)).flatten()
    for lo in range(len(mine)):
        for hi in range(lo + 1, len(mine) + 1):
            pieces = cut_parameter("w", shape, where, mine[lo:hi].clone(), lo)
            assert sum(piece.box.numel for piece, _ in pieces) == hi - lo
            for piece, values in pieces:
                inside = piece.box.of(whole, Box((0,) * whole.ndim, tuple(whole.shape)))
                assert piece.whole == tuple(whole.shape)
                assert torch.equal(values, inside)


def split_at_random(chance: random.Random, whole: Tensor, num_ranks: int) -> list[Held]:
    """Runs of random length, in random hands, some of them twice."""
    hands: list[Held] = [[] for _ in range(num_ranks)]
    at = 0
    while at < whole.numel():
        size = min(chance.randint(1, 30), whole.numel() - at)
        flat = whole.flatten()[at : at + size].clone()
        for rank in chance.sample(range(num_ranks), chance.randint(1, 2)):
            hands[rank] += cut_parameter("w", whole.shape, None, flat, at)
        at += size
    return hands


def test_any_cut_becomes_any_other_cut() -> None:
    chance = random.Random(1)
    for _ in range(30):
        whole = torch.randn(11, 13)
        sources, targets = (split_at_random(chance, whole, 3) for _ in range(2))
        for hand in targets:
            for _, tensor in hand:
                tensor.zero_()
        held = [[piece for piece, _ in hand] for hand in sources]
        wanted = [[piece for piece, _ in hand] for hand in targets]
        plan = make_plan(held, wanted)
        assert plan == make_plan(held, wanted)
        for copy in plan:
            into, source = targets[copy.to][copy.to_piece], sources[copy.source][copy.source_piece]
            copy.box.of(into[1], into[0].box).copy_(copy.box.of(source[1], source[0].box))
        for hand in targets:
            for piece, tensor in hand:
                assert torch.equal(tensor, piece.box.of(whole, Box((0, 0), (11, 13))))
        # nothing is copied twice, and from oneself where one has it
        assert sum(c.box.numel for c in plan) == sum(p.box.numel for w in wanted for p in w)


def test_the_plan_is_kept_until_the_pieces_change() -> None:
    source, target = torch.arange(12.0).view(3, 4), torch.zeros(2, 4)
    held = [(make_piece("w", source), source)]
    wanted = [(Piece("w", (3, 4), Box((1, 0), (2, 4))), target)]
    resharder = Resharder()
    for _ in range(3):
        assert resharder.run(held, wanted) == 32
        assert torch.equal(target, source[1:])
        source += 1
    assert resharder.num_plans == 1
    half = torch.zeros(3, 2, dtype=torch.bfloat16)
    resharder.run(held, [(Piece("w", (3, 4), Box((0, 2), (3, 2)), "bfloat16"), half)])
    assert resharder.num_plans == 2 and torch.equal(half, source[:, 2:].bfloat16())


def test_a_rank_that_wants_something_else_has_all_ranks_plan_anew(pool: WorkerPool) -> None:
    for num_plans, was_right in pool.run(2, mesh_cases.one_rank_changes_its_wishes, timeout_s=60.0):
        assert num_plans == 2 and was_right


def test_what_nobody_holds_is_named_and_nothing_is_copied() -> None:
    source, target = torch.ones(4, 4), torch.zeros(4, 4)
    half = [(Piece("w", (4, 4), Box((0, 0), (2, 4))), source[:2])]
    with pytest.raises(ValueError, match="v is missing: no rank holds it"):
        Resharder().run(half, [(make_piece("v", target), target)])
    with pytest.raises(ValueError, match=r"w: nobody holds .*begin=\(2, 0\), shape=\(2, 4\)"):
        Resharder().run(half, [(make_piece("w", target), target)])
    with pytest.raises(ValueError, match=r"w is \(4, 4\) here and \(2, 2\) there"):
        Resharder().run(half, [(make_piece("w", target[:2, :2]), target[:2, :2])])
    assert not target.any()


def test_replicas_share_the_writing() -> None:
    pieces = [Piece(f"w{i}", (10,), Box((0,), (10,))) for i in range(6)]
    own = Piece("own", (5,), Box((0,), (5,)))
    chosen = choose_writers([pieces, pieces, [*pieces, own]])
    assert sorted(n for numbers in chosen for n in numbers) == [0, 1, 2, 3, 4, 5, 6]
    assert [len(numbers) for numbers in chosen] == [2, 2, 3]
