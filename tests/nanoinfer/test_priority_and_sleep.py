"""Priorities, and the cache's memory given away and taken back."""

import asyncio
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from cache_oracle import make_engine, replay, run_all
from tiny_text import make_text_engine
from waiting import until

from nanoinfer.async_engine import AsyncEngine
from nanoinfer.params import SamplingParams

PROMPT = [(5 * i) % 250 for i in range(40)]


def test_lower_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    engine, _ = make_engine(num_blocks=64, block_size=4, max_num_seqs=1, max_batch_tokens=8)
    one = SamplingParams(max_tokens=1)
    names = {engine.add([i], one, p): f"{p}{i}" for i, p in enumerate([0, 2, -1, 2, 0, -1])}
    order = []
    while engine.num_unfinished:
        order += [names[handle] for handle, _ in engine.step()]
        engine.check()
    assert order == ["-12", "-15", "00", "04", "21", "23"]


def test_an_urgent_request_takes_the_place_of_a_running_one() -> None:
    for num_blocks in (64, 8):  # short of rows; short of blocks
        engine, _ = make_engine(
            num_blocks=num_blocks, block_size=2, max_num_seqs=2, max_batch_tokens=32
        )
        slow = SamplingParams(max_tokens=10)
        patient = [engine.add([i, i, 1], slow, 1) for i in range(2)]
        engine.step()
        urgent = engine.add([4, 5, 6, 1], SamplingParams(max_tokens=2), 0)
        done = [handle for _ in range(3) for handle, _ in engine.step()]
        assert done[0] == urgent
        assert engine.metrics()["num_preemptions"] >= 1
        outputs = run_all(engine)
        for i, handle in enumerate(patient):
            assert outputs[handle].ids == replay([i, i, 1], [0] * 10)


def test_equal_priority_never_preempts_for_a_row() -> None:
    engine, _ = make_engine(num_blocks=64, block_size=2, max_num_seqs=1, max_batch_tokens=32)
    engine.add([1], SamplingParams(max_tokens=5), 3)
    engine.step()
    engine.add([2], SamplingParams(max_tokens=5), 3)
    run_all(engine)
    assert engine.metrics()["num_preemptions"] == 0


def test_requests_sleep_through_and_wake_to_the_same_tokens() -> None:
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    alone = make_text_engine().generate([PROMPT], params)[0]
    engine = make_text_engine()
    handle = engine.add(PROMPT, params)
    for _ in range(10):
        engine.step()
    engine.sleep()
    assert engine._runner.cache.data.numel() == 0
    assert engine.step() == [] and engine.num_unfinished == 1
    engine.check()
    engine.wake()
    finished = run_all(engine)
    assert (finished[handle].ids, finished[handle].logps) == (alone.ids, alone.logps)


MEMORY_OF_A_SLEEPER = """
import sys
from pathlib import Path
from kernels.torch.allocator import reuse_large_buffers
from nanoinfer.params import SamplingParams
from tiny_text import make_text_engine

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "keep":
    assert reuse_large_buffers()
engine = make_text_engine(num_blocks=40_000)
engine._runner.cache.data.fill_(1.0)  # as if every block had been used
size, before = engine._runner.cache.data.nbytes, resident()
engine.sleep()
asleep = resident()
engine.wake()
assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].ids
print(size, before - asleep, before - resident())
"""


@pytest.mark.sweep
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
@pytest.mark.parametrize("mode", ["keep", "return"])
def test_sleep_gives_the_memory_back(mode: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_OF_A_SLEEPER, mode],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    size, given_back, still_away = map(int, done.stdout.split())
    assert size > 150_000_000
    assert given_back > 0.9 * size
    assert still_away > 0.8 * size  # pages come back only as they are used


def test_the_async_engine_sleeps_between_steps_and_streams_on_after() -> None:
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True)
    alone = make_text_engine().generate([PROMPT], params)[0]

    async def scenario() -> None:
        async with AsyncEngine(make_text_engine()) as client:
            ids: list[int] = []
            logps: list[float] = []
            async for chunk in client.stream(PROMPT, params):
                ids += chunk.ids
                logps += chunk.logps
                if len(ids) == 5:
                    await client.sleep()
                    await client.pause()
                    await client.wake()  # still paused
                    await asyncio.sleep(0.01)
                    assert client.engine.peek(0) is not None
                    await client.resume()
            assert chunk.output is not None and chunk.output.ids == ids == alone.ids
            assert logps == alone.logps

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_nothing_turns_over_while_the_engine_sleeps_even_if_it_is_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        engine = make_text_engine()
        async with AsyncEngine(engine) as client:
            await client.sleep()
            request = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=2)))
            await client.pause()
            await client.resume()
            steps = []
            step = engine.step
            monkeypatch.setattr(engine, "step", lambda: steps.append(1) or step())
            await asyncio.sleep(0.05)
            assert not steps and not request.done()
            await client.wake()
            assert len((await request).ids) == 2 and steps

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_stream_that_is_closed_or_cancelled_aborts_its_request() -> None:
    async def scenario() -> None:
        async with AsyncEngine(make_text_engine()) as client:
            long = SamplingParams(max_tokens=400, ignore_eos=True)
            stream = client.stream(PROMPT, long)
            await anext(stream)
            await stream.aclose()
            assert client.engine.num_unfinished == 0

            async def read() -> None:
                async for _ in client.stream(PROMPT, long):
                    pass

            task = asyncio.create_task(read())
            await until(lambda: client.engine.num_unfinished)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not client.engine.num_unfinished)
            assert client.engine._blocks.num_free == client.engine._blocks.num_blocks

    asyncio.run(asyncio.wait_for(scenario(), 60))
