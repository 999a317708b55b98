"""Schedules: complete, executable, with the bubble and the memory that the papers state."""

from __future__ import annotations

import doctest
import importlib.util
import random
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from closed_forms import peak_live_closed_form

from nanoengine.parallel import schedules
from nanoengine.parallel.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Kind,
    Schedule,
    bubble_closed_form,
    forward_only,
    make_schedule,
    simulate,
)

SHAPES = [(1, 3), (2, 4), (3, 9), (4, 4), (4, 8), (8, 16), (8, 32)]
NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1)]


@pytest.mark.parametrize("shape", [*SHAPES, (4, 2), (5, 7), (4, 5)])
@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_every_micro_batch_goes_once_forward_and_once_back(
    name: str, chunks: int, shape: tuple[int, int]
) -> None:
    schedule = make_schedule(name, *shape, chunks)
    kinds: tuple[Kind, ...] = ("F", "I", "W") if name == "zb_h1" else ("F", "B")
    for row in schedule.actions:
        assert Counter(row) == Counter(
            Action(kind, micro, chunk)
            for kind in kinds
            for micro in range(shape[1])
            for chunk in range(chunks)
        )
    simulate(schedule)  # it comes to an end, also with numbers that are no multiples


@pytest.mark.parametrize("shape", [*SHAPES, (2, 7), (5, 7)])
@pytest.mark.parametrize(("name", "chunks"), [*NAMES, ("forward_only", 1), ("forward_only", 3)])
def test_two_ranks_exchange_messages_in_one_order(
    name: str, chunks: int, shape: tuple[int, int]
) -> None:
    """NCCL has no tags: in each direction and kind, messages must be taken as they were sent."""
    make = forward_only if name == "forward_only" else SCHEDULES[name]
    schedule = make(*shape, chunks)
    sent, taken = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            stage = schedule.stage(rank, action.chunk)
            step = 1 if action.kind == "F" else -1
            if action.kind == "W":
                continue
            if 0 <= stage + step < schedule.num_stages:
                to = schedule.owner(stage + step)[0]
                sent[rank, to, step].append((stage + step, action.micro))
            if 0 <= stage - step < schedule.num_stages:
                source = schedule.owner(stage - step)[0]
                taken[source, rank, step].append((stage, action.micro))
    assert sent == taken


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_simulated_bubble_and_memory_are_the_closed_forms(
    name: str, chunks: int, shape: tuple[int, int]
) -> None:
    schedule = make_schedule(name, *shape, chunks)
    timeline = simulate(schedule)
    assert timeline.bubble == pytest.approx(bubble_closed_form(schedule), abs=1e-12)
    assert timeline.peak_live == [
        peak_live_closed_form(schedule, rank) for rank in range(schedule.num_ranks)
    ]


def test_worked_pipeline() -> None:
    """Four ranks, eight micro-batches, by hand. Units of F = I = W = 1, so B = 2 and a rank works
    24. 1F1B: rank 0 waits while micro-batch 0 goes down three ranks and comes back up: 3·1 + 3·2
    = 9, and 9/33. Interleaved over two chunks: half of that, 4.5/28.5. ZB-H1: the way down and up
    costs 3 + 3, of which the three W that the last rank keeps back fill 3: 3/27."""
    expected = {"gpipe": 9 / 33, "1f1b": 9 / 33, "interleaved": 4.5 / 28.5, "zb_h1": 3 / 27}
    for name, bubble in expected.items():
        chunks = 2 if name == "interleaved" else 1
        assert simulate(make_schedule(name, 4, 8, chunks)).bubble == pytest.approx(bubble)
    live = {name: simulate(make_schedule(name, 4, 8)).peak_live for name in ("gpipe", "1f1b")}
    assert live == {"gpipe": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1]}
    assert simulate(make_schedule("zb_h1", 4, 8)).peak_live == [4, 4, 4, 4]
    assert simulate(make_schedule("interleaved", 4, 8, 2)).peak_live == [11, 9, 7, 5]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_closed_forms_hold_for_unequal_times(name: str) -> None:
    costs = Costs(forward=1.0, input_grad=1.2, weight_grad=0.9)
    schedule = make_schedule(name, 4, 12)
    assert simulate(schedule, costs).bubble == pytest.approx(bubble_closed_form(schedule, costs))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_torch_pipelining_orders_the_actions_alike(name: str, chunks: int) -> None:
    """PyTorch's own generator of rank lists as a second opinion."""
    from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

    p, m = 4, 8
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    schedule = make_schedule(name, p, m, chunks)
    for rank in range(p):
        ahead = (p - 1 - rank) * (2 if chunks > 1 else 1) + (chunks - 1) * p
        theirs = _get_1f1b_rank_ops(
            chunks,
            p,
            ahead,
            m * chunks - ahead,
            ahead,
            rank,
            lambda i, rank=rank: i // p % chunks * p + rank,
            lambda i, rank=rank, ahead=ahead: (chunks - 1 - (i - ahead) // p % chunks) * p + rank,
            num_1f1b_microbatches=rank,
            enable_zero_bubble=name == "zb_h1",
        )
        expected = [
            (kinds[action.computation_type.name], action.microbatch_index, action.stage_index)
            for action in theirs
            if action is not None
        ]
        found = [
            (action.kind, action.micro, schedule.stage(rank, action.chunk))
            for action in schedule.actions[rank]
        ]
        assert found == expected


def test_a_list_that_waits_for_itself_is_named() -> None:
    rows = ((Action("F", 0), Action("B", 0)), (Action("B", 0), Action("F", 0)))
    with pytest.raises(ValueError, match="never finishes: rank 0 at B0, rank 1 at B0"):
        simulate(Schedule("odd", 1, 1, rows))


def test_swapping_two_actions_never_beats_the_schedule() -> None:
    """1F1B and ZB-H1 are optimal for their memory: no swap of neighbours is faster with as few
    live activations."""
    chance = random.Random(0)
    for name in ("1f1b", "zb_h1"):
        schedule = make_schedule(name, 4, 8)
        best = simulate(schedule)
        for _ in range(60):
            rank = chance.randrange(4)
            row = list(schedule.actions[rank])
            at = chance.randrange(len(row) - 1)
            row[at], row[at + 1] = row[at + 1], row[at]
            rows = [*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]]
            try:
                other = simulate(Schedule(name, 8, 1, tuple(rows)))
            except ValueError:
                continue
            if max(other.peak_live) <= max(best.peak_live):
                assert other.makespan >= best.makespan - 1e-9


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="schedule='dualpipe': must be one of gpipe"):
        make_schedule("dualpipe", 2, 2)
    with pytest.raises(ValueError, match="num_chunks=2: zb_h1 has one chunk"):
        make_schedule("zb_h1", 2, 4, 2)
    with pytest.raises(ValueError, match="num_micro=0"):
        make_schedule("gpipe", 2, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_holds_one_box_an_action(name: str) -> None:
    path = Path(__file__).resolve().parents[3] / "scripts" / "plot_schedule.py"
    spec = importlib.util.spec_from_file_location("plot_schedule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    schedule = make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    root = ElementTree.fromstring(module.draw(schedule, Costs()))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == 1 + sum(len(row) for row in schedule.actions)


def test_the_examples_in_the_docstrings_hold() -> None:
    found = doctest.testmod(schedules)
    assert found.attempted >= 2 and not found.failed
