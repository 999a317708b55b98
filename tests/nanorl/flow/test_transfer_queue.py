"""The queue of finished groups: order, fields, cursors, back-pressure, and restarts of either side;
its journal; and the batches that are assembled from it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_batching import rollout
from waiting import turns

from nanorl.flow.assembly import BatchAssembler, GroupBatch
from nanorl.flow.batch_policy import BatchPolicy
from nanorl.flow.group import FinishedGroup
from nanorl.flow.journal import Journal
from nanorl.flow.staleness import StalenessController
from nanorl.flow.transfer_queue import GROUP, QueueCursor, Row, TransferQueue
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.trainer import played_before
from nanorl.task import Task
from nanorl.types import Branch

SIZE = 2


def group(
    index: int, *, rewards: Sequence[float] = (0.0, 1.0), version: int = 0, size: int = SIZE
) -> FinishedGroup:
    """Rollouts of two action tokens each, sampled by `version`."""
    name = f"s0-g{index}"
    members = [
        replace(rollout(name, member, reward), rollout_id=f"{name}-m{member}")
        for member, reward in enumerate(rewards)
    ]
    for one in members:
        one.versions = [version if m else -1 for m in one.loss_mask]
    task = Task(f"task {index}", answer=str(index))
    return FinishedGroup(index=index, task=task, rollouts=members, size=size)


def indices(rows: Sequence[Row]) -> list[int]:
    return [row.index for row in rows]


async def soon(call: Awaitable[Any]) -> asyncio.Future[Any]:
    """Start it, and let it get as far as it can."""
    task = asyncio.ensure_future(call)
    await turns(10)
    return task


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await scenario()

    return asyncio.run(limited())


# -- order and back-pressure -----------------------------------------------------------------------


def test_groups_are_taken_in_task_order_whatever_order_they_finish_in() -> None:
    async def scenario() -> list[list[int]]:
        queue = TransferQueue(capacity=4)
        trainer = queue.consumer(order="task")
        for index in (3, 1, 0, 2):
            await queue.put(index, GROUP, group(index))
        return [indices(await trainer.take(2)), indices(await trainer.take(2))]

    assert run(scenario) == [[0, 1], [2, 3]]


def test_in_order_of_finishing_nobody_waits_for_a_straggler_unless_it_is_overdue() -> None:
    async def scenario() -> list[Any]:
        queue = TransferQueue(capacity=4)
        trainer = queue.consumer(order="finish")
        for index in (3, 1, 2):
            await queue.put(index, GROUP, group(index))
        found: list[Any] = [indices(await trainer.take(2)), trainer.cursor]
        waiting = await soon(trainer.take(1, first=[0]))
        found.append(waiting.done())
        await queue.put(0, GROUP, group(0))
        return [*found, indices(await waiting), trainer.cursor]

    assert run(scenario) == [
        [1, 3],
        QueueCursor(next_index=0, beyond=(1, 3)),
        False,
        [0],
        QueueCursor(next_index=2, beyond=(3,)),
    ]


def test_a_full_queue_holds_the_producer_back_until_groups_are_taken() -> None:
    async def scenario() -> list[bool]:
        queue = TransferQueue(capacity=2)
        trainer = queue.consumer(order="task")
        for index in range(2):
            await queue.put(index, GROUP, group(index))
        third = await soon(queue.put(2, GROUP, group(2)))
        found = [third.done()]
        await trainer.take(1)
        await third
        return [*found, third.done()]

    assert run(scenario) == [False, True]


def test_the_group_that_is_waited_for_is_let_into_a_full_queue() -> None:
    async def scenario() -> list[int]:
        queue = TransferQueue(capacity=2)
        trainer = queue.consumer(order="task")
        for index in (1, 2):
            await queue.put(index, GROUP, group(index))
        await queue.put(0, GROUP, group(0))
        return indices(await trainer.take(3))

    assert run(scenario) == [0, 1, 2]


# -- fields and consumers --------------------------------------------------------------------------


def test_fields_are_taken_as_they_are_ready_by_each_consumer_at_its_own_pace() -> None:
    async def scenario() -> list[Any]:
        queue = TransferQueue(capacity=4)
        scorer = queue.consumer(order="finish")
        trainer = queue.consumer(needs=(GROUP, "scores"), order="task")
        await queue.put(1, GROUP, group(1))
        [early] = await scorer.take(1)  # while group 0 is still played
        await queue.put(early.index, "scores", "one")
        waiting = await soon(trainer.take(2))
        await queue.put(0, GROUP, group(0))
        [late] = await scorer.take(1)
        found: list[Any] = [early.index, late.index, waiting.done(), len(queue.rows)]
        await queue.put(0, "scores", "zero")
        rows = await waiting
        return [*found, [row.fields["scores"] for row in rows], len(queue.rows)]

    assert run(scenario) == [1, 0, False, 2, ["zero", "one"], 0]


def test_a_group_or_a_field_that_is_put_again_is_put_once() -> None:
    """A collector that died has a successor, which plays its groups again."""

    async def scenario() -> list[bool]:
        queue = TransferQueue(capacity=2)
        trainer = queue.consumer(order="task")
        answers = [await queue.put(0, GROUP, group(0)), await queue.put(0, GROUP, group(0))]
        answers += [await queue.put(0, "scores", 1), await queue.put(0, "scores", 2)]
        [row] = await trainer.take(1)
        assert row.fields["scores"] == 1
        answers += [await queue.put(0, GROUP, group(0)), await queue.put(0, "scores", 3)]
        assert queue.rows == []
        return answers

    assert run(scenario) == [True, False, True, False, False, False]


def test_a_cursor_survives_json_and_the_consumer_is_given_what_came_after_it(
    tmp_path: Path,
) -> None:
    async def first_process() -> str:
        queue = TransferQueue(capacity=8, journal=Journal(tmp_path / "journal.sqlite"))
        trainer = queue.consumer(order="finish")
        for index in (2, 0, 1, 4):
            await queue.put(index, GROUP, group(index))
        await queue.put(5, GROUP, group(5, rewards=(1.0,)))  # it lost a member, perhaps just now
        await trainer.take(2)
        saved = json.dumps(trainer.cursor.to_json())  # in a checkpoint
        await trainer.take(1)  # trained on, and lost with the process
        return saved

    saved = run(first_process)

    async def second_process() -> tuple[list[int], list[int]]:
        journal = Journal(tmp_path / "journal.sqlite")
        cursor = QueueCursor.from_json(json.loads(saved))
        queue = TransferQueue(capacity=8, journal=journal)
        trainer = queue.consumer(order="finish", cursor=cursor)
        staleness = StalenessController(max_staleness=2, batch=4)
        queue.restore(played_before(journal, cursor, staleness))
        rows = await trainer.take(2)
        assert rows[0].group == group(1) and staleness.accepted == 2 * SIZE
        return indices(rows), journal.indices()

    assert run(second_process) == ([1, 4], [1, 4])


def test_what_a_lost_policy_sampled_is_played_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for index, version in ((4, 2), (5, 3), (6, 1)):
        journal.put(group(index, version=version))
    staleness = StalenessController(max_staleness=1, batch=2 * SIZE, version=2)
    cursor = QueueCursor(next_index=4)
    kept = played_before(journal, cursor, staleness)
    assert [one.index for one in kept] == [4, 6] and journal.indices() == [4, 6]
    assert staleness.overdue(2) == {6}  # begun by version 1, it may not wait beyond step 2


@pytest.mark.parametrize("where", ["last token", "another member", "a branch"])
def test_a_group_that_a_lost_policy_only_ended_is_played_again_too(
    tmp_path: Path, where: str
) -> None:
    """Version 1 began it, so its age says nothing; one token of it is of version 3."""
    journal, mixed = Journal(tmp_path / "journal.sqlite"), group(4, version=1)
    first, second = mixed.rollouts
    last = max(place for place, is_action in enumerate(first.loss_mask) if is_action)
    if where == "last token":
        first.versions[last] = 3
    elif where == "another member":
        second.versions = [3 if m else -1 for m in second.loss_mask]
    else:
        versions = [3 if m else -1 for m in first.loss_mask]
        first.branches = [
            Branch(
                tokens=first.tokens, loss_mask=first.loss_mask, logps=first.logps, versions=versions
            )
        ]
    assert (mixed.oldest_version, mixed.newest_version) == (1, 3)
    journal.put(mixed)
    journal.put(group(5, version=1))
    staleness = StalenessController(max_staleness=1, batch=2 * SIZE, version=2)
    kept = played_before(journal, QueueCursor(next_index=4), staleness)
    assert [one.index for one in kept] == [5] and journal.indices() == [5]
    assert staleness.accepted == 2 * 2 * SIZE + SIZE  # only the other one takes a place


@pytest.mark.parametrize(
    ("is_resumed", "is_changed", "num_losses", "kept"),
    [(True, False, 0, [3]), (True, True, 0, []), (False, False, 0, []), (False, False, 1, [3])],
)
def test_a_run_goes_on_with_the_groups_of_its_own_options_alone(
    tmp_path: Path, is_resumed: bool, is_changed: bool, num_losses: int, kept: list[int]
) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.put(group(3))
    journal.close()
    stood = SimpleNamespace(
        dir=tmp_path,
        is_changed=is_changed,
        num_losses=num_losses,
        config=SimpleNamespace(resume=is_resumed),
        parts=SimpleNamespace(folder=tmp_path),
    )
    checkpoints = RunCheckpoints(stood)  # type: ignore[arg-type]
    assert checkpoints.open_journal().indices() == kept
    checkpoints.close_journal()


def test_a_damaged_journal_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.put(group(0))
    journal.close()
    content = bytearray(path.read_bytes())
    content[:100] = b"\0" * 100
    path.write_bytes(content)
    journal = Journal(path)
    assert journal.groups() == []
    journal.put(group(1))
    assert journal.groups() == [group(1)]


def test_every_group_is_taken_once_under_random_orders_and_restarts() -> None:
    """Producers finish in any order, the trainer dies now and then and goes back to its cursor."""

    async def scenario(seed: int) -> None:
        rng = random.Random(seed)
        order = rng.choice(["task", "finish"])
        num, capacity = 24, rng.randint(3, 8)
        queue = TransferQueue(capacity=capacity)
        trainer = queue.consumer(order=order)  # type: ignore[arg-type]
        pause = [rng.random() * 0.003 for _ in range(num)]

        async def play(index: int) -> None:
            await asyncio.sleep(pause[index])
            await queue.put(index, GROUP, group(index))
            if rng.random() < 0.3:
                await queue.put(index, GROUP, group(index))

        players = [asyncio.create_task(play(index)) for index in range(num)]
        taken: list[int] = []
        while len(taken) < num:
            taken += indices(await trainer.take(min(rng.randint(1, 3), num - len(taken))))
            assert len(queue.rows) <= 2 * capacity
        await asyncio.gather(*players)
        assert sorted(taken) == list(range(num)) and queue.rows == []
        assert order == "finish" or taken == sorted(taken)
        assert trainer.cursor == QueueCursor(next_index=num)

    for seed in range(20):
        run(lambda seed=seed: scenario(seed))


# -- batches ---------------------------------------------------------------------------------------


async def assemble(
    policy: BatchPolicy,
    groups: Sequence[FinishedGroup],
    *,
    version: int = 0,
    needs_signal: bool = False,
    num_groups: int = 2,
    max_staleness: int = 0,
) -> tuple[GroupBatch, StalenessController]:
    staleness = StalenessController(
        max_staleness=max_staleness, batch=num_groups * SIZE, version=version, spare=99
    )
    queue = TransferQueue(capacity=99)
    consumer = queue.consumer(order=policy.order)
    assembler = BatchAssembler(
        policy,
        consumer,
        staleness,
        num_groups=num_groups,
        group_size=SIZE,
        needs_signal=needs_signal,
    )
    for one in groups:
        await staleness.admit(SIZE)
        staleness.finish(SIZE)
        await queue.put(one.index, GROUP, one)
    return await assembler.next_batch(version), staleness


def found(batch: GroupBatch) -> tuple[list[int], list[int]]:
    return [one.index for one in batch.groups], [one.index for one in batch.left_out]


def test_a_spoilt_group_is_trained_on_dropped_or_replaced() -> None:
    groups = [group(0, rewards=(1.0,)), group(1), group(2)]

    def outcome(remedy: Any, **options: Any) -> tuple[Any, dict[str, float], int]:
        policy = BatchPolicy(spoilt=remedy, **options)
        batch, staleness = run(lambda: assemble(policy, groups))
        return found(batch), batch.metrics, staleness.accepted

    in_batch, metrics, accepted = outcome("train")
    assert in_batch == ([0, 1], []) and accepted == 3 * SIZE
    assert metrics["groups_spoilt"] == 1 and metrics["wasted_tokens"] == 0
    in_batch, metrics, accepted = outcome("drop")
    assert in_batch == ([1], [0]) and accepted == 3 * SIZE
    assert metrics["groups_dropped"] == 1 and metrics["wasted_tokens"] == 2
    in_batch, metrics, accepted = outcome("replace")
    assert in_batch == ([1, 2], [0]) and accepted == 2 * SIZE  # another one may start
    assert metrics["groups_replaced"] == 1
    in_batch, metrics, _ = outcome("replace", max_replacements=0)
    assert in_batch == ([1], [0]) and metrics["groups_dropped"] == 1


def test_dynamic_sampling_refills_the_batch_up_to_a_bound() -> None:
    mute = (0.0, 0.0)
    groups = [group(i, rewards=mute) for i in range(3)] + [group(3), group(4, rewards=mute)]
    policy = BatchPolicy()

    batch, _ = run(lambda: assemble(policy, groups, needs_signal=True))
    # 0 and 1 are replaced by 2 and 3; for 2 there is no replacement left: the learner leaves it out
    assert found(batch) == ([2, 3], [0, 1])
    assert batch.metrics["groups_filtered"] == 3 and batch.metrics["groups_replaced"] == 2
    assert batch.metrics["groups_dropped"] == 1
    policy = BatchPolicy(filtered="drop")
    batch, _ = run(lambda: assemble(policy, groups, needs_signal=True))
    assert found(batch) == ([0, 1], [])
    batch, _ = run(lambda: assemble(policy, groups, needs_signal=False))
    assert found(batch) == ([0, 1], []) and batch.metrics["groups_filtered"] == 0


def test_a_stale_group_is_trained_on_dropped_or_replaced() -> None:
    groups = [group(0, version=1), group(1, version=3), group(2, version=3)]

    def outcome(remedy: Any) -> Any:
        policy = BatchPolicy(order="finish", stale=remedy)
        batch, _ = run(lambda: assemble(policy, groups, version=3, max_staleness=1))
        assert batch.faults["stale"] == 1
        return found(batch)

    assert outcome("train") == outcome("wait") == ([0, 1], [])
    assert outcome("drop") == ([1], [0])
    assert outcome("replace") == ([1, 2], [0])


def test_waiting_for_stragglers_keeps_the_bound_that_order_finish_breaks() -> None:
    """Group 0 takes three steps of one group each; at most one version may pass."""

    def ages(stale: Any) -> list[int]:
        async def scenario() -> list[int]:
            policy = BatchPolicy(order="finish", stale=stale)
            staleness = StalenessController(max_staleness=1, batch=SIZE, total=5 * SIZE)
            queue = TransferQueue(capacity=9)
            consumer = queue.consumer(order="finish")
            assembler = BatchAssembler(
                policy, consumer, staleness, num_groups=1, group_size=SIZE, needs_signal=False
            )
            found: list[int] = []
            started = asyncio.Event()
            players = []

            async def play(index: int) -> None:
                version = staleness.version
                patience = 60 if index == 0 else 5
                for _ in range(patience):
                    await asyncio.sleep(0.001)
                staleness.finish(SIZE)
                await queue.put(index, GROUP, group(index, version=version))

            async def produce() -> None:
                for index in range(5):
                    await staleness.admit(SIZE)
                    staleness.start(index)
                    players.append(asyncio.create_task(play(index)))
                    started.set()

            producer = asyncio.create_task(produce())
            for version in range(5):
                batch = await assembler.next_batch(version)
                found += [version - one.oldest_version for one in batch.groups]
                staleness.advance(version + 1)
            await asyncio.gather(producer, *players)
            return found

        return run(scenario)

    assert max(ages("wait")) == 1
    assert max(ages("train")) > 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"order": "random"}, "--rl.batch.order 'random'"),
        ({"oversample": 2}, "--rl.batch.oversample 2 with order task"),
        ({"oversample": -1, "order": "finish"}, "rl.batch.oversample -1"),
        ({"leftover": "cut", "order": "finish"}, "--rl.batch.leftover cut"),
        ({"spoilt": "wait"}, "--rl.batch.spoilt 'wait'"),
        ({"max_replacements": -1}, "rl.batch.max-replacements -1"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        BatchPolicy(**options)
