"""The pictures of a step: which rows read features of the tower, and at which positions all stand.

A row of a picture reads the tower's feature in place of an embedding; a row behind a picture stands
at another position than its index in the sequence, which still says where its keys lie and which
random number draws its token. Both are worked out here for the sequences of one step; a chunk may
end within a picture, and what comes of the cache needs no features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.vision.rope_positions import merged_grid, rope_positions
from nanoengine.vision.sight import Placed
from nanoengine.vision.span_checks import check_spans
from nanoinfer.params import SamplingParams
from nanoinfer.scheduler import Step


@dataclass(frozen=True)
class StepPictures:
    """The part of a step with pictures that it needs beside its tokens."""

    positions: Tensor
    """Of a rope with axes: [T, 3], or [T] where no row is a picture's and all three are equal."""
    placed: list[Placed]
    """The pictures' rows among those of the step."""


def pictures_of(step: Step) -> StepPictures:
    """The pictures of a scheduled step."""
    positions, placed, row = [], [], 0
    for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
        first, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new
        images = seq.params.images
        positions.append(rope_positions(first, end, images))
        for span in images:
            lo, hi = max(span.start, first), min(span.end, end)
            if lo < hi:
                placed.append(Placed(span, lo - span.start, row + lo - first, hi - lo))
        row += num_new
    found = np.concatenate(positions)
    return StepPictures(torch.from_numpy(found if placed else found[:, 0].copy()), placed)


def read_by(model: Any, step: Any) -> tuple[Tensor, dict[str, Any]]:
    """The positions of a step's rows, and what the model is given beside them. The tower has no
    adapters, so what it saw serves every request."""
    pictures: StepPictures = step.asked.pictures
    rows = model.sight.rows(pictures.placed) if pictures.placed else None
    positions = step.positions_T if model.rope_axes is None else pictures.positions
    return positions, {"rows": rows}


def hidden(runner: Any, step: Any) -> Tensor:
    """Hidden states [T, E] of such a step, by the runner's C++ decoder where there is nothing to
    add between its layers."""
    model, context = runner.model, runner.context(step)
    positions, seen = read_by(model, step)
    rows = seen["rows"]
    if runner.decoder is None or context.native is None or (rows is not None and rows.deep):
        found: Tensor = model(step.ids_T, positions, context, **seen)
        return found
    embedded = model.embed(step.ids_T)
    if rows is not None:
        embedded = embedded.index_copy(0, rows.places_P, rows.features_PE)
    cos, sin = model.rope_of(positions)
    decoded: Tensor = runner.decoder.run(embedded, cos, sin, *context.native)
    return decoded


def check_pictures(model: Any, ids: Sequence[int], params: SamplingParams) -> None:
    """`ValueError` for pictures that the model cannot see, or that are not where its placeholders
    are."""
    if getattr(model, "sight", None) is None:
        raise ValueError(
            f"images: {len(params.images)} in the prompt, and this model reads text alone; take a "
            "model with a vision tower"
        )
    check_spans(ids, [0] * len(ids), params.images)
    placeholder, merge = model.config.image_token_id, model.config.vision.spatial_merge_size
    for span in params.images:
        rows, columns = merged_grid(span)
        if span.grid[1:] != (rows * merge, columns * merge):
            raise ValueError(
                f"images: the picture at token {span.start} has {span.length} tokens, and a grid "
                f"{span.grid} of patches, of which this model merges {merge} x {merge}"
            )
        if ids[span.start] != placeholder:
            raise ValueError(
                f"images: the picture at token {span.start} covers token {ids[span.start]}; the "
                f"model's placeholder is {placeholder}"
            )
