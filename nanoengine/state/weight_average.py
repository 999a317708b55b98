"""An average over time of the weights that an engine trains, in its masters' width.

    θ̄ ← (1 − α)·θ̄ + α·θ          after each optimizer step; α is the rate

It begins as the weights are. Each rank keeps it of the masters that it owns, so a layout splits it
as it splits those: one number a parameter more, and no second model. To say how likely tokens are
by it, the average and the masters change places for a while, and back, bit for bit.

Left out: parking it where the optimizer's memory is lent (it stays on the device).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanoengine.parallel.parameter_record import record_of
from nanoengine.state.engine_state import AVERAGE
from nanoengine.state.kept_adamw import AdamW
from nanoengine.state.slices import Held, cut_parameter


class WeightAverage:
    """Follows the masters of `optimizer`."""

    def __init__(self, optimizer: AdamW, rate: float) -> None:
        self.rate = rate
        self._optimizer = optimizer
        self._held = [(entry, values.clone()) for entry, values in optimizer.entries("master")]

    @torch.no_grad()
    def follow(self, rate: float | None = None) -> None:
        """Go a step towards the masters; of rate 1 become what they are."""
        rate = self.rate if rate is None else rate
        masters = self._optimizer.entries("master")
        for (_, mean), (_, values) in zip(self._held, masters, strict=True):
            mean.lerp_(values, rate)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the masters and the weights are the average; whoever computes with prepacked
        copies brings them up to date after entering and after leaving."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        masters = self._optimizer.entries("master")
        for (_, mean), (_, values) in zip(self._held, masters, strict=True):
            kept = values.clone()
            values.copy_(mean)
            mean.copy_(kept)
        self._optimizer.write_back()

    def pieces(self) -> Held:
        """The part of this rank, under the names of the whole model's parameters."""
        found: Held = []
        for entry, mean in self._held:
            parameter = entry.slot.param
            part = record_of(parameter).slice
            name = AVERAGE + entry.slot.name
            found += cut_parameter(name, parameter.shape, part, mean, entry.lo)
        return found
