"""The likeliest tokens at every place of a sample: what a teacher tells beside a log-prob.

Left out: scoring such tokens by another model, which every `Scorer` does (`Sample.top`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.packing import MicroBatch, Sample, TopTokens, collect_all
from nanoengine.scoring import Part, Scorer, at_places


@torch.no_grad()
def likeliest(
    scorer: Scorer,
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
        hidden_ND = scorer.model(part.ids_N, part.positions_N, part.context)
        found.append(pick_top(scorer, part, hidden_ND, k, temperature))
    ids = collect_all(samples, micros, [ids_TK for ids_TK, _ in found])
    logps = collect_all(samples, micros, [logp_TK.float() for _, logp_TK in found])
    return [TopTokens(*pair) for pair in zip(ids, logps, strict=True)]


def pick_top(
    scorer: Scorer, part: Part, hidden_ND: Tensor, k: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(ids_TK, logp_TK) of the likeliest tokens in place of each counted target, from the final
    hidden states; 0 at the others."""
    rows = part.counted if part.rows is None else part.rows[part.counted]
    found = scorer.model.likeliest(hidden_ND.index_select(0, rows), k, temperature)
    ids, logp = (scorer.whole(at_places(values, part), part) for values in found)
    return ids, logp
