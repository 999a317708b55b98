"""AdamW with what lies between its steps: phases, elements by parameter, memory that is lent.

Left out: the step (optim.py), what is kept while memory is lent (parked.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor

from nanoengine.config import AdamWConfig
from nanoengine.flat import BucketState
from nanoengine.optim import FlatAdamW

Kind = Literal["master", "exp_avg", "exp_avg_sq", "grad"]

_ENTRIES = "nanoengine.parallel.shards:entries"
_PARKED = "nanoengine.state.parked:Parked"


class AdamW(FlatAdamW):
    """The optimizer of engines: it may start another phase, and give its memory away."""

    def restart(self, config: AdamWConfig) -> None:
        """Another phase of training: its own schedule and no momentum, but the second moments stay.

        With fresh second moments the first updates are the sign of a noisy gradient, at the full
        rate in every weight. The scale of the phase before is a better guess, and is forgotten at
        beta2's pace.
        """
        self._require_loaded()
        self.config = config
        self.phase_start = self.step_count
        self.exp_avg.zero_()

    def counts(self) -> dict[str, int]:
        """What a checkpoint says of the steps so far."""
        return {"step_count": self.step_count}

    def recount(self, counts: Mapping[str, Any]) -> None:
        """Go on from what `counts` gave."""
        self.step_count = counts["step_count"]

    def read_weights(self) -> None:
        """Take the parameters as the new masters, after somebody else wrote to them. Where
        parameters come and go (ZeRO-3) call it inside `gathered`."""
        self._require_loaded()
        for state in self.states:
            _read(state)

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, the whole parameters are here; in one process they always are."""
        return nullcontext()

    def release(self) -> None:
        """Free the parameters of other ranks, after each forward or training step."""

    def entries(self, kind: Kind) -> Iterator[tuple[Any, Tensor]]:
        """Yield what this rank owns: elements lo:hi of each (flattened) parameter, as a
        `parallel.shards.ShardEntry`, with their values, 1-d. Writing to the values before the next
        ones are taken restores them; then `write_back`."""
        self._require_loaded()
        found: Iterator[tuple[Any, Tensor]] = resolve_name(_ENTRIES)(self.states, kind)
        return found

    def offload(self, folder: Path | str | None = None) -> None:
        """Free the gradients and park moments and separate masters until `reload`: from a GPU in
        host memory, from a CPU in a temporary file in `folder`. A second call does nothing."""
        if self._parked is None:
            self._parked = resolve_name(_PARKED)(self, folder)

    def reload(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        self._plans = []  # the buffers may lie elsewhere now


@torch.no_grad()
def _read(state: BucketState) -> None:
    """Take the weights as the new masters."""
    if state.is_apart:
        state.master.copy_(state.shard)
    if state.remainder is not None:
        state.remainder.zero_()
