"""A policy: whoever says how likely the tokens of samples are; and one that nobody trains.

    reference = Scorer(load_model("path/to/a/hugging-face-folder"))
    logps = reference.forward_logprobs(samples)

Left out: how a micro-batch is read (scoring.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.heads.top_tokens import likeliest
from nanoengine.packing import Sample, TopTokens, collect_all
from nanoengine.scoring import PassScorer


class Policy(Protocol):
    """Whoever scores samples: an `Engine`, one over a pipeline, or a `Scorer` alone."""

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """For each sample a log-prob of each token given those before it; the first has 0."""
        ...

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """For each sample the k likeliest tokens at each place where its loss mask is not 0."""
        ...


class Scorer(PassScorer):
    """A policy that nobody trains: a reference, a teacher."""

    @torch.no_grad()
    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """Score as `Engine.forward_logprobs` does; 0 where the loss mask of a sample is 0."""
        micros = self.micro_batches(samples)
        scored = [self.logprobs(micro, temperature, only_masked=True).logp_T for micro in micros]
        return collect_all(samples, micros, scored)

    @torch.no_grad()
    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """The k likeliest tokens at each place where the loss mask of a sample is not 0."""
        micros = self.micro_batches(samples)
        return likeliest(self, samples, micros, k, temperature)
