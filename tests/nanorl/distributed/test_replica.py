"""A replica answers as its engine does; no drain, new weights or lost caller loses a request."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
import split_replica_cases as cases
import torch
from pool import WorkerPool
from split_replica_cases import SeedOffer, SeedReceiver
from tiny_text import make_text_engine, save_folder

from nanoengine.parallel.rendezvous import open_store
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe
from nanosched import Scheduler

PARAMS = SamplingParams(max_tokens=40, seed=7, ignore_eos=True)


def inline() -> Replica:
    return Replica(generator=AsyncEngine(make_text_engine(), use_thread=False))


def alone(ids: list[int], params: SamplingParams, seed: int = 0) -> Output:
    return make_text_engine(seed).generate([ids], params)[0]


def test_a_replica_made_of_a_recipe_says_what_its_engine_says(tmp_path: Path) -> None:
    save_folder(tmp_path)
    recipe = ReplicaRecipe(
        folder=tmp_path, infer=InferConfig(num_blocks=64, speculate=3), device="cpu", version=4
    )
    params = SamplingParams(max_tokens=30, seed=3, stop=("he",), ignore_eos=True)

    async def main() -> Output:
        with Scheduler() as sched:
            replica = sched.actor(Replica).remote(pickle.loads(pickle.dumps(recipe)))
            output = await replica.call(Replica.generate, [1, 2, 3], params)
            assert (await replica.call(Replica.heartbeat))["num_finished"] == 1
            await replica.call(Replica.close)
            return output

    output, expected = asyncio.run(main()), alone([1, 2, 3], params)
    assert (output.ids, output.logps, output.text) == (expected.ids, expected.logps, expected.text)
    assert set(output.versions) == {4}


def test_a_drained_replica_gives_back_what_it_has_and_another_goes_on() -> None:
    async def main() -> Output:
        first, second = inline(), inline()
        task = asyncio.create_task(first.generate([5, 6], PARAMS, "r"))
        while first.metrics()["sampled_tokens"] < 9:
            await asyncio.sleep(0)
        await first.drain()
        assert task.done(), "a drained replica has answered: it may be killed now"
        part = await task
        assert part.finish_reason == "abort" and len(part.ids) >= 9
        refused = await first.generate([5, 6], PARAMS, "late")
        assert (refused.finish_reason, refused.ids) == ("abort", [])
        assert await first.generate([5, 6], PARAMS, "moved", part) == part
        return await second.generate([5, 6], PARAMS, "r", part)

    whole, expected = asyncio.run(main()), alone([5, 6], PARAMS)
    assert (whole.ids, whole.logps) == (expected.ids, expected.logps)
    assert whole.finish_reason == expected.finish_reason


def test_new_weights_reach_requests_under_way_and_broken_ones_change_nothing() -> None:
    async def main() -> Output:
        replica = inline()
        task = asyncio.create_task(replica.generate([5, 6], PARAMS))
        while replica.metrics()["sampled_tokens"] < 5:
            await asyncio.sleep(0)
        receiver = SeedReceiver()
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            await replica.load_weights(receiver, SeedOffer(version=7, lacks="model.norm.weight"))
        assert (await replica.heartbeat())["version"] == 0
        assert await replica.load_weights(SeedReceiver(), SeedOffer(version=2)) > 0
        assert receiver.num_received == 2, "the first receiver of a key stays"
        return await task

    output = asyncio.run(main())
    assert set(output.versions) == {0, 2}
    num_old = output.versions.count(0)
    assert output.ids[:num_old] == alone([5, 6], PARAMS).ids[:num_old]
    rest = make_text_engine(seed=1)
    rest.add([5, 6], PARAMS, sampled=_cut(output, num_old))
    finished: list[tuple[int, Output]] = []
    while not finished:
        finished = rest.step()
    assert (finished[0][1].ids, finished[0][1].logps) == (output.ids, output.logps)


def _cut(output: Output, count: int) -> Output:
    return Output(
        ids=output.ids[:count],
        logps=output.logps[:count],
        versions=output.versions[:count],
        sampled_logps=output.sampled_logps[:count],
        finish_reason="abort",
    )


def test_a_caller_that_is_gone_takes_its_request_along() -> None:
    async def main() -> dict[str, float]:
        replica = inline()
        gone = asyncio.create_task(replica.generate([1, 2], PARAMS, "gone"))
        kept = asyncio.create_task(replica.generate([1, 3], PARAMS, "kept"))
        ended = asyncio.create_task(replica.generate([1, 4], PARAMS, "ended"))
        while replica.metrics()["num_requests"] < 3:
            await asyncio.sleep(0)
        gone.cancel()
        assert await replica.abort("ended") == 1
        assert (await ended).finish_reason == "abort"
        assert (await kept).ids == alone([1, 3], PARAMS).ids
        return replica.metrics()

    metrics = asyncio.run(main())
    assert (metrics["num_aborted"], metrics["num_finished"]) == (2, 1)


def test_a_heartbeat_waits_for_the_step_and_a_sleeping_replica_has_one() -> None:
    async def main() -> None:
        replica = inline()
        await replica.heartbeat()
        await replica._generator._between_steps.acquire()  # a step that does not end
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.heartbeat(), 0.05)
        replica._generator._between_steps.release()
        await replica.sleep()
        task = asyncio.create_task(replica.generate([1, 2], PARAMS))
        await replica.heartbeat()
        assert not task.done()
        await replica.wake()
        assert (await task).ids == alone([1, 2], PARAMS).ids

    asyncio.run(main())


def test_a_replica_is_made_of_one_thing() -> None:
    with pytest.raises(ValueError, match="recipe and generator"):
        Replica()
    assert torch.float32 == ReplicaRecipe(folder=Path("anywhere")).dtype


def test_a_replica_of_two_ranks_says_what_one_says(pool: WorkerPool, tmp_path: Path) -> None:
    save_folder(tmp_path)
    store, meeting = open_store()
    outputs, nothing = pool.run(2, cases.split, tmp_path, meeting)
    store.close()
    prompts = [*([5, i] for i in range(4)), [5, 0]]
    for ids, output, seed in zip(prompts, outputs, (0, 0, 0, 0, 1), strict=True):
        expected = alone(ids, cases.PARAMS, seed)
        assert output.ids == expected.ids
        assert output.logps == pytest.approx(expected.logps, abs=1e-4)
    assert [set(output.versions) for output in outputs] == [{0}] * 4 + [{3}]
    assert nothing == []


def test_a_replica_ends_the_engine_that_it_made_and_leaves_the_one_that_it_was_given(
    tmp_path: Path,
) -> None:
    save_folder(tmp_path)
    recipe = ReplicaRecipe(folder=tmp_path, infer=InferConfig(num_blocks=64), device="cpu")

    async def ends_a_call(replica: Replica) -> bool:
        """Whether closing ends a call that is under way."""
        endless = SamplingParams(max_tokens=200, seed=7, ignore_eos=True)
        call = asyncio.create_task(replica.generate([5, 6], endless))
        while not replica.metrics()["sampled_tokens"]:
            await asyncio.sleep(0)
        await replica.close()
        await asyncio.wait({call})
        return call.cancelled()

    async def main() -> tuple[bool, bool]:
        generator = AsyncEngine(make_text_engine(), use_thread=False)
        given = await ends_a_call(Replica(generator=generator))
        await generator.close()
        return await ends_a_call(Replica(recipe)), given

    assert asyncio.run(main()) == (True, False)
