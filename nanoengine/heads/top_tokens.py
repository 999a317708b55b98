"""The likeliest tokens at every place of a sample: what a teacher tells beside a log-prob.

Left out: scoring such tokens by another model, which every `Scorer` does (`Sample.top`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

import kernels
from nanoengine.model.linear import OutputHead
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, TopTokens, collect_all
from nanoengine.scoring import Part, PassScorer, at_places


@runtime_checkable
class SplitVocabulary(Protocol):
    """The split of a model whose ranks hold parts of the vocabulary."""

    def likeliest(
        self, hidden_PE: Tensor, head: OutputHead, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(ids [P, k], logp [P, k]) of the k likeliest tokens of the whole vocabulary, likeliest
        first. No gradient."""
        ...


@torch.no_grad()
def likeliest(
    scorer: PassScorer,
    samples: Sequence[Sample],
    micros: Sequence[MicroBatch],
    k: int,
    temperature: float,
) -> list[TopTokens]:
    """For each sample the k likeliest tokens, likeliest first, in place of each token whose loss
    mask is not 0, and their log-probs. There may be more micro-batches than the samples make."""
    found = []
    for micro in micros:
        part = scorer.part(micro)
        found.append(pick_top(scorer, part, scorer.hidden(part), k, temperature))
    ids = collect_all(samples, micros, [ids_TK for ids_TK, _ in found])
    logps = collect_all(samples, micros, [logp_TK.float() for _, logp_TK in found])
    return [TopTokens(*pair) for pair in zip(ids, logps, strict=True)]


def pick_top(
    scorer: PassScorer, part: Part, hidden_ND: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(ids_TK, logp_TK) of the likeliest tokens in place of each counted target, from the final
    hidden states; 0 at the others."""
    rows = part.counted if part.rows is None else part.rows[part.counted]
    found = likeliest_next(scorer.model, hidden_ND.index_select(0, rows), k, temperature)
    ids, logp = (scorer.whole(at_places(values, part), part) for values in found)
    return ids, logp


@torch.no_grad()
def likeliest_next(
    model: Transformer, hidden_PE: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(ids [P, k], logp [P, k]) of the k likeliest next tokens, likeliest first. `ValueError` for a
    k that is larger than the vocabulary."""
    if not 1 <= k <= model.config.vocab_size:
        raise ValueError(
            f"k={k}: must be from 1 to the vocabulary's {model.config.vocab_size}; lower it"
        )
    hidden_PE, head = model.scale_for_head(hidden_PE), model.output_head()
    if isinstance(model.split, SplitVocabulary):
        return model.split.likeliest(hidden_PE, head, k, temperature)
    return kernels.linear_topk(
        hidden_PE,
        head.weight_VE,
        k,
        temperature=temperature,
        packed=head.packed,
        logits_dtype=head.dtype,
    )
