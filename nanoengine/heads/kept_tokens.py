"""Log-probs of tokens among those that truncation had kept when they were drawn (`Sample.kept`).

A policy that samples by top-k, top-p or min-p draws from a renormalised part of the vocabulary. Its
log-prob, and that of every policy that it is compared with, is taken over that same part: both then
have one support, and their ratio is one of probabilities.
Left out: a vocabulary split over ranks, tokens spread over ranks, further tokens (`Sample.top`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

import kernels
from kernels.logits.kept import KeptHead
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer

Logprobs = Callable[[Tensor, Tensor, LogprobOptions], tuple[Tensor, Tensor | None]]


def kept_logprobs(model: Transformer, kept: Sequence[Sequence[int]]) -> Logprobs:
    """As `model.logprobs`, over the kept ids of each row; a row without any has them all.
    `ValueError` for a model that is split over ranks."""
    if model.split.size > 1:
        raise ValueError(
            "tp: ranks that share the vocabulary have no log-probs over kept tokens; train such "
            "samples with tp=1"
        )

    def logprobs(
        hidden_PE: Tensor, ids_P: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor | None]:
        head = model.output_head()
        scored = kernels.linear_kept_logprob(
            model.scale_for_head(hidden_PE),
            head.weight_VE,
            ids_P,
            kept,
            temperature=options.temperature,
            return_entropy=options.entropy,
            head=KeptHead(packed=head.packed, logits_dtype=head.dtype),
        )
        return scored if isinstance(scored, tuple) else (scored, None)

    return logprobs
