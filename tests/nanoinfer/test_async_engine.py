"""Coroutines share one engine; tools, cancellation, pauses and new weights fall between steps."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from cache_oracle import CacheRunner, make_engine, replay

from nanoengine.formats.hf import export_state
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.params import SamplingParams

Scenario = Callable[[AsyncEngine, CacheRunner], Awaitable[None]]


def run(scenario: Scenario, use_thread: bool) -> None:
    async def main() -> None:
        engine, runner = make_engine(num_blocks=64, block_size=4, max_num_seqs=8)
        async with AsyncEngine(engine, use_thread=use_thread) as client:
            await asyncio.wait_for(scenario(client, runner), 60)
        engine.check()

    asyncio.run(main())


both = pytest.mark.parametrize("use_thread", [False, True])


@both
def test_rollouts_with_tools_get_the_tokens_they_would_get_alone(use_thread: bool) -> None:
    async def rollout(client: AsyncEngine, i: int) -> None:
        ids = [i % 7, 1, 2]
        for turn in range(3):
            output = await client.generate(ids, SamplingParams(max_tokens=4 + i % 3))
            assert output.ids == replay(ids, output.versions)
            await asyncio.sleep(0.001 * (i % 4))
            ids = ids + output.ids + [turn, i % 7]

    async def scenario(client: AsyncEngine, _: CacheRunner) -> None:
        await asyncio.gather(*(rollout(client, i) for i in range(12)))

    run(scenario, use_thread)


@both
def test_a_cancelled_caller_frees_its_blocks(use_thread: bool) -> None:
    async def scenario(client: AsyncEngine, _: CacheRunner) -> None:
        long = asyncio.create_task(client.generate([1, 2], SamplingParams(max_tokens=200)))
        short = await client.generate([1, 2], SamplingParams(max_tokens=3))
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert short.ids == replay([1, 2], [0] * 3)
        assert client.engine.num_unfinished == 0
        assert client.engine._blocks.num_free == 64

    run(scenario, use_thread)


@both
def test_pause_holds_requests_and_new_weights_reach_them(use_thread: bool) -> None:
    async def scenario(client: AsyncEngine, runner: CacheRunner) -> None:
        task = asyncio.create_task(client.generate([3, 4, 5], SamplingParams(max_tokens=60)))
        while client.metrics()["num_steps"] < 5:
            await asyncio.sleep(0)
        await client.pause()
        steps = client.metrics()["num_steps"]
        await asyncio.sleep(0.01)
        assert client.metrics()["num_steps"] == steps and not task.done()
        runner.version = 1
        await client.update_weights(export_state(client.engine.model), 1)
        await client.resume()
        output = await task
        assert set(output.versions) == {0, 1}
        assert output.ids == replay([3, 4, 5], output.versions)

    run(scenario, use_thread)


@both
def test_a_failing_step_reaches_every_caller(use_thread: bool) -> None:
    class BrokenRunner(CacheRunner):
        def run(self, step: StepInput) -> RunnerOutput:
            raise MemoryError("no memory for the step")

    async def scenario(client: AsyncEngine, _: CacheRunner) -> None:
        client.engine._runner = BrokenRunner(64, 4)  # type: ignore[assignment]
        calls = [client.generate([i], SamplingParams(max_tokens=2)) for i in range(3)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(e) for e in errors] == [MemoryError] * 3
        assert client.engine.num_unfinished == 0

    run(scenario, use_thread)


def test_a_request_that_cannot_fit_raises_in_its_caller_only() -> None:
    async def scenario(client: AsyncEngine, _: CacheRunner) -> None:
        good = asyncio.create_task(client.generate([1], SamplingParams(max_tokens=5)))
        with pytest.raises(ValueError, match="positions"):
            await client.generate([1], SamplingParams(max_tokens=5000))
        assert (await good).ids == replay([1], [0] * 5)

    run(scenario, True)
