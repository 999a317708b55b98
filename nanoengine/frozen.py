"""A policy that only scores: a reference, a teacher. No gradients, no optimizer, one process.

It runs the lines that the engine runs, so where the weights are equal the log-probs are equal bit
for bit, and a KL to the policy's own copy starts at exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample, collect_all, make_micro_batches
from nanoengine.scoring import Scorer


class FrozenPolicy:
    """Scores samples with `model`, whose weights nobody changes."""

    def __init__(
        self,
        model: Transformer,
        *,
        micro_batch_tokens: int = 2048,
        share_prefix: bool = False,
        lm_head_fp32: bool = False,
    ) -> None:
        self.model = model.requires_grad_(False)
        self._budget, self._share_prefix = micro_batch_tokens, share_prefix
        self._scorer = Scorer(model, None, lm_head_fp32=lm_head_fp32)
        self._scorer.refresh()

    @torch.no_grad()
    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """As `Engine.forward_logprobs`: entry t of a sample is of its tokens[t], entry 0 is 0; 0
        where its loss mask is 0."""
        logps = []
        micros = make_micro_batches(
            samples, self._budget, share_prefix=self._share_prefix, device=self.model.device
        )
        for micro in micros:
            part = self._scorer.part(micro)
            hidden_ND = self.model(part.ids_N, part.positions_N, part.context)
            logp_T, _ = self._scorer.score(
                part, hidden_ND, temperature, entropy=False, only_masked=True
            )
            logps.append(logp_T)
        return collect_all(samples, micros, logps)
