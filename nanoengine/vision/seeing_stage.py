"""One stage of a pipeline whose model sees (parallel/stage.py).

The first stage has the tower, which looks within its forward pass, micro-batch by micro-batch.
Positions and the places of pictures follow from the samples, which every stage is given. With
DeepStack the rows of later layers travel with the stream, below it in one tensor: each picture's
once, however many tokens read it, and only those that a stage further on adds. Their gradients
come back the same way.

    stage 0: tower, layers 0, 1   stream [T, E] | rows of layer 2 [S, E]   ──►   stage 1: layer 2

Shapes: T rows of the stream, S rows of the tower, E hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from nanoengine.model.attention import AttentionContext
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.stage import Stage
from nanoengine.vision.seeing_config import SeeingConfig
from nanoengine.vision.seeing_transformer import PicturePlaces, SeeingModel, run_layers


class SeeingStage(SeeingModel, Stage):
    """A `Stage` of a model of a family with a tower."""

    def __init__(self, config: SeeingConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._add_tower(config, is_here=self.is_first)
        self._num_deep = len(config.vision.deepstack_visual_indexes)

    @classmethod
    def of_one_layer(cls, config: ModelConfig) -> ModelConfig:
        """As of `Stage`; one layer has no place for what several mergers feed."""
        assert isinstance(config, SeeingConfig), "a model that sees"
        vision = dataclasses.replace(config.vision, deepstack_visual_indexes=())
        return super().of_one_layer(dataclasses.replace(config, vision=vision))

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        context: AttentionContext,
        *,
        x_TE: Tensor | None = None,
        rows: PicturePlaces | None = None,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """As of `Stage`; with `rows`, what a stage gives and takes has those of DeepStack below
        the stream."""
        if rows is None:
            return super().forward(
                ids_T,
                positions_T,
                context,
                x_TE=x_TE,
                activation_checkpointing=activation_checkpointing,
            )
        rows = rows.held_by(self.split, len(ids_T))
        if x_TE is None:
            x_TE, deep = self._look(ids_T, rows, activation_checkpointing)
        else:
            x_TE, deep = self._take_apart(x_TE, rows)
        read = (rows.places_P, [one.index_select(0, rows.chosen_P) for one in deep])
        layers = [self.layers[i] for i in self._held]
        rope = self.rope_of(positions_T)
        x_TE, residual_TE = run_layers(layers, x_TE, read, rope, context, activation_checkpointing)
        if self.is_last:
            return self._finish(x_TE, residual_TE, ids_T.shape[0])
        return torch.cat([residual_TE + x_TE, *deep[len(layers) :]])

    def boundary_of(self, rows: PicturePlaces, num_rows: int, *, is_output: bool) -> Tensor:
        """An empty tensor for what this stage takes or, with `is_output`, gives, for a micro-batch
        of so many rows."""
        first = self._held.stop if is_output else self._held.start
        rows = rows.held_by(self.split, num_rows)
        return self.boundary(num_rows, max(self._num_deep - first, 0) * rows.num_seen)

    def _look(
        self, ids_T: Tensor, rows: PicturePlaces, activation_checkpointing: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Make what the first layer reads, and the tower's rows for the layers behind it."""
        if not rows.spans:
            return self.embed(ids_T), []
        seen = self.sight.look(rows.spans, checkpointing=activation_checkpointing)
        features_PE = seen.features_TE.index_select(0, rows.chosen_P)
        return self.embed(ids_T).index_copy(0, rows.places_P, features_PE), list(seen.deep)

    def _take_apart(self, x_TE: Tensor, rows: PicturePlaces) -> tuple[Tensor, list[Tensor]]:
        """Part the stream, and the rows of each layer from this stage's first on."""
        num_layers = max(self._num_deep - self._held.start, 0) if rows.spans else 0
        num_more = num_layers * rows.num_seen
        stream_TE, *deep = x_TE.split([len(x_TE) - num_more, *[rows.num_seen] * num_layers])
        return stream_TE, deep
