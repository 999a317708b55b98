"""Pipelines over real processes: gradients, messages, memory and idle time."""

from __future__ import annotations

from dataclasses import replace

import pipeline_cases as cases
import pytest
import torch
from closed_forms import peak_live_closed_form
from pipeline_cases import CONFIG, Case, Found
from pool import WorkerPool
from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.schedules import (
    bubble_closed_form,
    make_schedule,
)
from nanoengine.parallel.stage import Stage, make_stages

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)]


def relative_error(found: list[Found], expected: dict[str, Tensor]) -> float:
    """The worst parameter on any rank; every parameter must be somewhere."""
    assert {name for rank in found for name in rank.grads} == set(expected)
    return max(
        float((grad - expected[name]).norm() / expected[name].norm())
        for rank in found
        for name, grad in rank.grads.items()
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_gradients_memory_and_messages_are_those_of_theory(
    pool: WorkerPool, name: str, chunks: int, world: int
) -> None:
    chunks = 1 if world == 4 else chunks  # five layers
    num_micro = 5 if world == 4 and name != "interleaved" else 4
    expected, loss = cases.reference(True, torch.float64, num_micro)
    found = pool.run(world, cases.gradients, Case(name, chunks, num_micro))
    assert relative_error(found, expected) <= 1e-10
    assert found[-1].loss == pytest.approx(loss, rel=1e-12)
    first, last = found[0].grads["embedding"], found[-1].grads["embedding"]
    assert torch.equal(first, last)  # so that the copies never drift apart
    schedule = make_schedule(name, world, num_micro, chunks)
    rows = sum(micro.num_rows for micro in cases.draw_micros(num_micro))
    for rank, result in enumerate(found):
        assert result.peak_live == peak_live_closed_form(schedule, rank)
        stages = [schedule.stage(rank, chunk) for chunk in range(chunks)]
        down = sum(stage < schedule.num_stages - 1 for stage in stages)
        up = sum(stage > 0 for stage in stages)
        size = CONFIG.hidden_size * 8
        for op in ("send", "recv"):
            calls = (down + up) * num_micro
            assert result.traffic[op] == (calls, (down + up) * rows * size)


def test_sent_tensors_are_let_go_while_the_pipeline_runs(pool: WorkerPool) -> None:
    """As many as the next rank may be behind, however many micro-batches follow."""
    most = pool.run(2, cases.most_sent_at_once, Case("1f1b", num_micro=8))
    assert max(most) <= 2


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_untied_gradients_have_the_bits_of_the_whole_model(
    pool: WorkerPool, name: str, chunks: int
) -> None:
    expected, _ = cases.reference(False, torch.float32, 5)
    case = Case(name, chunks, 5, tied=False, dtype=torch.float32)
    found = pool.run(2, cases.gradients, case)
    assert relative_error(found, expected) == 0.0


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_recomputed_activations_give_the_same_gradients(pool: WorkerPool, name: str) -> None:
    expected, _ = cases.reference(True, torch.float64, 4)
    found = pool.run(2, cases.gradients, Case(name, checkpointing=True))
    assert relative_error(found, expected) <= 1e-10


def test_forgetting_to_sum_tied_gradients_is_seen(pool: WorkerPool) -> None:
    expected, loss = cases.reference(True, torch.float64, 4)
    found = pool.run(2, cases.gradients, Case("1f1b", sums_tied=False))
    assert relative_error(found, expected) > 0.1
    assert found[-1].loss == pytest.approx(loss, rel=1e-12)  # the loss alone would not tell


@pytest.mark.parametrize(("chunks", "num_micro"), [(1, 3), (2, 5)])
def test_forward_only_gives_the_hidden_states_of_the_whole_model(
    pool: WorkerPool, chunks: int, num_micro: int
) -> None:
    model = Transformer(CONFIG)
    model.init_weights(3, std=0.4)
    found = pool.run(2, cases.forward, chunks, num_micro)
    assert not found[0] and len(found[-1]) == num_micro
    for micro, hidden in zip(cases.draw_micros(num_micro), found[-1], strict=True):
        with torch.no_grad():
            expected = model(micro.ids_N, micro.positions_N, cases.context_of(micro))
        assert torch.equal(hidden, expected)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_measured_bubble_and_peak_are_the_closed_forms(
    pool: WorkerPool, name: str, chunks: int
) -> None:
    """Four ranks, eight micro-batches, sleep as compute. A machine that is busy elsewhere wakes
    sleepers late, so a second and a third try sleep longer."""
    schedule = make_schedule(name, 4, 8, chunks)
    expected = bubble_closed_form(schedule)
    measured = []
    for unit_s in (0.1, 0.2, 0.4):
        ranks = pool.run(4, cases.bubble, name, 8, chunks, unit_s)
        assert [r["peak_live"] for r in ranks] == [
            peak_live_closed_form(schedule, rank) for rank in range(4)
        ]
        wall = max(r["end"] for r in ranks) - min(r["begin"] for r in ranks)
        measured.append(1 - sum(r["busy_s"] for r in ranks) / (4 * wall))
        if abs(measured[-1] - expected) <= 0.1 * expected:
            return
    raise AssertionError(f"bubbles {measured} instead of {expected:.3f}")


def test_stages_hold_each_parameter_once_but_for_a_tied_embedding() -> None:
    for tied in (True, False):
        config = replace(CONFIG, tie_word_embeddings=tied)
        whole = Transformer(config)
        whole.init_weights(1)
        names = []
        for index in range(3):
            stage = Stage(config, index, 3)
            stage.init_weights(1)
            names += [name for name, _ in stage.named_parameters()]
            for name, parameter in stage.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(name))
        assert sorted(names) == sorted(
            [name for name, _ in whole.named_parameters()] + (["embedding"] if tied else [])
        )


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pp=1 x 6 chunks: more stages than the 5 layers"):
        make_stages(Mesh(Layout()), CONFIG, 6)
