"""Outputs have the same bits with drafts and without, whatever the drafts and the request."""

import asyncio
import random
from dataclasses import asdict, replace
from itertools import cycle, pairwise
from string import printable

import pytest
import torch
from drafts import PlantedDrafter, plant
from tiny_text import VOCAB, make_model, make_tokenizer

from nanoengine.formats.hf import export_state
from nanoengine.model.transformer import Transformer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.options.param_checks import is_edited
from nanoinfer.params import Output, SamplingParams
from nanoinfer.sequence import Sequence

Request = tuple[list[int], SamplingParams]

OPTIONS: list[dict] = [
    {},
    {"temperature": 0.0},
    {"temperature": 4.0, "stop": ("he", *printable), "detokenize": True, "max_tokens": 30},
    {"temperature": 0.6, "detokenize": True},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.3, "stop_token_ids": tuple(range(0, 300, 9))},
    {"top_logps": 3, "prompt_logps": True},
    {"temperature": 0.0, "top_logps": 2, "ignore_eos": True},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.5, "n": 3},
]


@pytest.fixture(scope="module", params=(torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def model(request: pytest.FixtureRequest) -> Transformer:
    return wide_model(0, request.param)


def wide_model(seed: int, dtype: torch.dtype) -> Transformer:
    """Heads wide enough that even one query's matmuls in bf16 go through oneDNN: PyTorch leaves
    those of up to 4,096 multiplications to another kernel, with other bits."""
    model = Transformer(replace(make_model().config, head_dim=64), dtype)
    model.init_weights(seed, std=0.3)
    return model


def requests() -> list[Request]:
    """A third of them in groups of 3 with one prompt; members of `n` beside each other."""
    draw = random.Random(1)
    made: list[Request] = []
    for options in cycle(OPTIONS):
        if len(made) >= 60:
            break
        loop = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 6))]
        prompt = (loop * 9)[: draw.randint(0, 24)]
        prompt += [draw.randrange(VOCAB) for _ in range(draw.choice((1, 2, 17)))]
        sizes = {"max_tokens": draw.choice((1, 2, 9, 30, 40)), "seed": draw.randrange(1 << 40)}
        params = SamplingParams(**{**sizes, **options})
        for i in range(draw.choice((1, 1, 3))):
            made += [(prompt, p) for p in replace(params, seed=params.seed + i).members()]
    return made


def make(model: Transformer, **options: object) -> LLMEngine:
    sizes = {"num_blocks": 400, "max_batch_tokens": 256, "max_num_seqs": 16, "block_size": 8}
    config = InferConfig(**{**sizes, **options})  # type: ignore[arg-type]
    return LLMEngine(model, config, tokenizer=make_tokenizer())


def run(engine: LLMEngine, asked: list[Request]) -> list[dict]:
    """Everything in the outputs but what depends on who ran when."""
    handles = [engine.add(*request) for request in asked]
    outputs: dict[int, Output] = {}
    while engine.num_unfinished:
        outputs.update(engine.step())
        engine.check()
    return [comparable(outputs[handle]) for handle in handles]


def comparable(output: Output) -> dict:
    found = asdict(output)
    del found["num_cached_tokens"]
    return found


def informed(engine: LLMEngine, expected: list[dict], is_right: float) -> None:
    """Drafts from the outputs themselves, and arbitrary ones after their ends."""

    def future(seq: Sequence, num: int) -> list[int]:
        known = expected[seq.handle]["ids"][seq.num_sampled :][:num]
        return known + [7] * (num - len(known))

    plant(engine, PlantedDrafter(future, VOCAB, is_right=is_right, max_drafts=5))


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[dict]:
    """Without drafts."""
    outputs = run(make(model), requests())
    reasons = [(output["finish_reason"], type(output["stop_reason"])) for output in outputs]
    assert {("stop", str), ("stop", int), ("length", type(None))} <= set(reasons)
    return outputs


@pytest.mark.parametrize(
    ("options", "is_right"),
    [
        ({}, 1.0),
        ({}, 0.5),
        ({"num_blocks": 24, "max_batch_tokens": 40}, 0.8),
        ({"max_batch_tokens": 17, "max_num_seqs": 4, "prefix_caching": False}, 0.8),
        ({"block_size": 16, "max_num_seqs": 1}, 0.9),
    ],
    ids=["right", "doubtful", "tight", "chunked", "alone"],
)
def test_drafts_of_any_quality_do_not_change_a_bit(
    model: Transformer, expected: list[dict], options: dict, is_right: float
) -> None:
    engine = make(model, **options)
    informed(engine, expected, is_right)
    assert run(engine, requests()) == expected
    counts = engine.metrics()
    assert counts["accepted_tokens"] > 100
    assert counts["drafted_tokens"] > counts["accepted_tokens"]
    assert counts["sampled_tokens"] == sum(len(output["ids"]) for output in expected)
    if options.get("num_blocks") == 24:
        assert counts["num_preemptions"] > 0


@pytest.mark.parametrize("speculate", [1, 6])
def test_drafts_from_the_text_do_not_change_a_bit(
    model: Transformer, expected: list[dict], speculate: int
) -> None:
    engine = make(model, speculate=speculate, speculate_free_rows=32)
    assert run(engine, requests()) == expected
    counts = engine.metrics()
    assert counts["drafted_tokens"] > counts["accepted_tokens"] > 20
    assert not engine._scheduler.drafter._groups


def test_a_request_with_edits_is_not_drafted_for(model: Transformer, expected: list[dict]) -> None:
    edited = [r for r in requests() if is_edited(r[1])]
    engine = make(model, speculate=4, speculate_free_rows=10_000)
    run(engine, edited)
    assert engine.metrics()["drafted_tokens"] == 0


def test_new_weights_take_over_between_two_accepted_runs(model: Transformer) -> None:
    """A request alone, so that a run without drafts can change weights at the same token."""
    new = list(export_state(wide_model(1, model.dtype)))
    asked = ([5, 6, 7, 5, 6], SamplingParams(max_tokens=40, temperature=0.4, ignore_eos=True))

    def outcome(engine: LLMEngine, num_old: int | None) -> tuple[dict, int]:
        handle, done = engine.add(*asked), {}
        for _ in range(1000):
            seq = engine.peek(handle)
            at_step_9 = num_old is None and engine.metrics()["num_steps"] == 9
            if (
                seq is not None
                and engine.version == 0
                and (at_step_9 or seq.num_sampled == num_old)
            ):
                engine.update_weights(new, 1)
            done |= dict(engine.step())
            if done:
                break
        return comparable(done[handle]), done[handle].versions.count(0)

    first, num_old = outcome(make_fresh(model, 1.0), None)
    assert 9 < num_old < 40  # nine steps gave more than nine tokens
    assert outcome(make_fresh(model, None), num_old)[0] == first
    assert any(a < b for a, b in pairwise(first["versions"]))


def make_fresh(model: Transformer, is_right: float | None) -> LLMEngine:
    """An engine on the first weights; its drafts are what those sample."""
    engine = make(wide_model(0, model.dtype))
    if is_right is not None:
        params = SamplingParams(max_tokens=40, temperature=0.4, ignore_eos=True)
        (output,) = make(model).generate([[5, 6, 7, 5, 6]], params)
        informed(engine, [asdict(output)], is_right)
    return engine


def test_an_aborted_request_has_a_start_of_its_tokens(
    model: Transformer, expected: list[dict]
) -> None:
    engine = make(model)
    informed(engine, expected, 0.9)
    handles = [engine.add(*request) for request in requests()]
    ended: dict[int, Output] = {}
    draw = random.Random(0)
    while engine.num_unfinished:
        ended.update(engine.step())
        if draw.random() < 0.5:
            handle = draw.choice(handles)
            output = engine.abort(handle)
            if output is not None:
                ended[handle] = output
        engine.check()
    aborted = [handle for handle in handles if ended[handle].finish_reason == "abort"]
    assert len(aborted) > 5
    for handle, true in zip(handles, expected, strict=True):
        end = len(ended[handle].ids)
        for name in ("ids", "logps", "sampled_logps", "top_logps"):
            assert getattr(ended[handle], name) == true[name][:end], name


def test_a_stream_delivers_accepted_runs_whole(model: Transformer, expected: list[dict]) -> None:
    async def main() -> None:
        engine = make(model)
        informed(engine, expected, 1.0)
        async with AsyncEngine(engine, use_thread=False) as client:
            for asked, true in zip(requests()[:12], expected, strict=False):
                chunks = [chunk async for chunk in client.stream(*asked)]
                assert [t for chunk in chunks for t in chunk.ids] == true["ids"]
                assert [p for chunk in chunks for p in chunk.logps] == true["logps"]
                assert "".join(chunk.text for chunk in chunks) == (true["text"] or "")
                lengths.append(max(len(chunk.ids) for chunk in chunks))

    lengths: list[int] = []
    asyncio.run(asyncio.wait_for(main(), 60))
    assert max(lengths) > 2
