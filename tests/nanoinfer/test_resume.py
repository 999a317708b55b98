"""A request that goes on in another engine says what it would have said, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle
from string import printable

import pytest
import torch
from tiny_text import VOCAB, make_model, make_tokenizer

from nanoengine.model.transformer import Transformer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Grammar, Output, SamplingParams

Request = tuple[list[int], SamplingParams]

OPTIONS: list[dict] = [
    {},
    {"temperature": 0.0, "top_logps": 2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"logit_bias": {5: 4.0, 6: -100.0}, "allowed_token_ids": tuple(range(60, 200))},
    {"temperature": 4.0, "stop": ("he", *printable[:9]), "detokenize": True},
    {"temperature": 0.6, "detokenize": True, "logps_mode": "raw"},
    {"top_logps": 3, "prompt_logps": True},
    {"stop_token_ids": tuple(range(0, 300, 29)), "temperature": 0.5},
]
GRAMMARS = [
    {"grammar": Grammar("regex", r"[a-f]{3}(-\d{2,9})*;"), "ignore_eos": False},
    {
        "grammar": Grammar("choice", choices=("yes, the end", "yes, the other", "no")),
        "stop": ("r",),
    },
]


@pytest.fixture(scope="module", params=(torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def model(request: pytest.FixtureRequest) -> Transformer:
    """Heads as wide as in test_speculative_exactness.py, for the reason said there."""
    model = Transformer(replace(make_model().config, head_dim=64), request.param)
    model.init_weights(0, std=0.3)
    return model


def make_engine(model: Transformer, **options: object) -> LLMEngine:
    sizes = {"num_blocks": 160, "max_batch_tokens": 48, "max_num_seqs": 12}
    return LLMEngine(model, InferConfig(**{**sizes, **options}), tokenizer=make_tokenizer())  # type: ignore[arg-type]


def requests(options: list[dict], count: int) -> list[Request]:
    draw = random.Random(3)
    made: list[Request] = []
    for chosen in cycle(options):
        if len(made) == count:
            return made
        loop = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 5))]
        ids = (loop * 9)[: draw.choice((3, 20, 33))]
        given = {"max_tokens": 24, "ignore_eos": True, "seed": len(made)} | chosen
        made.append((ids, SamplingParams(**given)))
    return made


def cut(output: Output, count: int) -> Output:
    """What an abort after `count` tokens leaves."""
    return Output(
        ids=output.ids[:count],
        logps=output.logps[:count],
        versions=output.versions[:count],
        sampled_logps=output.sampled_logps[:count],
        top_logps=output.top_logps[:count],
        finish_reason="abort",
    )


def finish(engine: LLMEngine, parts: list[tuple[Request, Output | None]]) -> list[Output]:
    handles = [engine.add(ids, params, sampled=part) for (ids, params), part in parts]
    outputs: dict[int, Output] = {}
    while len(outputs) < len(handles):
        outputs |= dict(engine.step())
    engine.check()
    return [outputs[handle] for handle in handles]


def same(mine: Output, true: Output) -> bool:
    """Everything but what the cache happened to hold."""
    return replace(mine, num_cached_tokens=0) == replace(true, num_cached_tokens=0)


@pytest.mark.parametrize(
    "engine_options",
    [{"prefix_caching": False}, {"speculate": 4, "speculate_free_rows": 64}],
    ids=("plain", "cached-and-drafted"),
)
def test_a_request_cut_anywhere_goes_on_as_if_it_had_not_been(
    model: Transformer, engine_options: dict
) -> None:
    made = requests(OPTIONS, 18)
    expected = finish(make_engine(model), [(request, None) for request in made])
    draw = random.Random(5)
    other = make_engine(model, **engine_options)
    for _ in range(3):
        parts: list[tuple[Request, Output | None]] = []
        for request, output in zip(made, expected, strict=True):
            count = draw.choice((0, 1, len(output.ids) - 1, draw.randrange(len(output.ids))))
            parts.append((request, cut(output, min(count, len(output.ids) - 1))))
        draw_order = list(range(len(parts)))
        draw.shuffle(draw_order)
        found = finish(other, [parts[i] for i in draw_order])
        for i, output in zip(draw_order, found, strict=True):
            assert same(output, expected[i]), made[i]
    reasons = {output.finish_reason for output in expected}
    assert reasons == {"length", "stop"}, "nothing ended by itself: the cases are too tame"


def test_a_grammar_and_a_stop_text_go_on_where_they_stood(model: Transformer) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    made = requests(GRAMMARS, 6)
    expected = finish(make_engine(model), [(request, None) for request in made])
    for count in (0, 1, 2, 4):
        parts = [
            (r, cut(o, min(count, len(o.ids) - 1))) for r, o in zip(made, expected, strict=True)
        ]
        for mine, true in zip(finish(make_engine(model), parts), expected, strict=True):
            assert same(mine, true)


def test_what_an_abort_leaves_is_what_another_engine_takes(model: Transformer) -> None:
    """Three engines in turn, each with the requests at other points, drafts under way."""
    made = requests(OPTIONS, 9)
    expected = finish(make_engine(model), [(request, None) for request in made])
    parts: list[Output | None] = [None] * len(made)
    ended: dict[int, Output] = {}
    for num_steps in (3, 4, 99):
        engine = make_engine(model, speculate=3)
        left = [i for i in range(len(made)) if i not in ended]
        handles = {engine.add(*made[i], sampled=parts[i]): i for i in left}
        for _ in range(num_steps):
            for handle, output in engine.step():
                ended[handles.pop(handle)] = output
        for handle, i in handles.items():
            parts[i] = engine.abort(handle)
    assert len(ended) == len(made)
    for i, output in ended.items():
        assert same(output, expected[i])


def test_what_cannot_be_a_part_of_the_request_is_refused() -> None:
    engine = make_engine(make_model())
    whole = engine.generate([[1, 2]], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    for max_tokens, part, message in (
        (5, whole, "nothing to continue"),
        (3, whole, "ended after 3 of its 5"),
        (9, replace(cut(whole, 3), logps=[]), "3 ids, but logps"),
        (9, replace(cut(whole, 1), ids=[VOCAB]), f"token {VOCAB} is outside"),
    ):
        with pytest.raises(ValueError, match=message):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            engine.add([1, 2], params, sampled=part)
    assert engine.num_unfinished == 0
    engine.check()
