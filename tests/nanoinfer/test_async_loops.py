"""One `AsyncEngine` over successive event loops, and callers that are cancelled more than once."""

import asyncio
import threading

import pytest
from cache_oracle import make_engine, replay
from waiting import turns, until

from nanoengine.formats.hf import export_state
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.cancellation import to_the_end
from nanoinfer.params import SamplingParams


def make_client(use_thread: bool = True) -> AsyncEngine:
    return AsyncEngine(make_engine(num_blocks=64, block_size=4, max_num_seqs=8)[0], use_thread)


async def many(client: AsyncEngine, count: int) -> None:
    prompts = [[i % 7, 3, 1] for i in range(count)]
    calls = (client.generate(ids, SamplingParams(max_tokens=5 + ids[0])) for ids in prompts)
    for ids, output in zip(prompts, await asyncio.gather(*calls), strict=True):
        assert output.ids == replay(ids, output.versions)


@pytest.mark.parametrize("use_thread", [False, True])
def test_the_engine_serves_one_asyncio_run_after_another(use_thread: bool) -> None:
    client = make_client(use_thread)
    for _ in range(3):
        asyncio.run(many(client, 12))
        assert client.engine.num_unfinished == 0

    async def pause_and_update() -> None:
        await client.pause()
        await client.update_weights(export_state(client.engine.model), 0)
        await client.resume()
        await many(client, 3)
        await client.close()

    asyncio.run(pause_and_update())


def test_what_a_loop_left_behind_is_aborted_by_the_next() -> None:
    client = make_client()

    async def leave() -> None:
        task = asyncio.create_task(client.generate([1, 2], SamplingParams(max_tokens=200)))
        while client.metrics()["num_steps"] < 2:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(leave())
    asyncio.run(many(client, 4))
    assert client.engine.num_unfinished == 0
    assert client.engine._blocks.num_free == 64


def test_a_second_loop_at_the_same_time_is_refused() -> None:
    client = make_client()
    errors: list[BaseException] = []

    def other_thread() -> None:
        try:
            asyncio.run(many(client, 1))
        except RuntimeError as error:
            errors.append(error)

    async def first() -> None:
        await many(client, 1)
        await asyncio.to_thread(
            lambda: (t := threading.Thread(target=other_thread)).start() or t.join()
        )
        await client.close()

    asyncio.run(first())
    assert len(errors) == 1 and "another event loop" in str(errors[0])


@pytest.mark.parametrize("use_thread", [False, True])
def test_cancellation_in_the_middle_of_many_frees_exactly_those(use_thread: bool) -> None:
    async def scenario() -> None:
        client = make_client(use_thread)
        long = SamplingParams(max_tokens=40)
        prompts = [[i % 7, i % 5, 2] for i in range(16)]
        tasks = [asyncio.create_task(client.generate(ids, long)) for ids in prompts]
        while client.metrics()["num_steps"] < 6:
            await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()  # again, while the first is being carried out
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        for i, (ids, output) in enumerate(zip(prompts, outputs, strict=True)):
            if i % 3 == 0:
                assert isinstance(output, asyncio.CancelledError)
            else:
                assert not isinstance(output, BaseException)
                assert output.ids == replay(ids, output.versions)
        await until(lambda: not client.engine.num_unfinished)
        assert client.engine._blocks.num_free == 64
        client.engine.check()
        await client.close()

    asyncio.run(scenario())


def test_a_step_is_over_before_a_call_that_is_cancelled_twice_returns() -> None:
    """Or the next step would run beside it."""
    is_running, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def slow_update(*_: object, **__: object) -> None:
        is_running.set()
        assert go_on.wait(10)
        seen.append("update complete")

    async def caller(client: AsyncEngine) -> None:
        try:
            await client.update_weights([], 1)
        finally:
            seen.append("call returned")

    async def main() -> None:
        client = make_client()
        client.engine.update_weights = slow_update  # type: ignore[method-assign]
        task = asyncio.create_task(caller(client))
        await asyncio.to_thread(is_running.wait, 10)
        for _ in range(2):
            task.cancel()
            await turns(10)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()

    asyncio.run(main())
    assert seen == ["update complete", "call returned"]


def test_a_request_whose_caller_is_cancelled_twice_is_aborted_when_the_caller_returns() -> None:
    async def main() -> None:
        client = make_client()
        task = asyncio.create_task(client.generate([1, 2], SamplingParams(max_tokens=200)))
        while client.metrics()["num_steps"] < 2:
            await asyncio.sleep(0)
        async with client._between_steps:  # as while a step runs
            for _ in range(2):
                task.cancel()
                await turns(10)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.engine.num_unfinished == 0
        await client.close()

    asyncio.run(main())


def test_work_is_complete_however_often_it_is_cancelled() -> None:
    seen: list[str] = []

    async def work() -> None:
        await turns(20)
        seen.append("complete")

    async def caller() -> None:
        try:
            await to_the_end(work())
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.create_task(caller())
        for _ in range(3):
            await turns(5)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["complete", "cancelled"]


def test_what_the_work_raises_comes_before_the_cancellation() -> None:
    async def work() -> None:
        await turns(20)
        raise OSError("the disk is full")

    async def main() -> None:
        task = asyncio.create_task(to_the_end(work()))
        await turns(5)
        task.cancel()
        with pytest.raises(OSError, match="the disk is full"):
            await task

    asyncio.run(main())
