"""Code in workers that hangs, dies, floods or talks nonsense: the results are those it would have
given, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hosted_faults
import pytest
from waiting import eventually, turns, until

from nanorl.envs.hosting import host_pool
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


def holds_no_more_than(before: tuple[int, int, set[str]]) -> bool:
    """Soon. What a test before it left may have gone meanwhile, too."""

    def is_so() -> bool:
        files, threads, children = held()
        return files <= before[0] and threads <= before[1] and children <= before[2]

    return eventually(is_so)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fault_of(number: int) -> str:
    """One in ten has one, each kind in turn."""
    return FAULTS[number // 10 % len(FAULTS)] if number % 10 == 3 else ""


async def played_again(play: Callable[[str], Coroutine[Any, Any, Any]], number: int) -> Any:
    """The first attempt has the fault, if any: what the collector does with a FAILED rollout. On a
    busy machine the deadline of those that hang meets others, too."""
    fault = fault_of(number)
    for attempt in range(20):
        try:
            return await play(f"{number} {fault}" if fault and attempt == 0 else str(number))
        except InfrastructureError:
            continue
    raise AssertionError(f"rollout {number} failed again and again")


def in_time(run: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(run, 200)

    return asyncio.run(limited())


def test_faults_in_a_reward_change_no_score_and_leave_nothing(
    sleeper: Callable[[], list[int]],
) -> None:
    async def run() -> tuple[list[Score], int, set[str]]:
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
            return scores, resident_bytes() - before, held()[2]
        finally:
            reward.close()

    before = held()
    scores, growth, children = in_time(run())
    assert scores == [Score(hosted_faults.expected(number)) for number in range(NUM_ROLLOUTS)]
    assert growth < 64 << 20
    assert len(children - before[2]) == 1, "the fork server alone is a child"
    assert eventually(lambda: not sleeper()), "what the code started lives on"
    assert holds_no_more_than(before), held()


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
    assert holds_no_more_than(before), held()


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
            patient(reward)
            return await reward.score(ROLLOUT, TASK, transcript("2"))
        finally:
            reward.close()

    assert in_time(run()) == Score(hosted_faults.expected(2))
    assert eventually(lambda: not sleeper())


def patient(reward: HostedReward) -> None:
    """The calls from now on: the time of one that hangs is too short for a busy machine."""
    reward._pool.limits = HostingLimits()


def test_a_call_that_waits_its_turn_behind_one_that_hangs_is_served_by_the_next_worker() -> None:
    async def run() -> list[Any]:
        reward = HostedReward(REWARD, num_workers=1)
        try:
            await reward.start()
            calls = []
            for text in ("1", "2 hang in C", "3", "4"):
                patient(reward)
                if "hang" in text:
                    reward._pool.limits = LIMITS
                call = reward.score(ROLLOUT, TASK, transcript(text))
                calls.append(asyncio.ensure_future(call))
                await turns(5)
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            reward.close()

    one, hung, three, four = in_time(run())
    assert isinstance(hung, InfrastructureError) and "took longer than 1 s" in str(hung)
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


def test_a_call_that_was_answered_is_not_to_blame_for_the_next_ones_end() -> None:
    """Both are heard of in one turn of the loop: an answer, and then that the worker has died."""

    async def run() -> list[Any]:
        handle: Any = None  # nothing is sent
        life, arrived = _Life(handle, lambda: None), asyncio.Event()

        async def says(reply: WorkerReply | WorkerDied) -> WorkerReply:
            await arrived.wait()
            if isinstance(reply, WorkerDied):
                raise reply
            return reply

        answered, died = WorkerReply(data=pickle.dumps(7)), WorkerDied("killed by signal 9")
        said = (("is right", answered), ("kills", died), ("waits", died))
        futures: list[Any] = [asyncio.ensure_future(says(reply)) for _, reply in said]
        calls = [
            asyncio.ensure_future(life.ask(what, future, 60.0))
            for (what, _), future in zip(said, futures, strict=True)
        ]
        await turns(5)
        arrived.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    right, kills, waits = in_time(run())
    assert right == 7
    assert (type(kills), type(waits)) == (InfrastructureError, BystanderError)


def test_a_loop_that_stood_still_blames_no_call_whose_answer_is_there() -> None:
    """It is read after others."""

    async def run() -> Any:
        handle: Any = None  # nothing is sent
        life, arrived = _Life(handle, lambda: None), asyncio.Event()

        async def answers() -> WorkerReply:
            await arrived.wait()
            await turns(5)
            return WorkerReply(data=pickle.dumps(7))

        future: Any = asyncio.ensure_future(answers())
        call = asyncio.ensure_future(life.ask("is right", future, 0.2))
        await turns(5)
        time.sleep(0.3)
        arrived.set()
        assert await call == 7
        return life.reason

    assert in_time(run()) is None


def test_calls_in_turn_each_have_their_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on only when the test says so, and then everybody looks at it."""
    now_s, num_looks = 0.0, 0

    def clock() -> float:
        nonlocal num_looks
        num_looks += 1
        return now_s

    monkeypatch.setattr(host_pool, "time", SimpleNamespace(monotonic=clock))

    async def run() -> list[float]:
        nonlocal now_s
        handle: Any = None  # nothing is sent
        life = _Life(handle, lambda: None)
        futures: list[Any] = [asyncio.get_running_loop().create_future() for _ in range(6)]
        calls = [asyncio.ensure_future(life.ask("score", future, 0.1)) for future in futures]
        for number, future in enumerate(futures):
            await turns(5)
            now_s += 0.08
            before = num_looks
            await until(lambda before=before: num_looks > before + 30)  # type: ignore[misc]
            assert life.reason is None
            future.set_result(WorkerReply(data=pickle.dumps(number)))
        return await asyncio.gather(*calls)

    assert in_time(run()) == list(range(6)), "0.48 s in all, and none took 0.1"


def test_somebody_who_stops_waiting_leaves_the_deadline_in_force() -> None:
    async def run() -> Score:
        reward = HostedReward(REWARD, num_workers=1, limits=LIMITS)
        try:
            await reward.start()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reward.score(ROLLOUT, TASK, transcript("1 hang in C"))
            patient(reward)
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
    assert holds_no_more_than(before), held()


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
