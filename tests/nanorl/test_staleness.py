"""Admission of rollouts and the queue to the trainer."""

from __future__ import annotations

import asyncio

import pytest

from nanorl.trainer import StalenessController, TransferQueue


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
        await asyncio.sleep(0.01)
        events.append("update")
        control.advance(1)
        await task
        return events

    assert asyncio.run(scenario()) == ["first", "update", "second"]


def test_staleness_refuses_impossible_values() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1"):
        StalenessController(max_staleness=-1, batch=1)


def test_groups_are_taken_in_task_order_whatever_order_they_finish_in() -> None:
    async def scenario() -> list[list[str]]:
        queue = TransferQueue(capacity=4)
        for index in (3, 1, 0, 2):
            await queue.put(index, [f"group {index}"])  # type: ignore[list-item]
        return [*await queue.take(2), *await queue.take(2)]  # type: ignore[list-item]

    assert asyncio.run(scenario()) == [[f"group {i}"] for i in range(4)]


def test_a_full_queue_holds_the_producer_back_until_groups_are_taken() -> None:
    async def scenario() -> list[str]:
        queue = TransferQueue(capacity=2)
        events = []

        async def produce() -> None:
            for index in range(3):
                await queue.put(index, [])
                events.append(f"put {index}")

        task = asyncio.create_task(produce())
        await asyncio.sleep(0.01)
        events.append("take")
        await queue.take(1)
        await task
        return events

    assert asyncio.run(scenario()) == ["put 0", "put 1", "take", "put 2"]


def test_a_group_is_never_accepted_twice() -> None:
    async def scenario() -> None:
        queue = TransferQueue(capacity=2)
        await queue.put(0, [])
        await queue.put(0, [])

    with pytest.raises(ValueError, match="group 0 was put twice"):
        asyncio.run(scenario())
