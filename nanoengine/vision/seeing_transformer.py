"""A decoder with a vision tower beside it: what a picture's tokens read, and where they stand.

The decoder is that of a text model and runs as one, bit for bit, where there are no pictures. A
picture changes three things, none of them inside a layer: its rows take the place of embeddings; in
some families its tokens have three positions (time, row, column), so that the rope's rows are put
together pair by pair; and, with DeepStack, further rows are added to the residual stream after the
first layers.

Whoever rolls out keeps what the tower saw, and gives its rows. In training the tower runs in the
forward pass, before the layers, so that what a mesh arranges around that pass (zero.py,
pipeline.py) holds for it too.

Left out: where the pictures are in a sequence, which the callers know.
Shapes: T tokens, P tokens of pictures among them, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanoengine.model.attention import AttentionContext
from nanoengine.model.layers import Rope
from nanoengine.model.linear import TensorSplit
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.parameter_record import record_of
from nanoengine.spans import ImageSpan
from nanoengine.vision.seeing_config import SeeingConfig
from nanoengine.vision.tower import PictureRows, Tower


@dataclass(frozen=True)
class ImageRows:
    """The rows that tokens of pictures, in a flat run of tokens, read instead of embeddings."""

    places_P: Tensor
    """Their indices in the run, int64; none twice."""
    features_PE: Tensor
    deep: tuple[Tensor, ...] = ()
    """[P, E] each: added after layer 0, layer 1 and so on."""

    def held_by(self, split: TensorSplit, num_rows: int) -> ImageRows:
        """Keep what this rank reads where ranks share the rows of a run out."""
        if not split.sequence_parallel:
            return self
        first, end = own_share(split, num_rows)
        is_here = (self.places_P >= first) & (self.places_P < end)
        deep = tuple(one[is_here] for one in self.deep)
        return ImageRows(self.places_P[is_here] - first, self.features_PE[is_here], deep)


@dataclass(frozen=True)
class PicturePlaces:
    """Different pictures that the tower is still to look at, and the rows of a flat run of tokens
    that will read what it sees."""

    spans: tuple[ImageSpan, ...]
    places_P: Tensor
    """Indices in the run, int64; none twice."""
    chosen_P: Tensor
    """Of each the row that it reads, among those of all `spans` one after the other, int64."""

    @property
    def num_seen(self) -> int:
        """Rows of the tower, of all `spans`."""
        return sum(span.length for span in self.spans)

    def held(self, rows_N: Tensor, num_rows: int) -> PicturePlaces:
        """Keep what a rank reads that holds the rows `rows_N` of a run of `num_rows`, in that
        order: a picture of which none of them reads is gone."""
        rows_N = rows_N.to(self.places_P.device)
        where_T = rows_N.new_full((num_rows,), -1)
        where_T[rows_N] = torch.arange(len(rows_N), device=rows_N.device)
        places_P = where_T[self.places_P]
        is_here = places_P >= 0
        chosen_P = self.chosen_P[is_here]
        sizes = chosen_P.new_tensor([span.length for span in self.spans])
        numbers = torch.arange(len(sizes), device=sizes.device)
        picture_P = numbers.repeat_interleave(sizes)[chosen_P]
        kept = picture_P.unique()  # in order
        moved = torch.zeros_like(sizes)  # the first row of each, among those of the kept ones
        moved[kept] = sizes[kept].cumsum(0) - sizes[kept]
        chosen_P = chosen_P + (moved - (sizes.cumsum(0) - sizes))[picture_P]
        spans = tuple(self.spans[i] for i in kept.tolist())
        return PicturePlaces(spans, places_P[is_here], chosen_P)

    def held_by(self, split: TensorSplit, num_rows: int) -> PicturePlaces:
        """Keep what this rank reads where ranks share the rows of a run out."""
        if not split.sequence_parallel:
            return self
        held = torch.arange(*own_share(split, num_rows), device=self.places_P.device)
        return self.held(held, num_rows)

    def rows(self, seen: PictureRows) -> ImageRows:
        """Take what the rows read from what the tower saw."""
        features, *deep = (x.index_select(0, self.chosen_P) for x in (seen.features_TE, *seen.deep))
        return ImageRows(self.places_P, features, tuple(deep))


class SeeingModel(Transformer):
    """All that a model that sees and the stages of one have in common."""

    adamw = "nanoengine.vision.tower_adamw:TowerAdamW"
    """What trains one on one rank."""
    sharded_adamw = "nanoengine.vision.sharded_tower_adamw:ShardedTowerAdamW"
    """And on several."""
    visual: Tower | None
    """None on a stage of a pipeline that is not the first."""
    sight: Any
    """What it has seen, and who has the pixels (sight.py); None: nobody gave it pictures."""
    rope_axes: Tensor | None
    """None for a plain rope, whose positions are one number."""

    def _add_tower(self, config: SeeingConfig, *, is_here: bool) -> None:
        dtype, device = self.dtype, str(self.device)
        self.visual = Tower(config.vision, dtype, device) if is_here else None
        if self.visual is not None:
            mark_tower(self.visual, self.split)
        self.sight = None
        # no buffer: those are floats, and trainers widen them
        self.rope_axes = None
        if config.mrope_section is not None:
            self.rope_axes = rope_axes(config.mrope_section, config.rope_axes).to(device)

    def rope_of(self, positions_T: Tensor) -> Rope:
        """The rows of the rope tables that the layers read, for positions [T], or [T, 3] of time,
        row and column."""
        if positions_T.dim() == 1 or self.rope_axes is None:
            return super().rope_of(positions_T)
        return tuple(
            getattr(self, name).gather(0, positions_T[:, self.rope_axes]) for name in self._ropes
        )


class SeeingTransformer(SeeingModel):
    """A model of a family with a tower. `config` says the shapes of both; all other arguments are
    `Transformer`'s."""

    visual: Tower

    def __init__(
        self,
        config: SeeingConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **parts: Any,
    ) -> None:
        super().__init__(config, dtype, device, **parts)
        self._add_tower(config, is_here=True)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: AttentionContext,
        *,
        rows: ImageRows | PicturePlaces | None = None,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """Hidden states [T, E] after the final norm, as of `Transformer`; `rows` are what the
        tokens of pictures read, or will once the tower has looked at them, which it does now."""
        if rows is not None:
            rows = rows.held_by(self.split, len(ids_T))
        if isinstance(rows, PicturePlaces):
            rows = self._look(rows, activation_checkpointing)
        if rows is None:
            return super().forward(
                ids_T, positions_T, context, activation_checkpointing=activation_checkpointing
            )
        x_TE = self.embed(ids_T).index_copy(0, rows.places_P, rows.features_PE)
        read = (self.rope_of(positions_T), context, activation_checkpointing)
        x_TE, residual_TE = run_layers(self.layers, x_TE, (rows.places_P, rows.deep), *read)
        return self._finish(x_TE, residual_TE, ids_T.shape[0])

    def _look(self, rows: PicturePlaces, activation_checkpointing: bool) -> ImageRows | None:
        """Look for the rows; None where none of them is a picture's."""
        if not rows.spans:
            return None
        return rows.rows(self.sight.look(rows.spans, checkpointing=activation_checkpointing))


def run_layers(
    layers: Iterable[nn.Module],
    x_TE: Tensor,
    deep: tuple[Tensor, Sequence[Tensor]],
    rope: Rope,
    context: AttentionContext,
    activation_checkpointing: bool,
) -> tuple[Tensor, Tensor]:
    """Run some layers as a `Transformer` does; `deep` is the places [P] of rows, and what is added
    to them after the first layers, [P, E] each."""
    places_P, rows = deep
    residual_TE: Tensor | None = None
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    recomputes = activation_checkpointing and torch.is_grad_enabled()
    for index, layer in enumerate(layers):
        run = partial(again, layer) if recomputes else layer
        x_TE, residual_TE = run(x_TE, residual_TE, rope, context)
        if index < len(rows):
            # rounded before the rows are added, as in transformers; the next norm adds them
            residual_TE = residual_TE + x_TE
            x_TE = torch.zeros_like(x_TE).index_copy(0, places_P, rows[index])
    assert residual_TE is not None, "there is at least one layer"
    return x_TE, residual_TE


def own_share(split: TensorSplit, num_rows: int) -> tuple[int, int]:
    """The first and the end of the rows of a run that this rank has where they are shared out."""
    share = -(-num_rows // split.size)
    first = min(split.rank * share, num_rows)
    return first, min(first + share, num_rows)


def mark_tower(tower: Tower, split: TensorSplit) -> None:
    """Note what is known of its parameters (parallel/parameter_record.py).

    Each tensor-parallel rank has all of the tower. Where each has all rows too, each finds the
    whole gradient. Where they share rows out, each looks at the pictures of its rows, and finds a
    term of the gradient.
    Nobody waits for it within a pass: on a rank without pictures none comes, and what comes last
    elsewhere would hold up the gradients of layers."""
    for parameter in tower.parameters():
        record_of(parameter).is_deferred = True
        record_of(parameter).is_partial = split.sequence_parallel


def rope_axes(sections: tuple[int, int, int], order: str = "interleaved") -> Tensor:
    """The position that each pair of a head turns by, [D / 2] of 0 (time), 1 (row) and 2 (column).
    Interleaved: time, row, column and again, until the sections of rows and columns are full.
    `sections`: one after the other."""
    if order == "sections":
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
