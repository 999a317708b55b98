"""Which traces a step of the warm start trains on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from nanorl.distributed.warm_start import WarmStart
from nanorl.options.phase_config import WarmStartConfig
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout


class Teacher:
    """Stands in for an agent's kit and its teacher: a trace's tokens say which task it is."""

    def __init__(self) -> None:
        self.preset = get_preset("tiny")
        self.tokenizer = SimpleNamespace(vocab_size=40)
        self.num_plays = 0

    async def play_teacher(self, task: tuple[int, int], *, rollout_id: str) -> Rollout:
        assert rollout_id == f"teacher-{task[0]}-{task[1]}"
        self.num_plays += 1
        return Rollout(
            task_id="t", group_id="g", rollout_id=rollout_id, tokens=[1, *task],
            loss_mask=[0, 1, 1], logps=[0.0] * 3, versions=[0] * 3,
        )  # fmt: skip


def source(**warm: Any) -> tuple[WarmStart, Teacher]:
    teacher = Teacher()
    config = RunConfig(warm_start=WarmStartConfig(traces_per_step=2, **warm))
    warm_start = WarmStart(config, teacher)  # type: ignore[arg-type]
    tasks = SimpleNamespace(batch=lambda number, n: [(number, i) for i in range(n)])
    warm_start.tasks = tasks  # type: ignore[assignment]
    warm_start.play_teacher = teacher.play_teacher  # type: ignore[method-assign, assignment]
    return warm_start, teacher


def batch_of(warm_start: WarmStart, step: int) -> int:
    samples = asyncio.run(warm_start.samples(step))
    assert [sample.tokens[2] for sample in samples] == [0, 1]
    (number,) = {sample.tokens[1] for sample in samples}
    return number


def test_every_step_has_traces_of_its_own_in_one_epoch() -> None:
    warm_start, teacher = source(steps=4)
    assert [batch_of(warm_start, step) for step in range(4)] == [0, 1, 2, 3]
    assert teacher.num_plays == 8


def test_a_second_epoch_trains_on_the_same_traces_without_playing_them_again() -> None:
    warm_start, teacher = source(steps=5, epochs=2)
    assert [batch_of(warm_start, step) for step in range(5)] == [0, 1, 2, 0, 1]
    assert teacher.num_plays == 6
    resumed, teacher = source(steps=5, epochs=2)
    assert [batch_of(resumed, step) for step in (3, 4)] == [0, 1]


def test_drills_come_first_and_traces_start_after_them() -> None:
    warm_start, teacher = source(steps=6, epochs=2, drill_fraction=0.3)
    drills = [asyncio.run(warm_start.samples(step)) for step in (0, 1)]
    assert teacher.num_plays == 0 and drills[0][0].tokens != drills[1][0].tokens
    assert [batch_of(warm_start, step) for step in range(2, 6)] == [2, 3, 2, 3]
