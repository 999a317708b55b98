"""Several references as one `Policy`: a weighted mean of teachers' log-probs, or a teacher for each
kind of task (reference_names.py says how they are named).

The mean of log-probs is not normalised again: of a sampled token nobody knows the sum over all
others, and a constant of the place moves no gradient that is summed over what the policy may say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.packing import Sample, TopTokens
from nanoengine.scoring import Policy
from nanorl.reference_names import MIXED, ReferenceName, shares_of


class References:
    """A `Policy` of several: each sample is scored by those that are asked about its kind."""

    def __init__(self, names: Sequence[ReferenceName], policies: Sequence[Policy]) -> None:
        self._names, self._policies = names, policies

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """The weighted mean of their log-probs of each token."""
        shares = [shares_of(sample.kind, self._names) for sample in samples]
        found = [torch.zeros(len(sample.tokens)) for sample in samples]
        for i, policy in enumerate(self._policies):
            asked = [place for place, share in enumerate(shares) if share[i] > 0]
            if asked:
                given = [samples[place] for place in asked]
                scored = policy.forward_logprobs(given, temperature=temperature)
                for place, values in zip(asked, scored, strict=True):
                    found[place] = found[place] + shares[place][i] * values.cpu()
        return found

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """The likeliest tokens of the one teacher of each sample. ValueError where several are
        mixed: their likeliest tokens are not the same ones."""
        shares = [shares_of(sample.kind, self._names) for sample in samples]
        found: dict[int, TopTokens] = {}
        for i, policy in enumerate(self._policies):
            asked = [place for place, share in enumerate(shares) if share[i] > 0]
            if any(shares[place][i] < 1 for place in asked):
                raise ValueError(MIXED)
            if asked:
                tops = policy.forward_top(
                    [samples[place] for place in asked], k, temperature=temperature
                )
                found |= zip(asked, tops, strict=True)
        return [found[place] for place in range(len(samples))]
