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
        self.bias = (  # token ids, and what is added to their logits
            torch.tensor(list(params.logit_bias), dtype=torch.int64),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float32),
        )
        self._allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self._allowed = torch.tensor(sorted(set(params.allowed_token_ids)))

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency, presence; neutral at 1, 0 and 0."""
        params = self._params
        return params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    @property
    def has_penalties(self) -> bool:
        return self.penalties != (1, 0, 0)

    def output_counts(self) -> tuple[Tensor, Tensor]:
        """Token ids that were sampled so far, and how often (int32)."""
        ids, counts = torch.tensor(self._ids[self._num_prompt :], dtype=torch.int64).unique(
            return_counts=True
        )
        return ids, counts.int()

    def prompt_mask(self) -> tuple[Tensor, Tensor]:
        """Token ids of the prompt, and True for each."""
        ids = torch.tensor(self._ids[: self._num_prompt]).unique()
        return ids, torch.ones(len(ids), dtype=torch.bool)

    def allowed(self, vocab: int) -> Tensor | None:
        """Boolean [vocab] of what may be sampled; None: everything."""
        if self._allowed is not None:
            return torch.zeros(vocab, dtype=torch.bool).index_fill_(0, self._allowed, True)
        return None if self.matcher is None else self.matcher.allowed()

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
        ids, bias = self.bias
        if len(ids):
            z_V[ids] += bias
        if self._allowed is not None:
            kept = z_V[self._allowed]
            z_V.fill_(-torch.inf)
            z_V[self._allowed] = kept
        elif self.matcher is not None:
            z_V.masked_fill_(~self.matcher.allowed(), -torch.inf)
