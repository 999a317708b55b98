"""AdamW of a model with a vision tower: what of the tower is trained, how fast, and when.

    all      the whole tower                merger   what makes tokens of patches, and no block
    none     a frozen tower: it has no gradient, no moments and no decay, and never moves by a bit

A batch of text alone says nothing about the tower, whose gradient is then missing and not small.
So the tower rests in such a step, as parameters without a gradient do in `torch.optim.AdamW`: no
decay, no drift by old momentum, and its own count of steps corrects the bias of its moments.
Otherwise a long phase of text would decay a tower towards zero that nobody looked through.

Left out: rates of their own for blocks and mergers; several ranks (sharded_tower_adamw.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanoengine.config import EngineConfig, VisionTrain
from nanoengine.optim import Flats, clip_factor, lr_at, update
from nanoengine.state.kept_adamw import AdamW
from nanoengine.vision.tower import Tower

_TOWER = "visual."


class TowerAdamW(AdamW):
    """The decoder's parameters as of `AdamW`, and the tower's that `config.vision_train` names, at
    `config.vision_lr`. The gradients of both are clipped by their common norm."""

    config: EngineConfig

    def __init__(
        self,
        models: Sequence[nn.Module],
        config: EngineConfig,
        *mesh: Any,
        dtype: torch.dtype | None = None,
        **shares: Any,
    ) -> None:
        """Freezes the rest of the tower, which becomes `dtype` as what is trained does. A `mesh`
        and its `shares` are for the optimizer of several ranks."""
        self.tower_steps = 0
        """Updates of batches that showed a picture."""
        for model in models:
            tower: Any = model.visual
            if tower is not None:  # a pipeline has it on one stage
                freeze(tower, config.vision_train, dtype)
        super().__init__(models, config, *mesh, dtype=dtype, **shares)
        self._tower_decayed = [self._take(self._decayed, i, 0) for i in range(len(self.states))]
        self._tower_spared = [
            self._take(self._spared, i, state.bucket.num_decayed)
            for i, state in enumerate(self.states)
        ]

    def _take(self, halves: list[Flats], i: int, begin: int) -> Flats:
        """Cut the tower off the i-th half, which begins at that element of this rank's share."""
        end, bucket = begin + len(halves[i].grad), self.buckets[i]
        names: dict[int, str] = {}  # of what lies in the half, in order, by where it begins
        for slot in bucket.slots:
            first = max(slot.offset - bucket.begin, 0)
            stop = slot.offset + slot.param.numel() - bucket.begin
            if begin <= first < min(stop, end):
                names[first] = slot.name
        starts = [first for first, name in names.items() if name.startswith(_TOWER)]
        start = min(starts, default=end)
        assert len(starts) == sum(first >= start for first in names), "a tower comes last"
        whole, cut = halves[i], start - begin
        halves[i] = whole.cut(0, cut)
        return whole.cut(cut)

    def tower_lr(self) -> float:
        """The tower's learning rate of the next update."""
        own = self.config.vision_lr
        config = self.config if own is None else replace(self.config, lr=own)
        return lr_at(config, self.step_count - self.phase_start)

    def step(self, grad_norm: float) -> None:
        """As of `FlatAdamW`; the tower rests where it has no gradient at all."""
        if self._is_shown():
            self.tower_steps += 1
            lr, scale = self.tower_lr(), clip_factor(self.config, grad_norm)
            for half, decay in (
                (self._tower_decayed, self.config.weight_decay),
                (self._tower_spared, 0.0),
            ):
                update(half, self.config, self.tower_steps, lr, decay, scale)
        super().step(grad_norm)  # which also rounds what was updated here

    def _is_shown(self) -> bool:
        """Say whether the batch showed a picture."""
        parts = (*self._tower_decayed, *self._tower_spared)
        return any(bool(part.grad.any()) for part in parts)

    def counts(self) -> dict[str, int]:
        return super().counts() | {"tower_steps": self.tower_steps}

    def recount(self, counts: Mapping[str, Any]) -> None:
        super().recount(counts)
        # of checkpoints that did not count them: pictures were shown in every step
        self.tower_steps = counts.get("tower_steps", counts["step_count"])


def freeze(tower: Tower, train: VisionTrain, dtype: torch.dtype | None = None) -> None:
    """Let those of the tower's parameters have gradients that are trained. The others become
    `dtype`, if one is given."""
    trained = {id(one) for one in _trained(tower, train)}
    for one in tower.parameters():
        one.requires_grad_(id(one) in trained)
        if not one.requires_grad and dtype is not None:
            one.data = one.data.to(dtype)


def _trained(tower: Tower, train: VisionTrain) -> Iterable[nn.Parameter]:
    if train == "all":
        return tower.parameters()
    if train == "merger":
        return [*tower.merger.parameters(), *tower.deep_mergers.parameters()]
    return []
