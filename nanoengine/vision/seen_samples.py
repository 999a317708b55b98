"""The pictures of a micro-batch: what its rows read in training, and where they stand.

The micro-batch has placeholders as tokens and the spans of each sample; from these follow, for its
rows, three positions, and which of the tower's rows each reads. In a tree of samples a row is one
picture's, whoever shares it, because rows are shared by content ids (nanoengine/spans.py).
Nobody looks at a picture here: the model does, in its forward pass.
"""

from __future__ import annotations

from itertools import accumulate, count

import numpy as np
import torch
from torch import Tensor

from nanoengine.packing import MicroBatch
from nanoengine.vision.rope_positions import rope_positions
from nanoengine.vision.seeing_transformer import PicturePlaces, SeeingTransformer


def seen_in(model: SeeingTransformer, micro: MicroBatch) -> tuple[Tensor, PicturePlaces]:
    """The positions of a micro-batch's rows, [N, 3] or [N], and what those of pictures read: every
    distinct picture goes through the tower once, and its gradients of all places add up.
    `ValueError` for a model that reads text alone."""
    if getattr(model, "sight", None) is None:
        raise ValueError(
            "a sample has pictures, and the model reads text alone, or nobody gave it the pictures"
        )
    assert micro.images is not None, "the caller looked"
    spans = {span.key: span for images in micro.images for span in images}
    sizes = [span.length for span in spans.values()]
    starts = dict(zip(spans, accumulate(sizes, initial=0), strict=False))
    positions, has_axes = micro.positions_N.numpy(force=True), model.rope_axes is not None
    if has_axes:
        positions = np.repeat(positions[:, None], 3, axis=1)
    taken: dict[int, int] = {}  # by row, which several samples may share: the tower's row
    for i, images in enumerate(micro.images):
        path = _path(micro, i)
        if has_axes:
            positions[path] = rope_positions(0, len(path), images)
        for span in images:
            rows = path[span.start : span.end].tolist()
            taken |= zip(rows, count(starts[span.key]))
    device = micro.positions_N.device
    # by dtype: of a picture whose only token is the last, which nobody reads, there are none
    places, chosen = (
        torch.tensor(list(rows), dtype=torch.int64, device=device)
        for rows in (taken.keys(), taken.values())
    )
    read = PicturePlaces(tuple(spans.values()), places, chosen)
    return torch.from_numpy(positions).to(device), read


def _path(micro: MicroBatch, i: int) -> np.ndarray:
    """The rows that the model reads of the i-th sample of a micro-batch, in order."""
    begin, end = micro.starts[i], micro.starts[i + 1]
    if micro.rows_T is None:
        return np.arange(begin, end)
    return micro.rows_T[begin:end].numpy(force=True)
