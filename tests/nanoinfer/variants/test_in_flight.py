"""What becomes of requests in flight when new weights come: their cache is computed again, kept, or
the weights wait. The one that is kept is held against transformers with its own cache kept."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from test_weights import GREEDY, PROMPT, SHAPE, new_state, served
from tiny_models import make_reference, save_reference

from nanoengine.formats.hf import load_model
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig, InFlight
from nanoinfer.engine import LLMEngine
from nanoinfer.options.outputs import output_from_json
from nanoinfer.params import Output, SamplingParams

NUM_BEFORE = 6  # tokens sampled by the old weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old")
    save_reference(SHAPE, path)
    return path


def make(folder: Path, in_flight: InFlight) -> LLMEngine:
    return LLMEngine(load_model(folder), InferConfig(num_blocks=100, in_flight=in_flight))


def interrupted(engine: LLMEngine, params: SamplingParams = GREEDY) -> Output:
    """A completion whose weights change after NUM_BEFORE tokens."""
    handle = engine.add(PROMPT, params)
    for _ in range(NUM_BEFORE):
        assert not engine.step()
    engine.update_weights(iter(new_state().items()), 1)
    engine.check()
    finished: dict[int, Output] = {}
    while not finished:
        finished = dict(engine.step())
        engine.check()
    return finished[handle]


@torch.no_grad()
def continued_by_transformers() -> tuple[list[int], list[float]]:
    """The same by transformers: the old model's cache under the new model's weights."""
    old, new = make_reference(SHAPE, 0), make_reference(SHAPE, 1)
    out = old(torch.tensor([PROMPT]), use_cache=True)
    ids: list[int] = []
    logps: list[float] = []
    while True:
        logp_V = out.logits[0, -1].log_softmax(-1)
        ids.append(int(logp_V.argmax()))
        logps.append(float(logp_V.max()))
        if len(ids) == GREEDY.max_tokens:
            return ids, logps
        model = old if len(ids) < NUM_BEFORE else new
        out = model(torch.tensor([ids[-1:]]), past_key_values=out.past_key_values, use_cache=True)


def test_a_kept_cache_is_read_by_the_new_weights_as_transformers_does(folder: Path) -> None:
    output = interrupted(make(folder, "keep"))
    ids, logps = continued_by_transformers()
    assert output.ids == ids
    assert output.logps == pytest.approx(logps, abs=2e-4, rel=0)
    assert output.versions == [0] * NUM_BEFORE + [1] * (16 - NUM_BEFORE)
    assert output.ids != interrupted(make(folder, "recompute")).ids


def test_keeping_computes_nothing_again(folder: Path) -> None:
    computed = {}
    for in_flight in ("keep", "recompute"):
        engine = make(folder, in_flight)  # type: ignore[arg-type]
        interrupted(engine)
        computed[in_flight] = engine.metrics()["computed_tokens"]
    assert computed["keep"] == len(PROMPT) + 16 - 1
    assert computed["recompute"] == computed["keep"] + len(PROMPT) + NUM_BEFORE - 1


def test_a_kept_cache_is_nobody_elses(folder: Path) -> None:
    """Others who ask the same find nothing of it, while it runs and when it has ended."""
    engine = make(folder, "keep")
    expected = served(new_state(), folder).generate([PROMPT], GREEDY)[0]
    engine.add(PROMPT, GREEDY)
    for _ in range(NUM_BEFORE):
        engine.step()
    engine.update_weights(iter(new_state().items()), 1)
    beside = engine.generate([PROMPT], GREEDY)[0]
    later = engine.generate([PROMPT + beside.ids], GREEDY)[0]
    fresh = served(new_state(), folder).generate([PROMPT + beside.ids], GREEDY)[0]
    assert beside.num_cached_tokens == 0
    assert (beside.ids, beside.logps) == (expected.ids, expected.logps)
    assert (later.ids, later.logps) == (fresh.ids, fresh.logps)


def test_scores_of_a_prompt_are_of_one_version_even_where_caches_are_kept(folder: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, prompt_logps=True)
    output = interrupted(make(folder, "keep"), params)
    again = interrupted(make(folder, "recompute"), params)
    assert output.prompt_logps == again.prompt_logps and len(output.prompt_logps) == 39


def test_weights_that_wait_meet_no_request_and_new_ones_come_after_them(folder: Path) -> None:
    async def scenario() -> tuple[list[Output], list[int]]:
        async with AsyncEngine(make(folder, "wait")) as client:
            first = [asyncio.create_task(client.generate(PROMPT, GREEDY)) for _ in range(2)]
            while client.metrics()["num_steps"] < 3:
                await asyncio.sleep(0)
            update = asyncio.create_task(client.update_weights(iter(new_state().items()), 1))
            await asyncio.sleep(0)
            late = asyncio.create_task(client.generate(PROMPT, GREEDY))
            outputs = await asyncio.gather(*first, late)
            await update
            return list(outputs), [client.version]

    outputs, version = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [set(output.versions) for output in outputs] == [{0}, {0}, {1}]
    assert version == [1]


def test_weights_do_not_wait_for_requests_of_an_engine_that_is_paused(folder: Path) -> None:
    async def scenario() -> Output:
        async with AsyncEngine(make(folder, "wait")) as client:
            request = asyncio.create_task(client.generate(PROMPT, GREEDY))
            while client.metrics()["num_steps"] < 3:
                await asyncio.sleep(0)
            await client.pause()
            await client.update_weights(iter(new_state().items()), 1)
            await client.resume()
            return await request

    output = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert set(output.versions) == {0, 1}


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight='drop': choose one of recompute, keep, wait"):
        InferConfig(in_flight="drop")  # type: ignore[arg-type]


def step_until(engine: LLMEngine, handle: int) -> Output:
    finished: dict[int, Output] = {}
    while handle not in finished:
        finished |= dict(engine.step())
        engine.check()
    return finished[handle]


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_each_token_says_how_old_the_cache_below_it_is(folder: Path, in_flight: InFlight) -> None:
    output = interrupted(make(folder, in_flight))
    rest = 16 - NUM_BEFORE
    assert output.versions == [0] * NUM_BEFORE + [1] * rest
    assert output.cache_versions == ([0] * 16 if in_flight == "keep" else output.versions)


def test_a_prompt_that_was_half_read_is_as_old_as_its_oldest_part(folder: Path) -> None:
    """All tokens are sampled by version 1, over keys of version 0: `versions` alone cannot say."""
    config = InferConfig(num_blocks=100, in_flight="keep", max_batch_tokens=16, max_num_seqs=4)
    engine = LLMEngine(load_model(folder), config)
    handle = engine.add(PROMPT, GREEDY)
    assert not engine.step() and len(PROMPT) > 16
    engine.update_weights(iter(new_state().items()), 1)
    waiting = engine.add(PROMPT, GREEDY)  # nothing of it was cached when the weights came
    output = step_until(engine, handle)
    assert (output.versions, output.cache_versions) == ([1] * 16, [0] * 16)
    fresh = served(new_state(), folder).generate([PROMPT], GREEDY)[0]
    assert output.logps != fresh.logps
    other = step_until(engine, waiting)
    assert (other.cache_versions, other.logps) == ([1] * 16, fresh.logps)


def test_the_oldest_of_three_versions_counts_until_the_cache_is_computed_again(
    folder: Path,
) -> None:
    engine = make(folder, "keep")
    handle = engine.add(PROMPT, GREEDY)
    for version in (3, 5):
        engine.step()
        engine.update_weights(iter(new_state().items()), version)
    engine.step()
    engine.sleep()  # gives the cache back: what comes after is over keys of version 5 alone
    engine.wake()
    output = step_until(engine, handle)
    assert output.versions == [0, 3, *[5] * 14]
    assert output.cache_versions == [0, 0, 0, *[5] * 13]


def test_how_old_the_cache_was_goes_along_to_another_engine(folder: Path) -> None:
    engine = make(folder, "keep")
    handle = engine.add(PROMPT, GREEDY)
    for _ in range(NUM_BEFORE):
        engine.step()
    engine.update_weights(iter(new_state().items()), 1)
    engine.step()
    half = engine.abort(handle)
    assert half is not None and half.cache_versions == [0] * (NUM_BEFORE + 1)
    half = output_from_json(json.loads(json.dumps(asdict(half))))
    other = served(new_state(), folder)
    other.version = 1
    whole = step_until(other, other.add(PROMPT, GREEDY, sampled=half))
    assert whole.cache_versions == [0] * (NUM_BEFORE + 1) + [1] * (15 - NUM_BEFORE)
    # what an engine of an older release left says it of itself
    old = replace(half, cache_versions=[])
    whole = step_until(other, other.add(PROMPT, GREEDY, sampled=old))
    assert whole.cache_versions == [0] * NUM_BEFORE + [1] * (16 - NUM_BEFORE)
    cut = replace(half, **{n: getattr(half, n)[:3] for n in ("ids", "logps", "sampled_logps")})
    cut = replace(cut, versions=cut.versions[:3])
    assert step_until(other, other.add(PROMPT, GREEDY, sampled=cut)).cache_versions[:4] == [
        0,
        0,
        0,
        1,
    ]
    with pytest.raises(ValueError, match="cache_versions have 7, 7, 7, 7, 2"):
        other.add(PROMPT, GREEDY, sampled=replace(half, cache_versions=[0, 0]))
