"""Sight: what the pictures of a sequence are for a model, in rollouts and in training.

    model.sight = Sight(model, pixels)              # pixels: who has them by a span
    rows = model.sight.rows(placed)                 # while rolling out: kept by (key, weights)
    rows = model.sight.look(spans)                  # while training (seen_samples.py)

The tower runs once for each distinct picture: of a micro-batch where it is trained, and else (in
rollouts, for whoever scores, where it is frozen) of all the time until its weights change, by their
checksums: an update that leaves the tower as it was leaves what was seen. A picture's rows are a
function of its pixels and the weights alone, whatever else is in the pass (tower.py), so all have
the same bits.

Left out: towers that are trained on one rank and frozen on another; videos.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.transport.checksum import checksums
from nanoengine.spans import ImageSpan
from nanoengine.vision.seeing_transformer import ImageRows, SeeingTransformer
from nanoengine.vision.tower import PictureRows

KEPT_BYTES = 256 << 20
"""Of rows that are kept for later, at most."""
PASS_PATCHES = 1024
"""That go through the tower at once on a CPU where no graph is kept: enough rows for a product to
be fast, and few enough that what a block makes of them stays in the processor's cache."""


class Pixels(Protocol):
    """Has the pixels of pictures."""

    def values(self, span: ImageSpan) -> Tensor:
        """Normalised patches of the span's picture in fp32, [P, C], in the order of the tower.
        `KeyError` names a picture that there is not."""
        ...


@dataclass(frozen=True)
class Placed:
    """Some of a picture's rows in a flat run of tokens: those from `first` on, `count` of them, at
    the rows from `row` on."""

    span: ImageSpan
    first: int
    row: int
    count: int


class Sight:
    """The pictures that a model has seen under its present weights, at most `max_bytes` of rows."""

    def __init__(
        self, model: SeeingTransformer, pixels: Pixels, max_bytes: int = KEPT_BYTES
    ) -> None:
        self.num_looks = 0
        """Pictures that went through the tower."""
        self._model, self._pixels, self._max_bytes = model, pixels, max_bytes
        self._kept: OrderedDict[str, PictureRows] = OrderedDict()
        self._num_bytes = 0
        self._num_repacks = -1  # of the model, as it was looked at last
        self._checksums: list[int] = []  # of the tower's weights, as what is kept was made

    def of(self, model: SeeingTransformer) -> Sight:
        """The same pictures, for another model."""
        return Sight(model, self._pixels, self._max_bytes)

    @torch.inference_mode()
    def rows(self, placed: Sequence[Placed]) -> ImageRows:
        """The features that the rows of a step read. A picture that was seen under these weights is
        not looked at again."""
        return _placed_rows(self._seen([one.span for one in placed]), placed)

    def look(self, spans: Sequence[ImageSpan], *, checkpointing: bool = False) -> PictureRows:
        """The rows of different pictures, one after the other: with gradients where they are on and
        something of the tower is trained, else what was seen under these weights."""
        if torch.is_grad_enabled() and self._is_trained():
            return self._run(spans, checkpointing)
        with torch.inference_mode():
            found = self._seen(spans)
            return _joined([found[span.key] for span in spans])

    def forget(self) -> None:
        """The weights have changed, or memory is wanted."""
        self._kept.clear()
        self._num_bytes = 0

    def _is_trained(self) -> bool:
        return any(one.requires_grad for one in self._model.visual.parameters())

    def _run(self, spans: Sequence[ImageSpan], checkpointing: bool = False) -> PictureRows:
        self.num_looks += len(spans)
        pixels_PC = torch.cat([self._pixels.values(span) for span in spans])
        grids = [span.grid for span in spans]
        device = self._model.device
        return self._model.visual(
            pixels_PC.to(device), grids, activation_checkpointing=checkpointing
        )

    def _seen(self, asked: Iterable[ImageSpan]) -> dict[str, PictureRows]:
        """The rows by key, of pictures that may come several times."""
        self._follow()
        spans = {span.key: span for span in asked}
        new = [span for key, span in spans.items() if key not in self._kept]
        found = {key: self._kept[key] for key in spans if key in self._kept}
        if new:
            found |= self._parted(new)
        for key in spans:  # only now: what is over the limit goes
            self._keep(key, found[key])
        return found

    def _follow(self) -> None:
        """Forget what was seen under other weights of the tower."""
        if self._num_repacks == self._model.num_repacks:
            return
        self._num_repacks = self._model.num_repacks
        found = checksums(list(self._model.visual.parameters()))
        if found != self._checksums:
            self.forget()
            self._checksums = found

    def _parted(self, spans: Sequence[ImageSpan]) -> dict[str, PictureRows]:
        found: dict[str, PictureRows] = {}
        for some in _passes(spans) if self._model.device.type == "cpu" else [spans]:
            rows = self._run(some)
            sizes = [span.length for span in some]
            features = rows.features_TE.split(sizes)
            deep = [layer.split(sizes) for layer in rows.deep]
            for i, span in enumerate(some):
                found[span.key] = PictureRows(features[i], tuple(layer[i] for layer in deep))
        return found

    def _keep(self, key: str, rows: PictureRows) -> None:
        if key not in self._kept:
            self._kept[key] = rows
            self._num_bytes += _num_bytes(rows)
        self._kept.move_to_end(key)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])


def _passes(spans: Sequence[ImageSpan]) -> list[list[ImageSpan]]:
    """Pictures in runs of at most `PASS_PATCHES`; a larger one is alone."""
    passes: list[list[ImageSpan]] = []
    room = 0
    for span in spans:
        _, height, width = span.grid
        room -= height * width
        if room < 0:
            passes.append([])
            room = PASS_PATCHES - height * width
        passes[-1].append(span)
    return passes


def _placed_rows(found: dict[str, PictureRows], placed: Iterable[Placed]) -> ImageRows:
    places, features, deep = [], [], []
    for one in placed:
        rows = found[one.span.key]
        part = slice(one.first, one.first + one.count)
        places.append(torch.arange(one.row, one.row + one.count))
        features.append(rows.features_TE[part])
        deep.append([layer[part] for layer in rows.deep])
    device = features[0].device
    return ImageRows(
        torch.cat(places).to(device),
        torch.cat(features),
        tuple(torch.cat(layers) for layers in zip(*deep, strict=True)),
    )


def _joined(parts: Sequence[PictureRows]) -> PictureRows:
    """Pictures' rows, one after the other."""
    deep = zip(*(part.deep for part in parts), strict=True)
    features_TE = torch.cat([part.features_TE for part in parts])
    return PictureRows(features_TE, tuple(torch.cat(layers) for layers in deep))


def _num_bytes(rows: PictureRows) -> int:
    return sum(one.numel() * one.element_size() for one in (rows.features_TE, *rows.deep))
