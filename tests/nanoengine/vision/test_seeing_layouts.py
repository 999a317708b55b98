"""A model that sees is trained over processes as in one: gradients, norms, weights, log-probs in
fp64. The reference is the engine of a single process, whose tower and gradients
test_seeing_transformer.py and test_tower.py compare with transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import seeing_layout_cases as cases
import torch
from parallel_cases import Result
from pool import WorkerPool
from seeing_layout_cases import SeeingCase, Trained
from test_parallel_training import Difference, compare

from nanoengine.config import VisionTrain
from nanoengine.parallel.layout import Layout, SplitConfig

LIMIT = 1e-10
PLANTED = 1e-3

Folders = Callable[[SeeingCase], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The model of a case, built once."""

    @functools.cache
    def build(*shape: Any) -> Path:
        return cases.build_folder(tmp_path_factory.mktemp("model"), *shape)

    return lambda case: build(case.tied, case.num_deep, case.num_experts)


@pytest.fixture(scope="module")
def truth(folders: Folders) -> Callable[[SeeingCase], Result]:
    """A case on a single process, every sample read alone: no trees, no checkpointing."""
    found = functools.cache(lambda plain: cases.run(plain, folders(plain)))
    return lambda case: found(
        SeeingCase(
            tied=case.tied,
            num_deep=case.num_deep,
            num_experts=case.num_experts,
            budget=10_000,
            shown=case.shown,
            steps=case.steps,
        )
    )


def differences(
    pool: WorkerPool,
    folders: Folders,
    truth: Callable[[SeeingCase], Result],
    some: Sequence[SeeingCase],
) -> list[Difference]:
    jobs = [(case, folders(case)) for case in some]
    by_rank = pool.run(some[0].layout.world, cases.on_rank, jobs)
    return [
        compare([results[i] for results in by_rank], truth(case)) for i, case in enumerate(some)
    ]


def check(
    pool: WorkerPool,
    folders: Folders,
    truth: Callable[[SeeingCase], Result],
    some: Sequence[SeeingCase],
) -> None:
    """All cases have the same number of ranks."""
    for case, found in zip(some, differences(pool, folders, truth, some), strict=True):
        worst = max(found.gradient, found.norm, found.loss, found.weights)
        assert worst <= LIMIT, (case, found)
        assert found.logps <= 1e-6, (case, found)


DATA = [
    *(SeeingCase(layout=Layout(dp=2), zero=zero) for zero in (1, 3)),
    # a rank without a picture; one without a sample; more passes on one than on the other
    *(SeeingCase(layout=Layout(dp=2), zero=zero, deal="text", budget=30) for zero in range(4)),
    *(SeeingCase(layout=Layout(dp=2), zero=zero, deal="empty", tied=True) for zero in (0, 3)),
    SeeingCase(layout=Layout(dp=2), zero=2, shown=("", "", "", "d")),
    SeeingCase(layout=Layout(dp=2), zero=3, num_deep=0, steps=2),
]


def test_data_parallel(pool: WorkerPool, folders: Folders, truth: Callable) -> None:
    """With and without pictures on a rank, for all that ZeRO cuts."""
    check(pool, folders, truth, DATA)


PIPELINE = [
    # three DeepStack layers: two stages of two layers, so rows of one travel; then rows of none
    SeeingCase(layout=Layout(pp=2), num_deep=3, budget=30),
    SeeingCase(
        layout=Layout(pp=2), num_deep=1, tied=True, budget=30, activation_checkpointing=True
    ),
    # four stages of one layer: rows of three layers travel, then of two, then of one
    SeeingCase(
        layout=Layout(pp=2), num_deep=3, budget=30,
        split=SplitConfig(schedule="interleaved", chunks=2),
    ),
    SeeingCase(
        layout=Layout(pp=2), num_deep=3, budget=30, share_prefix=True,
        split=SplitConfig(schedule="zb_h1"),
    ),
]  # fmt: skip


def test_a_batch_of_text_leaves_the_tower_without_a_gradient(
    pool: WorkerPool, folders: Folders
) -> None:
    """And those of layers do not wait for it: their buckets leave while backward runs."""
    case = SeeingCase(layout=Layout(dp=2), zero=3, shown=("",) * 4)
    for results in pool.run(2, cases.on_rank, [(case, folders(case))]):
        assert results[0].num_early > 2
        tower = [part.gradient for part in results[0].owned if part.name.startswith("visual.")]
        assert tower and not any(bool(gradient.any()) for gradient in tower)
        assert results[0].steps[0]["grad_norm"] > 0


def test_pipelines(pool: WorkerPool, folders: Folders, truth: Callable) -> None:
    """The tower on the first stage, and rows of DeepStack for layers of others."""
    check(pool, folders, truth, PIPELINE)


SEQUENCE_PARALLEL = SplitConfig(sequence_parallel=True)
SPLIT = [
    SeeingCase(layout=Layout(tp=2)),
    SeeingCase(layout=Layout(tp=2), tied=True, share_prefix=True, activation_checkpointing=True),
    # of rows that are shared out, one rank may have no picture's
    SeeingCase(layout=Layout(tp=2), split=SEQUENCE_PARALLEL, budget=30),
    SeeingCase(layout=Layout(tp=2), split=SEQUENCE_PARALLEL, shown=("", "a", "", "", "d")),
    SeeingCase(layout=Layout(cp=2), budget=30),
    SeeingCase(layout=Layout(cp=2), zero=3, activation_checkpointing=True, shown=("", "d", "c")),
]


def test_matrices_and_tokens_over_ranks(
    pool: WorkerPool, folders: Folders, truth: Callable
) -> None:
    """A tower on each rank, whose gradients are whole where ranks have all rows, and else terms."""
    check(pool, folders, truth, SPLIT)


COMBINED = [
    SeeingCase(
        layout=Layout(pp=2, tp=2), num_deep=3, budget=30, share_prefix=True, tied=True,
        split=SplitConfig(sequence_parallel=True, schedule="zb_h1"), activation_checkpointing=True,
    ),
    SeeingCase(
        layout=Layout(pp=2, cp=2), zero=1, num_deep=3, budget=30,
    ),
    SeeingCase(
        layout=Layout(dp=2, tp=2), zero=2, deal="text", budget=30, share_prefix=True,
        split=SEQUENCE_PARALLEL,
    ),
    SeeingCase(layout=Layout(dp=2, cp=2), zero=3, deal="text", activation_checkpointing=True),
]  # fmt: skip


def test_layouts_of_several_axes(pool: WorkerPool, folders: Folders, truth: Callable) -> None:
    check(pool, folders, truth, COMBINED)


EXPERTS = [
    *(
        SeeingCase(layout=Layout(ep=2), num_experts=4, zero=zero, deal="text", budget=30)
        for zero in (0, 3)
    ),
    SeeingCase(
        layout=Layout(ep=2), num_experts=4, share_prefix=True, activation_checkpointing=True
    ),
    SeeingCase(layout=Layout(tp=2), num_experts=4, budget=30),
    SeeingCase(layout=Layout(tp=2), num_experts=4, split=SEQUENCE_PARALLEL),
]
EXPERTS_COMBINED = [
    SeeingCase(layout=Layout(pp=2, ep=2), num_experts=4, num_deep=3, budget=30),
    SeeingCase(layout=Layout(dp=2, ep=2), num_experts=4, zero=2, deal="text"),
]


def test_experts_over_ranks(pool: WorkerPool, folders: Folders, truth: Callable) -> None:
    """Each rank with samples of its own, some without a picture, and half of the experts."""
    check(pool, folders, truth, EXPERTS)
    check(pool, folders, truth, EXPERTS_COMBINED)


# -- what of a tower is trained, and when ----------------------------------------------------------

OWN_RATE = 2e-2
# A rank without a picture, whose share of the tower moves as the other's does.
TEXT = {"deal": "text", "shown": ("a", "", "abc", "")}
LAYOUTS: list[dict[str, Any]] = [
    *({"layout": Layout(dp=2), "zero": zero, **TEXT} for zero in range(4)),
    # the tied embedding waits for the end of a step in one bucket with the tower
    {"layout": Layout(pp=2), "tied": True, "num_deep": 3, "budget": 30},
    {"layout": Layout(tp=2), "zero": 1},
    {"layout": Layout(tp=2), "split": SEQUENCE_PARALLEL, "shown": ("", "a", "", "", "d")},
    {"layout": Layout(cp=2), "zero": 2, "shown": ("", "d", "c")},
]
WAYS: list[dict[str, Any]] = [
    {"vision_train": "all", "vision_lr": OWN_RATE},
    {"vision_train": "merger", "vision_lr": OWN_RATE},
    {"vision_train": "none"},
]


def worst(found: Trained, true: Trained) -> float:
    """The largest difference of a master, a moment or a norm, or of a log-prob beyond 1e-6."""
    assert found.state.keys() == true.state.keys()
    errors = [
        float((found.state[name] - one).norm() / (one.norm() or 1.0))
        for name, one in true.state.items()
    ]
    errors += [abs(a / b - 1) for a, b in zip(found.norms, true.norms, strict=True)]
    for ours, theirs in zip(found.logps, true.logps, strict=True):
        gaps = [float((values - theirs[i]).abs().max()) for i, values in ours.items()]
        gap = max(gaps, default=0.0)  # a rank may have no sample
        errors.append(0.0 if gap <= 1e-6 else gap)
    return max(errors)


def some(case: SeeingCase, folder: Path) -> Trained:
    """By one process, which reads every sample alone."""
    plain = {"layout": Layout(), "split": SplitConfig(), "zero": 0, "budget": 10_000}
    return cases.train_some(replace(case, **plain, deal="round", bug=""), folder)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["vision_train"])
def test_what_is_trained_of_a_tower_rests_and_moves_as_in_one_process(
    pool: WorkerPool, folders: Folders, way: dict[str, Any]
) -> None:
    """Pictures, text, pictures: weights, moments, counts of steps and norms, and log-probs after
    each step; what is frozen keeps its bits on every rank, and has no state."""
    jobs = [SeeingCase(**layout, **way) for layout in LAYOUTS]
    by_rank = pool.run(2, cases.on_rank_some, [(case, folders(case)) for case in jobs])
    for i, case in enumerate(jobs):
        true = some(case, folders(case))
        names = {name.removeprefix("exp_avg.") for name in true.state if name[:8] == "exp_avg."}
        towers = {name for name in names if name.startswith("visual.")}
        assert any("merger" in name for name in towers) == (case.vision_train != "none")
        assert any("blocks" in name for name in towers) == (case.vision_train == "all")
        for found in (results[i] for results in by_rank):
            assert worst(found, true) <= LIMIT, case
            assert found.counts == {"step_count": 3, "tower_steps": 2 if towers else 0}
            assert all(found.frozen.values()) and found.frozen.keys().isdisjoint(
                name.removeprefix("visual.") for name in towers
            )


def test_the_comparison_of_towers_finds_planted_bugs(pool: WorkerPool, folders: Folders) -> None:
    bugs = {
        "a rank without pictures rests alone": ({"layout": Layout(pp=2)}, "counts"),
        "decay in steps of text": (LAYOUTS[3], "state"),
        "the rate of the rest": (LAYOUTS[3], "state"),
        "rows of old weights": (LAYOUTS[3], "state"),
    }
    for bug, (layout, seen_in) in bugs.items():
        case = SeeingCase(**layout, **WAYS[1], bug=bug)
        true = some(case, folders(case))
        results = [one[0] for one in pool.run(2, cases.on_rank_some, [(case, folders(case))])]
        if seen_in == "counts":
            assert any(found.counts != true.counts for found in results), bug
        else:
            assert any(worst(found, true) > PLANTED for found in results), bug


# -- what must be found ----------------------------------------------------------------------------


def test_the_comparison_finds_planted_bugs(
    pool: WorkerPool, folders: Folders, truth: Callable
) -> None:
    bugs = {
        "tower gradients of a rank's rows alone": SPLIT[2],
        "deep rows without a gradient": PIPELINE[0],
        "chosen rows counted from the pictures of all ranks": SPLIT[4],
    }
    for bug, case in bugs.items():
        job = (replace(case, bug=bug), folders(case))
        by_rank = pool.run(2, cases.on_rank, [job])
        with pytest.raises(AssertionError):
            found = compare([results[0] for results in by_rank], truth(case))
            assert found.gradient <= PLANTED


# -- weights between layouts -----------------------------------------------------------------------


@pytest.mark.parametrize(("train", "num_experts"), [("all", 0), ("merger", 0), ("all", 4)])
def test_a_checkpoint_of_one_layout_is_resumed_and_sent_from_another(
    pool: WorkerPool, folders: Folders, tmp_path: Path, train: VisionTrain, num_experts: int
) -> None:
    """Masters and moments to the bit, the export too, and a replica of two ranks has its part."""
    same: Any = {"vision_train": train, "num_experts": num_experts}
    writer = SeeingCase(layout=Layout(dp=2), zero=3, **same)
    others: list[dict[str, Any]] = [
        {"layout": Layout(pp=2)},
        {"layout": Layout(tp=2)},
        {"layout": Layout(cp=2), "zero": 1},
        {"layout": Layout(ep=2), "zero": 2},
    ]
    readers = [writer, *(SeeingCase(**one, **same) for one in others[: 4 if num_experts else 3])]
    folder = folders(writer)
    saved, _ = pool.run(2, cases.save, writer, folder, tmp_path)
    names = [name for name in saved.state if "visual" in name]
    assert len(names) > 30 and any("blocks" in name for name in names) == (train == "all")
    assert saved.counts == {"step_count": 2, "tower_steps": 1}
    exports = []
    for reader in readers:
        found = pool.run(2, cases.resume, reader, folder, tmp_path)
        assert all(one.is_replica_equal for one in found), reader.layout
        assert found[0].state.keys() == saved.state.keys()
        assert all(one.counts == saved.counts for one in found), reader.layout
        for name, tensor in saved.state.items():
            assert torch.equal(found[0].state[name], tensor), (reader.layout, name)
        exports.append(found[0].exported)
    for export in exports[1:]:
        assert export.keys() == exports[0].keys()
        assert all(torch.equal(export[name], x) for name, x in exports[0].items())
