"""Code in workers that hangs, dies, floods or talks nonsense: the results are those it would have
given, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hosted_faults
import pytest
from waiting import eventually

from nanorl.envs.hosting.environment import EpisodeHost, HostedEnvironment
from nanorl.envs.hosting.host_pool import (
    MAX_STARTS,
    BystanderError,
    HostingLimits,
    WorkerPool,
    _Life,
)
from nanorl.envs.hosting.host_worker import WorkerReply
from nanorl.envs.hosting.reward import HostedReward
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout
from nanosched import WorkerDied

pytestmark = [
    pytest.mark.xdist_group("hosting"),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the local back end needs Linux"),
]
FAULTS = hosted_faults.FAULTS
NUM_ROLLOUTS = 200
LIMITS = HostingLimits(deadline_s=1.0, max_result_bytes=1 << 20)
REWARD = f"{Path(hosted_faults.__file__)}:score"
TASK = Task("Count.", answer="7")
ROLLOUT = Rollout(
    task_id="t", group_id="g", rollout_id="r", tokens=[1, 2], loss_mask=[0, 1],
    logps=[0.0, -1.0], versions=[-1, 0],
)  # fmt: skip


def transcript(text: str) -> Transcript:
    return Transcript(messages=[], text=text, answer=None)


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Finds the children that the faults left, by how long they want to sleep."""
    limit = f"{600 + os.getpid() / 1e7:.7f}"
    monkeypatch.setenv("HOSTED_FAULTS_SLEEP", limit)

    def found() -> list[int]:
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if limit.encode() in words:
                pids.append(int(folder.name))
        return pids

    yield found


def held() -> tuple[int, int, set[str]]:
    """What this process has: files, threads, children."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), set(children)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fault_of(number: int) -> str:
    """One in ten has one, each kind in turn."""
    return FAULTS[number // 10 % len(FAULTS)] if number % 10 == 3 else ""


async def played_again(play: Callable[[str], Coroutine[Any, Any, Any]], number: int) -> Any:
    """The first attempt has the fault, if any: what the collector does with a FAILED rollout."""
    fault = fault_of(number)
    for attempt in range(6):
        try:
            return await play(f"{number} {fault}" if fault and attempt == 0 else str(number))
        except InfrastructureError:
            continue
    raise AssertionError(f"rollout {number} failed six times")


def in_time(run: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(run, 200)

    return asyncio.run(limited())


def test_faults_in_a_reward_change_no_score_and_leave_nothing(
    sleeper: Callable[[], list[int]],
) -> None:
    async def run() -> tuple[list[Score], int, int]:
        reward = HostedReward(REWARD, limits=LIMITS)
        try:
            await reward.start()
            before = resident_bytes()

            async def play(text: str) -> Score:
                return await reward.score(ROLLOUT, TASK, transcript(text))

            gate = asyncio.Semaphore(16)

            async def one(number: int) -> Score:
                async with gate:
                    return await played_again(play, number)

            scores = await asyncio.gather(*map(one, range(NUM_ROLLOUTS)))
            return scores, resident_bytes() - before, len(held()[2])
        finally:
            reward.close()

    before = held()
    scores, growth, num_children = in_time(run())
    assert scores == [Score(hosted_faults.expected(number)) for number in range(NUM_ROLLOUTS)]
    assert growth < 64 << 20
    assert num_children == len(before[2]) + 1, "the fork server alone is a child"
    assert eventually(lambda: not sleeper()), "what the code started lives on"
    assert held() == before


def test_faults_in_an_environment_change_no_episode_and_leave_nothing(
    sleeper: Callable[[], list[int]],
) -> None:
    async def run() -> list[Any]:
        pool = WorkerPool(EpisodeHost, (hosted_faults.CountingKind,), limits=LIMITS)
        try:
            await pool.start()
            gate = asyncio.Semaphore(16)

            async def one(number: int) -> Any:
                async with gate:
                    return await played_again(lambda text: play_episode(pool, text), number)

            return await asyncio.gather(*map(one, range(NUM_ROLLOUTS)))
        finally:
            pool.close()

    before = held()
    played = in_time(run())
    assert played == [played_in_process(number) for number in range(NUM_ROLLOUTS)]
    assert eventually(lambda: not sleeper()), "what the code started lives on"
    assert held() == before


async def play_episode(pool: WorkerPool, text: str) -> Any:
    env = HostedEnvironment(pool)
    try:
        opening = await env.reset(TASK)
        first = await env.step(text.partition(" ")[0])
        assert first.observation is not None
        read = env.format_observation(first.observation)
        last = await env.step(text)
        score = await env.score(ROLLOUT, transcript(text))
        return opening.messages, first, read, last, score
    finally:
        with suppress(InfrastructureError):  # the episode may be lost already
            await env.close()


def played_in_process(number: int) -> Any:
    async def play() -> Any:
        env = hosted_faults.Counting()
        opening = await env.reset(TASK)
        first = await env.step(str(number))
        read = env.format_observation(first.observation)
        last = await env.step(str(number))
        return opening.messages, first, read, last, await env.score(ROLLOUT, transcript(""))

    return asyncio.run(play())


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_infrastructure_and_the_next_call_is_served(
    fault: str, sleeper: Callable[[], list[int]]
) -> None:
    async def run() -> Score:
        reward = HostedReward(REWARD, num_workers=1, limits=LIMITS)
        try:
            with pytest.raises(InfrastructureError) as caught:
                await reward.score(ROLLOUT, TASK, transcript(f"1 {fault}"))
            assert "score" in str(caught.value)
            return await reward.score(ROLLOUT, TASK, transcript("2"))
        finally:
            reward.close()

    assert in_time(run()) == Score(hosted_faults.expected(2))
    assert eventually(lambda: not sleeper())


def test_a_call_that_waits_its_turn_behind_one_that_hangs_is_served_by_the_next_worker() -> None:
    limits = HostingLimits(deadline_s=3.0)  # the next worker starts within it on a busy machine

    async def run() -> list[Any]:
        reward = HostedReward(REWARD, num_workers=1, limits=limits)
        try:
            texts = ("1", "2 hang in C", "3", "4")
            calls = [reward.score(ROLLOUT, TASK, transcript(text)) for text in texts]
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            reward.close()

    one, hung, three, four = in_time(run())
    assert isinstance(hung, InfrastructureError) and "took longer than 3 s" in str(hung)
    assert [one.total, three.total, four.total] == [0.001, 0.003, 0.004]


@pytest.mark.parametrize("delay_s", [0.0, 0.4], ids=["before its time", "at its time"])
def test_whoever_waits_behind_a_call_that_hangs_is_not_to_blame(delay_s: float) -> None:
    """When the clocks of both run out, whichever is looked at first."""

    async def run() -> list[Any]:
        killed = asyncio.Event()
        handle: Any = None  # nothing is sent
        life = _Life(handle, killed.set)

        async def worker_dies() -> WorkerReply:
            await killed.wait()
            raise WorkerDied("killed")

        futures = [asyncio.ensure_future(worker_dies()) for _ in range(2)]
        calls = [
            asyncio.ensure_future(life.ask(what, future, limit_s))
            for what, future, limit_s in zip(("hangs", "waits"), futures, (0.3, 0.2), strict=True)
        ]
        await asyncio.sleep(0.05)
        time.sleep(delay_s)  # the loop is late for both
        return await asyncio.gather(*calls, return_exceptions=True)

    hangs, waits = in_time(run())
    assert type(hangs) is InfrastructureError and "hangs took longer than 0.3 s" in str(hangs)
    assert type(waits) is BystanderError and "hangs took longer than 0.3 s" in str(waits)


def test_calls_in_turn_each_have_their_own_deadline(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n\ndef score(text):\n    time.sleep(0.4)\n    return 1.0\n")

    async def run() -> list[Score]:
        reward = HostedReward(str(slow), num_workers=1, limits=HostingLimits(deadline_s=1.5))
        try:
            await reward.start()
            calls = [reward.score(ROLLOUT, TASK, transcript("")) for _ in range(6)]
            return await asyncio.gather(*calls)
        finally:
            reward.close()

    assert in_time(run()) == [Score(1.0)] * 6, "2.4 s in all, and none took 1.5"


def test_somebody_who_stops_waiting_leaves_the_deadline_in_force() -> None:
    async def run() -> Score:
        reward = HostedReward(REWARD, num_workers=1, limits=LIMITS)
        try:
            await reward.start()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reward.score(ROLLOUT, TASK, transcript("1 hang in C"))
            return await reward.score(ROLLOUT, TASK, transcript("2"))
        finally:
            reward.close()

    assert in_time(run()) == Score(hosted_faults.expected(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_at_all\n", "line 1: import nowhere_at_all"),
        ("x = 1\n\ndef f(:\n", "SyntaxError"),
        ("def score(txt):\n    return 1.0\n", "'txt'"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
    ],
    ids=["import", "syntax", "a parameter", "exit"],
)
def test_code_that_cannot_be_loaded_is_refused_up_front(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)

    async def run() -> None:
        reward = HostedReward(str(file))
        try:
            await reward.start()
        finally:
            reward.close()

    before = held()
    with pytest.raises(ValueError, match=message) as caught:
        in_time(run())
    assert "mine.py" in str(caught.value) or "score" in str(caught.value)
    assert held() == before


def test_limits_and_numbers_of_workers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="deadline_s=0"):
        HostingLimits(deadline_s=0)
    with pytest.raises(ValueError, match="num_workers=0"):
        WorkerPool(EpisodeHost, num_workers=0)


def test_a_worker_that_is_killed_while_it_loads_the_code_is_started_again(tmp_path: Path) -> None:
    async def play(num_deaths: int) -> tuple[int, int]:
        folder = tmp_path / str(num_deaths)
        folder.mkdir()
        arguments = (str(folder), num_deaths)
        with WorkerPool(hosted_faults.DiesAtFirst, arguments, num_workers=1) as pool:
            await pool.start()
            return await pool.call("answer"), len(list(folder.iterdir()))

    assert asyncio.run(play(MAX_STARTS - 1)) == (7, MAX_STARTS - 1)
    with pytest.raises(ValueError, match=r"no worker could be started: .* killed by signal 9"):
        asyncio.run(play(MAX_STARTS + 1))
    assert len(list((tmp_path / str(MAX_STARTS + 1)).iterdir())) == MAX_STARTS
