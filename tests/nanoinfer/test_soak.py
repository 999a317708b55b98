"""Thousands of requests of every kind leave nothing behind, and dozens in every family say what
each says alone.

Counted are Python objects, bytes of tensors, and resident memory. The last is no exact measure:
oneDNN keeps the code it compiles for each number of rows (about half a megabyte, 1024 of them), so
steps are kept small here and the first requests are not counted.
"""

import gc
import random
from dataclasses import replace
from pathlib import Path

import pipeline_engine_cases
import pytest
import torch
from layout_draws import IN_TURN, draw_shape
from parallel_cases import Case
from tiny_text import VOCAB, make_model, make_text_engine, make_tokenizer

from nanoengine.formats.hf import export_state
from nanoengine.model.transformer import Transformer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

pytestmark = pytest.mark.sweep
NUM_REQUESTS = 5000
WINDOW = 1000
NUM_BLOCKS = 160


def in_use() -> tuple[int, int, int]:
    """Objects, bytes of tensors, bytes resident."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if type(x) is torch.Tensor and not x.is_mkldnn]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return len(objects), sum(storages.values()), resident


def random_params(draw: random.Random) -> SamplingParams:
    options: list[dict] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"logit_bias": {3: 2.0}, "top_logps": 2},
        {"stop": ("a", "he"), "detokenize": True},
        {"prompt_logps": True, "allowed_token_ids": (1, 2, 3, 200)},
    ]
    return SamplingParams(
        max_tokens=draw.choice((1, 2, 4, 20)), seed=draw.randrange(1 << 40), **draw.choice(options)
    )


def random_prompt(draw: random.Random) -> list[int]:
    shared = [(7 * i + draw.randint(0, 3)) % 250 for i in range(draw.choice((0, 16, 20)))]
    prompt = shared + [draw.randrange(300) for _ in range(draw.randint(1, 12))]
    return prompt * draw.choice((1, 1, 2))  # what is repeated is drafted for


def serve_some(engine: LLMEngine, draw: random.Random, count: int) -> None:
    """Up to 60 in flight; some are aborted, or preempted; the weights change and it sleeps."""
    num_added = num_ended = 0
    handles: list[int] = []
    while num_ended < count:
        while num_added < count and engine.num_unfinished < 60:
            priority = draw.choice((0, 0, 0, 1))
            handles.append(engine.add(random_prompt(draw), random_params(draw), priority))
            num_added += 1
        num_ended += len(engine.step())
        if draw.random() < 0.1:
            num_ended += engine.abort(draw.choice(handles[-60:])) is not None
        running = engine._scheduler.running
        if running and draw.random() < 0.02:
            engine._scheduler.preempt(draw.choice(running))
        if draw.random() < 0.01:
            engine.update_weights(export_state(make_model(seed=1)), engine.version + 1)
        if draw.random() < 0.01:
            engine.sleep()
            engine.wake()
    engine.check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_5000_random_requests_keep_memory_flat() -> None:
    engine = make_text_engine(
        block_size=4,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=32,
        max_batch_tokens=96,
        speculate=3,
        speculate_free_rows=10**6,
    )
    draw = random.Random(0)
    sizes = []
    for _ in range(NUM_REQUESTS // WINDOW):
        serve_some(engine, draw, WINDOW)
        sizes.append(in_use())
    counts = engine.metrics()
    assert counts["num_requests"] == NUM_REQUESTS
    assert counts["num_finished"] + counts["num_aborted"] == NUM_REQUESTS
    assert counts["num_aborted"] > 20 and counts["num_preemptions"] > 0
    assert counts["num_weight_updates"] > 0
    assert engine.num_unfinished == 0 and not engine._sequences
    assert counts["drafted_tokens"] > 100
    assert not engine._scheduler.drafter._readers and not engine._scheduler.drafter._groups
    assert engine._blocks.num_free == engine._blocks.num_blocks
    assert len(engine._blocks._by_digest) <= NUM_BLOCKS
    assert len(engine._blocks._siblings) <= NUM_BLOCKS
    start, end = sizes[1], sizes[-1]
    num_counted = NUM_REQUESTS - 2 * WINDOW
    assert end[0] - start[0] < num_counted // 2, sizes  # no object of every request
    assert end[1] - start[1] < 16 * num_counted, sizes  # no tensor of every request
    assert end[2] - start[2] < 128_000_000, sizes


def draw_model(seed: int) -> Transformer:
    """The families come in turn; windows and scalings of the rope are short enough to matter."""
    dice, family = random.Random(seed), IN_TURN[seed % len(IN_TURN)]
    own = {"vocab_size": VOCAB, "max_position_embeddings": 128}
    shape = draw_shape(dice, family, {}, 1) | own | {"eos_ids": tuple(make_tokenizer().eos_ids)}
    case = Case(family=family, dtype="fp32", tied=dice.random() < 0.5, shape=tuple(shape.items()))
    return pipeline_engine_cases.whole_model(case)


def serve_all(
    engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]], draw: random.Random
) -> list[Output]:
    """Up to 20 in flight; one is preempted now and then, and the engine sleeps."""
    outputs: dict[int, Output] = {}
    handles: list[int] = []
    while len(outputs) < len(requests):
        while len(handles) < len(requests) and engine.num_unfinished < 20:
            handles.append(engine.add(*requests[len(handles)], draw.choice((0, 0, 1))))
        outputs |= dict(engine.step())
        running = engine._scheduler.running
        if running and draw.random() < 0.2:
            engine._scheduler.preempt(draw.choice(running))
        if draw.random() < 0.05:
            engine.sleep()
            engine.wake()
    engine.check()
    assert engine._blocks.num_free == engine._blocks.num_blocks
    return [outputs[handle] for handle in handles]


@pytest.mark.parametrize("seed", range(len(IN_TURN)), ids=IN_TURN.__getitem__)
def test_every_family_under_load_says_what_it_says_alone(seed: int) -> None:
    """Beside others, preempted, from the cache and behind drafts: the same tokens and bits."""
    draw, model = random.Random(seed), draw_model(seed)
    sizes = {"block_size": 4, "max_num_seqs": 12, "max_batch_tokens": 48}
    drafts = {"speculate": 3, "speculate_free_rows": 10**6}
    tokenizer = make_tokenizer()
    busy = LLMEngine(model, InferConfig(num_blocks=60, **sizes, **drafts), tokenizer=tokenizer)
    requests = [(random_prompt(draw), random_params(draw)) for _ in range(30)]
    found = serve_all(busy, requests, draw)
    counts = busy.metrics()
    assert counts["num_preemptions"] > 0 and counts["cached_tokens"] > 0
    quiet = LLMEngine(
        model, InferConfig(num_blocks=60, prefix_caching=False, **sizes), tokenizer=tokenizer
    )
    for (ids, params), output in list(zip(requests, found, strict=True))[::3]:
        alone = quiet.generate([ids], params)[0]
        assert replace(output, num_cached_tokens=0, versions=[]) == replace(alone, versions=[])
