"""What an engine says of tokens among pictures is what training says of them, to the last bit.

The tiny model that sees, with weights four times as large as it begins with, so that what it says
depends on what it sees. Nothing here is compared with a stored number: rollouts are scored by the
training engine, and engines of every shape are compared with one that runs a request alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.packing import Sample
from nanoengine.spans import ImageSpan
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanoengine.vision.sight import Sight
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Seeing:
    """A model, its tokenizer, and pictures of noise."""

    model: Any
    tokenizer: SeeingTokenizer
    shas: list[str]

    def prompt(self, *pictures: int, text: str = "go") -> tuple[list[int], tuple[ImageSpan, ...]]:
        parts = [{"type": "image", "sha256": self.shas[one]} for one in pictures]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        ids = self.tokenizer.encode_chat(chat, add_generation_prompt=True)
        return ids, tuple(self.tokenizer.images_in(ids, chat, 0))

    def engine(self, **options: Any) -> LLMEngine:
        sizes = {"num_blocks": 200, "block_size": 4, "max_batch_tokens": 64, "max_num_seqs": 8}
        return LLMEngine(self.model, InferConfig(**{**sizes, **options}), tokenizer=self.tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


def seeing_of(folder: Path, tmp_path: Path, dtype: str) -> Seeing:
    model = load_model(folder, dtype=DTYPES[dtype])
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.mul_(4.0)
    model.repack()
    tokenizer = seeing_tokenizer(folder, tmp_path / "pictures")
    model.sight = Sight(model, tokenizer.store)
    noise = np.random.default_rng(0).integers(0, 256, (4, 48, 48, 3), dtype=np.uint8)
    return Seeing(model, tokenizer, [tokenizer.store.add(write_png(one)) for one in noise])


@pytest.fixture(params=DTYPES)
def seeing(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Seeing]:
    yield seeing_of(folder, tmp_path, request.param)


ASKED = [(0,), (1,), (0, 1), (0, 2, 0), (), (3, 3)]
"""One picture, another of its size, several, the same twice, none, two that touch in the chat."""


def params_of(seed: int, images: tuple[ImageSpan, ...], **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 9, "ignore_eos": True, "seed": seed, **options}, images=images
    )


def played(engine: LLMEngine, seeing: Seeing, **options: Any) -> list[Output]:
    prompts = [seeing.prompt(*pictures) for pictures in ASKED]
    params = [params_of(seed, images, **options) for seed, (_, images) in enumerate(prompts)]
    return engine.generate([ids for ids, _ in prompts], params)


def said(outputs: list[Output]) -> list[tuple[list[int], list[float]]]:
    return [(one.ids, one.logps) for one in outputs]


@pytest.mark.parametrize("share_prefix", [False, True])
def test_training_scores_what_was_sampled_with_the_same_bits(
    seeing: Seeing, share_prefix: bool
) -> None:
    outputs = played(seeing.engine(), seeing)
    samples = []
    for pictures, output in zip(ASKED, outputs, strict=True):
        ids, images = seeing.prompt(*pictures)
        mask = [0] * len(ids) + [1] * len(output.ids)
        sample = Sample(tokens=ids + output.ids, loss_mask=mask, images=images, group="g")
        samples.append(sample)
    dtype = "fp32" if seeing.model.dtype == torch.float32 else "bf16"
    config = EngineConfig(dtype=dtype, share_prefix=share_prefix, micro_batch_tokens=100)
    scored = Engine(seeing.model, config).forward_logprobs(samples)
    for sample, logps, output in zip(samples, scored, outputs, strict=True):
        begin = len(sample.tokens) - len(output.ids)
        assert logps[begin:].tolist() == output.logps


def test_no_shape_of_an_engine_changes_a_bit(seeing: Seeing) -> None:
    """Chunks that end within a picture, caches that end there, a batch, preemption, drafts, a token
    a step: all say what a request says alone."""
    alone = []
    for seed, pictures in enumerate(ASKED):
        ids, images = seeing.prompt(*pictures)
        engine = seeing.engine(prefix_caching=False, max_num_seqs=1)
        alone += engine.generate([ids], params_of(seed, images))
    shapes: list[dict[str, Any]] = [
        {},
        {"max_batch_tokens": 1, "max_num_seqs": 1},
        {"max_batch_tokens": 3, "max_num_seqs": 3},
        {"max_batch_tokens": 7, "max_num_seqs": 4},
        {"block_size": 5, "max_batch_tokens": 11},
        {"prefix_caching": False},
        {"num_blocks": 26, "max_num_seqs": 3},
        {"speculate": 4},
    ]
    for shape in shapes:
        engine = seeing.engine(**shape)
        first = said(played(engine, seeing))
        assert first == said(alone), shape
        assert said(played(engine, seeing)) == first, f"again, with what is cached: {shape}"


def test_what_it_says_depends_on_what_it_sees(seeing: Seeing) -> None:
    outputs = [one.logps[0] for one in played(seeing.engine(), seeing)]
    assert len(set(outputs)) == len(outputs)


def test_the_tower_looks_once_at_a_picture_until_its_weights_change(seeing: Seeing) -> None:
    engine = seeing.engine(prefix_caching=False, max_batch_tokens=9)
    sight = seeing.model.sight
    played(engine, seeing)
    assert (sight.num_looks, seeing.tokenizer.store.num_read) == (4, 4)
    played(engine, seeing)
    assert sight.num_looks == 4
    for version, factor in enumerate((1.0, 0.5), start=1):  # an update of the decoder, of the tower
        with torch.no_grad():
            seeing.model.norm.mul_(0.5)
            seeing.model.visual.positions.weight.mul_(factor)
        seeing.model.repack()
        engine.adopt_weights(version)
        played(engine, seeing)
        assert (sight.num_looks, seeing.tokenizer.store.num_read) == (4 * version, 4)


def test_a_tower_that_was_trained_is_looked_through_anew(seeing: Seeing) -> None:
    """Of features that were kept over an update the log-probs would be the old ones'."""
    engine = seeing.engine()
    before = played(engine, seeing)
    with torch.no_grad():
        seeing.model.visual.merger.project.weight.mul_(-1.0)
    seeing.model.repack()
    engine.adopt_weights(1)
    after = played(engine, seeing)
    fresh = played(seeing.engine(), seeing)
    assert said(after) == said(fresh)
    changed = [old.logps[0] != new.logps[0] for old, new in zip(before, after, strict=True)]
    assert changed == [bool(pictures) for pictures in ASKED]


def test_requests_in_flight_go_on_under_new_weights_as_if_begun_there(seeing: Seeing) -> None:
    """Half of each answer, an update, the rest: that rest is what follows the first half under the
    new weights, pictures and all."""
    engine = seeing.engine(max_batch_tokens=16)
    prompts = [seeing.prompt(*pictures) for pictures in ASKED]
    handles = [
        engine.add(ids, params_of(seed, images, max_tokens=12))
        for seed, (ids, images) in enumerate(prompts)
    ]
    finished: dict[int, Output] = {}
    is_new = False
    for _ in range(400):
        begun = [seq for seq in map(engine.peek, handles) if seq is not None and seq.num_sampled]
        if len(begun) >= 3 and not is_new:
            is_new = True
            with torch.no_grad():
                seeing.model.visual.merger.project.weight.mul_(-1.0)
            seeing.model.repack()
            engine.adopt_weights(1)
        finished |= dict(engine.step())
        if len(finished) == len(handles):
            break
    mixed = 0
    for handle, (ids, images) in zip(handles, prompts, strict=True):
        output = finished[handle]
        split = sum(version == 0 for version in output.versions)
        if not 0 < split < len(output.ids):
            continue
        mixed += 1
        prompt = ids + output.ids[:split]
        params = params_of(output_seed(prompts, ids, images), images, max_tokens=12 - split)
        again = seeing.engine().generate([prompt], params)[0]
        assert again.logps == output.logps[split:]
    assert mixed >= 2


def moved(span: ImageSpan, by: int) -> ImageSpan:
    return replace(span, start=span.start + by)


def output_seed(prompts: list[Any], ids: list[int], images: tuple[ImageSpan, ...]) -> int:
    return prompts.index((ids, images))


def test_a_sampled_placeholder_is_a_token_like_others(seeing: Seeing) -> None:
    """Whatever a policy says is trained on: the placeholder's id has a row of the embedding."""
    placeholder = seeing.model.config.image_token_id
    ids, images = seeing.prompt(0)
    params = params_of(1, images, allowed_token_ids=(placeholder,), max_tokens=3)
    (output,) = seeing.engine().generate([ids], params)
    assert output.ids == [placeholder] * 3
    mask = [0] * len(ids) + [1] * 3
    sample = Sample(tokens=ids + output.ids, loss_mask=mask, images=images)
    dtype = "fp32" if seeing.model.dtype == torch.float32 else "bf16"
    (scored,) = Engine(seeing.model, EngineConfig(dtype=dtype)).forward_logprobs([sample])
    assert scored[-3:].tolist() == output.logps


def test_pictures_that_cannot_be_are_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    seeing = seeing_of(folder, tmp_path, "fp32")
    engine = seeing.engine()
    ids, images = seeing.prompt(0)
    (span,) = images
    for wrong, message in (
        (moved(span, 1), "covers tokens that differ"),
        (moved(span, 500), "outside of"),
        (ImageSpan(**{**vars(span), "length": 4}), "4 tokens, and a grid .* merges 2 x 2"),
        (ImageSpan(**{**vars(span), "start": 0, "length": 1, "grid": (1, 2, 2)}), "placeholder is"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(ids, params_of(0, (wrong,)))
    seeing.model.sight = None
    with pytest.raises(ValueError, match="reads text alone"):
        engine.add(ids, params_of(0, images))


def test_a_run_of_many_shapes_at_random_keeps_to_the_bits(folder: Path, tmp_path: Path) -> None:
    seeing = seeing_of(folder, tmp_path, "fp32")
    rng = random.Random(11)
    alone: dict[tuple[int, tuple[int, ...]], Output] = {}
    for _ in range(6):
        engine = seeing.engine(
            block_size=rng.choice([2, 3, 8]),
            max_batch_tokens=rng.choice([5, 13, 40]),
            max_num_seqs=rng.choice([1, 3, 5]),
            num_blocks=200,
            speculate=rng.choice([0, 3]),
        )
        asked = [
            (rng.randrange(4), tuple(rng.randrange(4) for _ in range(rng.randint(0, 3))))
            for _ in range(6)
        ]
        prompts = [seeing.prompt(*pictures) for _, pictures in asked]
        params = [params_of(seed, p[1]) for (seed, _), p in zip(asked, prompts, strict=True)]
        outputs = engine.generate([ids for ids, _ in prompts], params)
        for key, output in zip(asked, outputs, strict=True):
            first = alone.setdefault(key, output)
            assert (first.ids, first.logps) == (output.ids, output.logps)
