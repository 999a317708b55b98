"""Failed attempts are played again with the same seed, kept for the record, and never trained on;
groups that are stopped let go of everything first."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from test_batching import rollout
from waiting import turns

from nanoinfer.params import SamplingParams
from nanorl.agents.collector import RolloutCollector
from nanorl.task import Task
from nanorl.types import Rollout, Status

TASK = Task(task_id="t", kind="sum", prompt="1 + 1?", answer="2")


def test_failed_attempts_keep_their_seed_and_are_recorded_under_ids_of_their_own() -> None:
    """Member 0 fails once, member 1 always."""
    seeds: dict[str, list[int]] = {}

    async def play(task: Task, *, group_id: str, rollout_id: str, sampling: Any) -> Rollout:
        tries = seeds.setdefault(rollout_id, [])
        tries.append(sampling.seed)
        fails = rollout_id == "g-m1" or (rollout_id == "g-m0" and len(tries) == 1)
        status = Status.FAILED if fails else Status.FINISHED
        return replace(rollout(group_id, 0, 0.0), rollout_id=rollout_id, status=status)

    collector = RolloutCollector(play, run_seed=7, max_retries=2)
    group = asyncio.run(collector.run_group(TASK, group_id="g", size=3, sampling=SamplingParams()))
    assert [one.rollout_id for one in group] == ["g-m0", "g-m2"]
    assert {name: len(tries) for name, tries in seeds.items()} == {"g-m0": 2, "g-m1": 3, "g-m2": 1}
    assert all(len(set(tries)) == 1 for tries in seeds.values())
    assert len({tries[0] for tries in seeds.values()}) == 3
    failed = [one.rollout_id for one in collector.take_failed()]
    assert sorted(failed) == ["g-m0-failed0", "g-m1-failed0", "g-m1-failed1", "g-m1-failed2"]
    assert collector.take_failed() == []


def test_stop_waits_until_rollouts_have_cleaned_up() -> None:
    events = []

    async def play(*_: Any, **__: Any) -> Rollout:
        try:
            await asyncio.sleep(3600)
        finally:
            await turns(10)  # a sandbox that is given back
            events.append("cleaned up")
        raise AssertionError("nobody waits so long")

    async def run() -> None:
        collector = RolloutCollector(play, run_seed=0)
        group = asyncio.create_task(
            collector.run_group(TASK, group_id="g", size=2, sampling=SamplingParams())
        )
        await turns(10)
        await collector.stop()
        events.append("stopped")
        await asyncio.gather(group, return_exceptions=True)

    asyncio.run(run())
    assert events == ["cleaned up", "cleaned up", "stopped"]
