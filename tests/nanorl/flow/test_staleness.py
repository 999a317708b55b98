"""Admission of rollouts and the queue to the trainer."""

from __future__ import annotations

import asyncio

import pytest
from waiting import turns

from nanorl.flow.staleness import StalenessController


def test_without_staleness_no_rollout_of_the_next_batch_starts_before_the_update() -> None:
    control = StalenessController(max_staleness=0, batch=8)
    assert control.can_admit(8)
    assert not control.can_admit(9)
    control.running += 8
    assert not control.can_admit(1)
    control.finish(8)
    assert not control.can_admit(1)  # trained on, but the new weights are not there yet
    control.advance(1)
    assert control.can_admit(8)


def test_admission_is_the_published_inequality() -> None:
    control = StalenessController(max_staleness=2, batch=4, version=3)
    assert control.accepted == 12
    control.running = 5
    # accepted + running + n <= (2 + 3 + 1) * 4 = 24
    assert control.can_admit(7)
    assert not control.can_admit(8)


def test_a_waiting_group_is_admitted_when_the_version_advances() -> None:
    async def scenario() -> list[str]:
        control = StalenessController(max_staleness=0, batch=2)
        events = []

        async def produce() -> None:
            await control.admit(2)
            control.finish(2)
            events.append("first")
            await control.admit(2)
            events.append("second")

        task = asyncio.create_task(produce())
        await turns(100)
        events.append("update")
        control.advance(1)
        await task
        return events

    assert asyncio.run(scenario()) == ["first", "update", "second"]


def test_staleness_refuses_impossible_values() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1"):
        StalenessController(max_staleness=-1, batch=1)
