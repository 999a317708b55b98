"""How many rollouts play at a time: the limit, and what it saves where the cache is small."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_async_training import make_model
from waiting import turns

from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.concurrency import ConcurrencyLimit


def test_rollouts_beyond_the_limit_wait_in_their_order() -> None:
    async def scenario() -> tuple[list[int], dict[str, float]]:
        limit, order = ConcurrencyLimit(2), []

        async def play(name: int) -> None:
            async with limit.place():
                order.append(name)
                await turns(3)

        await asyncio.gather(*(play(name) for name in range(6)))
        return order, limit.take_counts()

    order, counts = asyncio.run(scenario())
    assert order == list(range(6)) and counts == {"playing_max": 2.0, "cache_lost": 0.0}


def test_a_rollout_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    async def scenario() -> None:
        limit = ConcurrencyLimit(1)

        async def play() -> None:
            async with limit.place():
                await turns(5)

        first, second, third = [asyncio.create_task(play()) for _ in range(3)]
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        async with asyncio.timeout(5), limit.place():
            assert limit.take_counts()["playing_max"] == 1

    asyncio.run(scenario())


def test_the_limit_falls_by_a_quarter_on_loss_and_rises_by_one_while_somebody_waits() -> None:
    async def scenario() -> list[Any]:
        limit = ConcurrencyLimit()
        gate = asyncio.Event()

        async def play() -> None:
            async with limit.place():
                await gate.wait()

        players = [asyncio.create_task(play()) for _ in range(12)]
        await asyncio.sleep(0)

        def window(found: int) -> int | None:
            for _ in range(limit.window):
                limit.note_turn(100, found)
            return limit.most

        steps: list[Any] = [window(100), window(95), window(80)]  # a tenth may be lost
        late = asyncio.create_task(play())
        await asyncio.sleep(0)
        steps += [window(100), window(100), window(0)]
        gate.set()
        await asyncio.gather(*players, late)
        return steps

    # 12 play: unbounded, unbounded, 3/4 of 12; one waits: 10; nobody waited since: 10; 3/4 of 12
    assert asyncio.run(scenario()) == [None, None, 9, 10, 10, 9]


def test_new_weights_and_new_contexts_are_not_taken_for_loss() -> None:
    """They find nothing in the cache, which no limit would change."""
    answers = iter(
        [
            Output(ids=[7], versions=[0], num_cached_tokens=0),
            Output(ids=[8], versions=[1], num_cached_tokens=0),  # the weights were replaced
            Output(ids=[9], versions=[1], num_cached_tokens=0),  # another conversation
            Output(ids=[9], versions=[1], num_cached_tokens=1),  # here something was lost
        ]
    )

    class Scripted:
        async def generate(self, ids: list[int], params: SamplingParams) -> Output:
            return next(answers)

    async def scenario() -> float:
        limit = ConcurrencyLimit()
        async with limit.place() as place:
            generator = place.watch(Scripted())
            for ids in ([1, 2], [1, 2, 7, 3], [5, 6], [5, 6, 9, 4]):
                await generator.generate(ids, SamplingParams())
        return limit.take_counts()["cache_lost"]

    assert asyncio.run(scenario()) == 0.5  # had 5, 6; found one of them


def work(most: int) -> tuple[float, float]:
    """24 rollouts of 6 turns whose tools answer a little later, over a cache for about six of them:
    tokens that the engine computed, and the share that the cache had forgotten."""

    async def scenario() -> tuple[float, float]:
        limits = InferConfig(num_blocks=48, block_size=4, max_num_seqs=8, max_batch_tokens=64)
        limit = ConcurrencyLimit(most)
        async with AsyncEngine(LLMEngine(make_model(), limits)) as engine:

            async def play(name: int) -> None:
                async with limit.place() as place:
                    generator = place.watch(engine)
                    ids = [name % 20 + 1, 2, 3]
                    for turn in range(6):
                        params = SamplingParams(max_tokens=3, seed=name, ignore_eos=True)
                        output = await generator.generate(ids, params)
                        ids = [*ids, *output.ids, turn + 1, 5]
                        await asyncio.sleep(0.004)

            await asyncio.gather(*(play(name) for name in range(24)))
            return engine.metrics()["computed_tokens"], limit.take_counts()["cache_lost"]

    return asyncio.run(scenario())


def test_a_small_cache_is_not_made_to_forget() -> None:
    unbounded, forgotten = work(24)
    adaptive, lost = work(0)
    few, kept = work(4)
    assert forgotten == kept == 0.0  # nobody looks where the number is given
    assert lost > 0.1  # it had to find out
    assert few < adaptive < 0.9 * unbounded


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency=-1"):
        ConcurrencyLimit(-1)


def test_a_rollout_that_ends_while_it_waits_between_turns_gives_its_place_back_once() -> None:
    async def scenario() -> None:
        limit, begun = ConcurrencyLimit(), []
        turn, end = asyncio.Event(), asyncio.Event()

        async def play(name: int) -> None:
            async with limit.place() as place:
                begun.append(name)
                if name == 0:
                    await turn.wait()
                    await place.make_room()
                await end.wait()

        players = [asyncio.create_task(play(name)) for name in range(3)]
        await asyncio.sleep(0)
        limit.most = 2  # three play: the first to end a turn has to wait
        turn.set()
        await asyncio.sleep(0)
        players[0].cancel()
        await asyncio.wait({players[0]})
        assert players[0].cancelled() and not limit.has_place()
        late = asyncio.create_task(play(3))
        await asyncio.sleep(0)
        assert begun == [0, 1, 2]  # the two that were left fill it
        end.set()
        await asyncio.gather(*players[1:], late)
        assert begun == [0, 1, 2, 3] and limit.take_counts()["playing_max"] == 3
        assert limit.take_counts()["playing_max"] == 0  # nobody plays, and nobody is counted twice

    asyncio.run(scenario())
