"""The teacher whose weights are an average of the policy's over time, as the papers of SDFT
(arXiv 2601.19897) and SDPO (arXiv 2601.20802) have it.

The average lives where the weights are trained (nanoengine/state/weight_average.py): it follows
after each optimizer step, goes into checkpoints, and is split as the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nanoengine.packing import Sample, TopTokens


class AveragingEngine(Protocol):
    """An engine that keeps an average of its weights."""

    def average_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]: ...

    def average_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]: ...


class AveragedTeacher:
    """A `Policy` that says what the average of `engine` says."""

    def __init__(self, engine: AveragingEngine) -> None:
        self._engine = engine

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        return self._engine.average_logprobs(samples, temperature=temperature)

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        return self._engine.average_top(samples, k, temperature=temperature)
