"""What the ranks do in test_tensor_parallel.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from pool import Rank
from torch import Tensor

from nanoengine.formats.hf import load_model, read_state
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import CacheKind, InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.led_engine import LedEngine, RanksLost, follow

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 211, (n,), generator=GENERATOR).tolist() for n in (2, 17, 40, 16, 33)]
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, prompt_logps=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, seed=8, top_p=0.9, ignore_eos=True),
]
LED_CONFIG = InferConfig(
    num_blocks=40, max_batch_tokens=24, max_num_seqs=4, speculate=3, speculate_free_rows=64
)


def make_engine(
    folder: str,
    split: TensorParallel | None = None,
    num_blocks: int = 7,
    kind: CacheKind = "auto",
    speculate: int = 0,
) -> LLMEngine:
    """A cache so small that requests are preempted, and prompts computed in chunks."""
    config = InferConfig(
        num_blocks=num_blocks,
        max_batch_tokens=24,
        max_num_seqs=4,
        kv_cache_dtype=kind,
        speculate=speculate,
        speculate_free_rows=64,
    )
    return LLMEngine(load_model(folder, split=split), config)


def outputs(engine: LLMEngine) -> list[Output]:
    requests = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    return engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def on_rank(rank: Rank, folder: str, sequence_parallel: bool) -> tuple[list[Output], int, int]:
    """The outputs, the preemptions, and the elements of this rank's cache."""
    mesh = rank.mesh(Layout(tp=rank.world))
    shape = ModelConfig.from_folder(folder)
    split = TensorParallel.of(mesh, shape, sequence_parallel=sequence_parallel)
    engine = make_engine(folder, split, speculate=3)
    found = outputs(engine)
    engine.check()
    assert engine.metrics()["accepted_tokens"] > 0
    return found, engine._scheduler.num_preemptions, engine._runner.cache.data.numel()


def on_rank_fp8(rank: Rank, folder: str) -> tuple[list[Output], int]:
    """The outputs from a cache of fp8, and the bytes of this rank's."""
    mesh = rank.mesh(Layout(tp=rank.world))
    split = TensorParallel.of(mesh, ModelConfig.from_folder(folder))
    engine = make_engine(folder, split, kind="fp8")
    return outputs(engine), engine._runner.cache.data.nbytes


def update(rank: Rank, folder: str) -> list[Output]:
    """What a rank says after its weights were doubled in place."""
    mesh = rank.mesh(Layout(tp=rank.world))
    engine = make_engine(folder, TensorParallel.of(mesh, ModelConfig.from_folder(folder)))
    engine.update_weights(doubled(folder), version=1)
    return outputs(engine)


def doubled(folder: str) -> list[tuple[str, Tensor]]:
    return [(name, tensor * 2) for name, tensor in read_state(folder)]


def led(rank: Rank, folder: str) -> tuple[list[Output], list[str]] | dict[str, float]:
    """Rank 0 serves coroutines that come, go and are given new weights; the other follows. The
    outputs and what was refused; of a follower, its engine's state."""
    mesh = rank.mesh(Layout(tp=rank.world), timeout_s=60.0)
    split = TensorParallel.of(mesh, ModelConfig.from_folder(folder))
    model = load_model(folder, split=split)
    if mesh.rank("tp") > 0:
        engine = LLMEngine(model, LED_CONFIG)
        follow(engine, mesh)
        engine.check()
        return engine.metrics()
    leader = LedEngine(model, LED_CONFIG, mesh=mesh)
    found = asyncio.run(serve(leader, folder))
    leader.dismiss()
    return found


async def serve(engine: LLMEngine, folder: str) -> tuple[list[Output], list[str]]:
    """Requests at odd moments, some cancelled, some aborted and taken up again."""
    refused: list[str] = []

    async def one(client: AsyncEngine, i: int) -> Output | None:
        for _ in range(3 * (i % 5)):
            await asyncio.sleep(0)
        params = replace(PARAMS[i % 3], seed=i)
        task = asyncio.create_task(client.generate(PROMPTS[i % 5], params, name=f"r{i}"))
        if i % 4 == 0:
            await asyncio.sleep(0.002 * i)
            if i % 8 == 0:
                task.cancel()
                await asyncio.wait({task})
                return None
            await client.abort(f"r{i}")
        part = await task
        if part.finish_reason != "abort":
            return part
        return await client.generate(PROMPTS[i % 5], params, sampled=part)

    async with AsyncEngine(engine) as client:
        first = await asyncio.gather(*(one(client, i) for i in range(12)))
        with suppressed(refused):
            await client.generate([9999], PARAMS[0])
        with suppressed(refused):
            await client.update_weights(doubled(folder)[1:], 5)
        with suppressed(refused):
            await client.update_weights(broken(folder), 6)
        assert (await client.beat())["version"] == 0
        await client.update_weights(doubled(folder), 7)
        await client.sleep()
        await client.wake()
        second = await asyncio.gather(*(one(client, i) for i in range(6)))
    engine.check()
    return [output for output in first + second if output is not None], refused


@contextmanager
def suppressed(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        refused.append(str(error).split(":")[0].split(";")[0])


def broken(folder: str) -> Iterator[tuple[str, Tensor]]:
    yield from doubled(folder)  # all of them: only rank 0 knows that they are not right
    raise ValueError("the checksum is wrong: so it is")


def lost(rank: Rank, folder: str) -> str:
    """The follower fails in a call; what each rank says to that."""
    mesh = rank.mesh(Layout(tp=rank.world), timeout_s=30.0)
    rank.meshes.clear()  # nobody could close it in good order
    model = load_model(folder, split=TensorParallel.of(mesh, ModelConfig.from_folder(folder)))
    mesh.barrier("tp")
    if mesh.rank("tp") > 0:
        engine = LLMEngine(model, LED_CONFIG)
        engine._start_version = lambda _: 1 / 0  # type: ignore[assignment, return-value]
        try:
            follow(engine, mesh)
        except RanksLost as error:
            mesh._groups.clear()  # as the end of its process would
            return str(error)
    leader = LedEngine(model, LED_CONFIG, mesh=mesh)
    return asyncio.run(served_until_lost(leader, folder))


async def served_until_lost(engine: LedEngine, folder: str) -> str:
    async with AsyncEngine(engine) as client:
        task = asyncio.create_task(client.generate(PROMPTS[0], replace(PARAMS[0], max_tokens=400)))
        while not client.metrics()["sampled_tokens"]:
            await asyncio.sleep(0)
        await client.update_weights(doubled(folder), 1)  # fails on the other rank alone
        said = ""
        for call in (task, client.generate(PROMPTS[1], PARAMS[0]), client.beat()):
            try:
                await call
            except RanksLost as error:
                said = str(error)
            else:
                return "no error"
        assert engine.num_unfinished == 0
        return said
