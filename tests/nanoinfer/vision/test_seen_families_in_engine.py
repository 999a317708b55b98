"""Every family that sees in the inference engine: greedy answers are transformers', and training
scores what was sampled with the same bits.

Three turns with a picture, or some tiles, in each. Models are transformers' small ones; pictures
are noise, given to both without a processor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from seen_families import CASES, draw_text
from torch import Tensor
from vision_cases import draw_pixels

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.packing import Sample
from nanoengine.spans import ImageSpan
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.sight import Sight
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams

WORDS = 190
"""Ids below are text: a model of noise would say placeholders, which transformers refuses."""
SHAPES = [(2, 3), (4, 2), (3, 3)]
"""Tokens of whole pictures: none takes as many positions as it has tokens."""


class Shown(dict[str, Tensor]):
    """Patches by the key of a span."""

    def values(self, span: ImageSpan) -> Tensor:
        return self[span.key]


class Talk:
    """A conversation of three turns with a model of a family."""

    def __init__(self, family: str, folder: Path, dtype: torch.dtype) -> None:
        self.case = CASES[family]
        self.theirs = self.case.model(4).to(dtype)
        with torch.no_grad():
            for one in self.theirs.parameters():
                if one.dim() > 1:
                    one.mul_(3.0)  # so that it does not say one word again and again
        self.theirs.save_pretrained(folder)
        self.model = load_model(folder, dtype)
        self.shown = Shown()
        self.model.sight = Sight(self.model, self.shown)
        self.ids: list[int] = []
        self.spans: list[ImageSpan] = []

    def engine(self, **options: Any) -> LLMEngine:
        sizes = {"num_blocks": 400, "block_size": 4, "max_batch_tokens": 11, "max_num_seqs": 4}
        return LLMEngine(self.model, InferConfig(**{**sizes, **options}))

    def show(self, turn: int) -> None:
        """Text with one picture more, or with tiles, of which transformers takes one size."""
        vision = self.model.config.vision
        if self.model.rope_axes is not None:
            height, width = (side * vision.spatial_merge_size for side in SHAPES[turn])
            grids = [(1, height, width)]
        else:
            grids = [self.case.grids(vision, 7)[0]] * (turn + 1)
        ids, spans = draw_text(grids, vision.spatial_merge_size, turn)
        rows = draw_pixels(vision, grids, turn).split([grid[1] * grid[2] for grid in grids])
        for span, values in zip(spans, rows, strict=True):
            key = f"{turn}{span.key}"
            self.shown[key] = values
            self.spans.append(replace(span, start=span.start + len(self.ids), key=key))
        self.ids += ids.tolist()

    def ask(self, engine: LLMEngine, count: int, **options: Any) -> Any:
        params = SamplingParams(
            **{"max_tokens": count, "temperature": 0.0, **options},
            ignore_eos=True,
            allowed_token_ids=tuple(range(WORDS)),
            images=tuple(self.spans),
        )
        (output,) = engine.generate([self.ids], [params])
        self.ids += output.ids
        return output


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_greedy_answers_over_three_turns_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """One pass of transformers over the whole conversation: the likeliest word behind every place
    is the one that was said there."""
    talk = Talk(family, tmp_path, torch.float32)
    engine = talk.engine()
    said = []
    for turn, count in enumerate((8, 8, 64)):
        talk.show(turn)
        begin = len(talk.ids)
        talk.ask(engine, count)
        said += range(begin, len(talk.ids))
    rows = torch.cat([talk.shown[span.key] for span in talk.spans])
    grids = [span.grid for span in talk.spans]
    inputs = talk.case.inputs(talk.theirs, torch.tensor(talk.ids), grids, rows)
    logits = talk.theirs(**inputs).logits[0, :, :WORDS]
    assert [talk.ids[place] for place in said] == [int(logits[i - 1].argmax()) for i in said]
    assert len({talk.ids[place] for place in said}) > 5


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_scores_what_was_sampled_with_the_same_bits(
    family: str, dtype: str, tmp_path: Path
) -> None:
    talk = Talk(family, tmp_path, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    engine = talk.engine()
    mask: list[int] = []
    logps: list[float] = []
    for turn in range(3):
        talk.show(turn)
        mask += [0] * (len(talk.ids) - len(mask))
        output = talk.ask(engine, 9, temperature=1.0, seed=turn)
        mask += [1] * len(output.ids)
        logps += output.logps
    whole = Sample(tokens=talk.ids, loss_mask=mask, images=tuple(talk.spans), group="g")
    words = Sample(tokens=[5, 6, 7], loss_mask=[0, 1, 1], group="g")
    for share_prefix in (False, True):
        config = EngineConfig(dtype=dtype, share_prefix=share_prefix)
        scored, _ = Engine(talk.model, config).forward_logprobs([whole, words])
        found = [one for one, is_said in zip(scored.tolist(), mask, strict=True) if is_said]
        assert found == logps
