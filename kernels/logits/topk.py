"""The likeliest tokens of every place, under softmax(hidden · weightᵀ / temperature).

As in linear_logprob.py, whose chunks these are, no tokens x vocabulary tensor is held.
"""

import torch
from torch import Tensor

from kernels.backend import Backend
from kernels.linear import pack_weight
from kernels.linear_logprob import (
    ChunkLogits,
    check_head,
    chunk_stats,
    score_options,
    valid_temperature,
)


@torch.no_grad()
def linear_topk(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    packed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of every row under softmax(hidden · weightᵀ / temperature), likeliest
    first: (ids int64 [T, k], fp32 log-probs [T, k], nats). Without a gradient; options as in
    `linear_logprob`. ValueError for a k that is not in 1 .. V."""
    temperature, vocab = valid_temperature(temperature), weight_VD.shape[0]
    if not 1 <= k <= vocab:
        raise ValueError(f"k={k}: must be from 1 to the vocabulary's {vocab}")
    check_head(hidden_TD, weight_VD, hidden_TD.new_zeros(len(hidden_TD), dtype=torch.int64))
    dtype = logits_dtype if logits_dtype is not None else hidden_TD.dtype
    options = score_options(hidden_TD, weight_VD, temperature, None, dtype, backend)
    head = weight_VD.to(dtype)
    packed = pack_weight(head) if packed is None else packed
    chunks = ChunkLogits(hidden_TD, head, packed, options)
    wide = torch.promote_types(dtype, torch.float32)
    ids_TK = torch.zeros(len(hidden_TD), k, dtype=torch.int64, device=hidden_TD.device)
    logp_TK = torch.zeros(len(hidden_TD), k, dtype=wide, device=hidden_TD.device)
    for lo in range(0, len(hidden_TD), options.chunk_size):
        rows = slice(lo, lo + options.chunk_size)
        logits = chunks.multiply(hidden_TD[rows].to(dtype))
        ids_TK[rows] = logits.topk(k).indices
        logp_TK[rows] = chunk_stats(logits, ids_TK[rows], options)[0]
    return ids_TK, logp_TK
