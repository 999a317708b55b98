"""What one request does to its logits before sampling: penalties, bias, allowed tokens, grammar.

Everything is a function of the request's own tokens, so a token still depends on (logits, seed,
position) and its request alone, whatever runs beside it and however often it was preempted.
The penalties are those of Keskar et al. 2019 (repetition) and of the OpenAI API (presence,
frequency). Left out: bans of phrases, temperature schedules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.grammar import Matcher
from nanoinfer.sampling import SamplingParams


class LogitEdits:
    """Of one request. `ids` is the request's own growing list, prompt first."""

    def __init__(
        self, ids: list[int], num_prompt: int, params: SamplingParams, matcher: Matcher | None
    ) -> None:
        self.matcher = matcher
        self._ids = ids
        self._num_prompt = num_prompt
        self._params = params
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self._allowed = torch.tensor(sorted(set(params.allowed_token_ids)))

    def apply(self, z_V: Tensor) -> None:
        """Change fp32 logits in place."""
        params = self._params
        if params.repetition_penalty != 1:
            seen = torch.tensor(self._ids).unique()
            z = z_V[seen]
            z_V[seen] = torch.where(
                z > 0, z / params.repetition_penalty, z * params.repetition_penalty
            )
        sampled = self._ids[self._num_prompt :]
        if sampled and (params.presence_penalty or params.frequency_penalty):
            seen, counts = torch.tensor(sampled).unique(return_counts=True)
            z_V[seen] -= params.presence_penalty + params.frequency_penalty * counts
        if len(self._bias_ids):
            z_V[self._bias_ids] += self._bias
        if self._allowed is not None:
            kept = z_V[self._allowed]
            z_V.fill_(-torch.inf)
            z_V[self._allowed] = kept
        elif self.matcher is not None:
            z_V.masked_fill_(~self.matcher.allowed(), -torch.inf)
