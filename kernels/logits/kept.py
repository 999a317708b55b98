"""Log-probability of given tokens under softmax(hidden · weightᵀ / temperature) over a part of the
vocabulary that each row has for itself: what top-k, top-p or min-p had left when it was drawn from.

With K the kept ids of a row, z = h · Wᵀ / τ and H the entropy of what is left:

    logp = z_t − log Σ_{v ∈ K} exp z_v       dz = g · (1_t − p) − e · p · (log p + H), 0 outside K

The logits outside K are overwritten by a number whose exponential is 0 at any temperature, and
everything after is `linear_logprob`'s own arithmetic, so these are the bits of a sampler that
overwrites its logits alike (`keep_only_`) and draws from all of them.

Left out: GPUs; a gradient that is told beforehand (`expected_grad`); a vocabulary split over ranks.
Source: "keep sampling mask", DeepSeek-V3.2 (2025), section 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from kernels.linear import pack_weight
from kernels.linear_logprob import (
    ChunkLogits,
    HeadGradients,
    check_head,
    check_ids,
    chunk_gradient,
    chunk_stats,
    score_options,
    valid_temperature,
)

NOTHING = -1e30
"""The logit of a token that is left out. Finite, because 0 · ∞ is no number where an entropy is
summed; over the lowest temperature, 1e-6, it is still inside fp32 (and bf16)."""


def keep_only_(logits_RV: Tensor, keep_RV: Tensor) -> Tensor:
    """Overwrite the logits of all tokens but the kept ones (bool), in place."""
    return logits_RV.masked_fill_(~keep_RV, NOTHING)


@dataclass(frozen=True)
class KeptIds:
    """The kept ids of every row, one after the other. A row without any keeps the vocabulary.

    KeptIds.of([[3, 7], [], [5]]) has ids_K = [3, 7, 5] and starts = [0, 2, 2, 3]."""

    ids_K: Tensor  # int64
    starts: list[int]  # [rows + 1]

    @classmethod
    def of(cls, kept: Sequence[Sequence[int]]) -> "KeptIds":
        starts = [0, *accumulate(len(ids) for ids in kept)]
        return cls(torch.tensor(list(chain.from_iterable(kept)), dtype=torch.int64), starts)

    def mask(self, lo: int, hi: int, vocab: int) -> Tensor:
        """bool [hi - lo, vocab], of those rows."""
        counts = torch.tensor(self.starts[lo : hi + 1]).diff()
        keep = (counts == 0).unsqueeze(1).repeat(1, vocab)
        rows = torch.repeat_interleave(torch.arange(hi - lo), counts)
        keep[rows, self.ids_K[self.starts[lo] : self.starts[hi]]] = True
        return keep

    def check(self, token_ids: Tensor, vocab: int) -> None:
        """`ValueError` names the first row that does not keep its own token."""
        if len(self.starts) != len(token_ids) + 1:
            raise ValueError(
                f"kept: {len(self.starts) - 1} rows must be as many as the {len(token_ids)} tokens"
            )
        check_ids(self.ids_K, vocab)
        counts = torch.tensor(self.starts).diff()
        rows = torch.repeat_interleave(torch.arange(len(token_ids)), counts)
        has_own = counts == 0
        has_own[rows[self.ids_K == token_ids[rows]]] = True
        if not has_own.all():
            row = int((~has_own).nonzero()[0])
            raise ValueError(
                f"kept: row {row} does not keep its own token {int(token_ids[row])}, which "
                "cannot have been drawn then; give the ids that were kept when it was"
            )


class _KeptLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, kept, packed, options):
        head = weight.to(options.dtype)
        packed = pack_weight(head) if packed is None else packed
        chunks = ChunkLogits(hidden, head, packed, options)
        parts = []
        for lo in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(lo, lo + options.chunk_size)
            logits = _multiply(chunks, hidden, rows, kept, options)
            parts.append(chunk_stats(logits, token_ids[rows], options))
            del logits  # before the next ones are there
        logp, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, token_ids, lse, entropy)
        ctx.kept, ctx.packed, ctx.options = kept, packed, options
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        hidden, weight, token_ids, lse, entropy = ctx.saved_tensors
        options = ctx.options
        head = weight.to(options.dtype)
        sums = HeadGradients(hidden, weight, head, options, ctx.needs_input_grad[1])
        chunks = ChunkLogits(hidden, head, ctx.packed, options)
        for lo in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(lo, lo + options.chunk_size)
            by_logp, by_entropy = (None if g is None else g[rows] for g in (dlogp, dentropy))
            of_rows = entropy[rows] if options.wants_entropy else None
            logits = _multiply(chunks, hidden, rows, ctx.kept, options)
            dlogits = chunk_gradient(
                logits, token_ids[rows], lse[rows], of_rows, by_logp, by_entropy, options
            )
            sums.add(rows, dlogits, hidden[rows].to(options.dtype))
            del logits, dlogits
        return sums.dhidden, sums.of_weight(), None, None, None, None


def _multiply(chunks, hidden, rows, kept, options) -> Tensor:
    """Logits of the rows, NOTHING where a row does not keep them."""
    h = hidden[rows].to(options.dtype)
    logits = chunks.multiply(h)
    return keep_only_(logits, kept.mask(rows.start, rows.start + len(h), logits.shape[1]))


@dataclass(frozen=True, kw_only=True)
class KeptHead:
    """How the logits are computed; the fields are options of `linear_logprob`."""

    chunk_size: int | None = None
    packed: Tensor | None = None
    logits_dtype: torch.dtype | None = None


def linear_kept_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    token_ids_T: Tensor,
    kept: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    head: KeptHead | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """fp32 (fp64) logp [T] of `token_ids` among the ids that each row keeps, `kept` [T][...], in
    nats; with `return_entropy` also the entropy [T] of that distribution. Differentiable; `head`
    says how the logits are computed. ValueError for a token that its row does not keep, and on a
    GPU."""
    temperature = valid_temperature(temperature)
    check_head(hidden_TD, weight_VD, token_ids_T)
    if token_ids_T.dim() != 1:
        raise ValueError(f"token_ids: shape {tuple(token_ids_T.shape)} must be one id for each row")
    if hidden_TD.device.type != "cpu":
        raise ValueError(
            f"hidden: on {hidden_TD.device}; log-probs over kept tokens are computed on a CPU"
        )
    rows = KeptIds.of(kept)
    rows.check(token_ids_T, weight_VD.shape[0])
    head = head or KeptHead()
    dtype = head.logits_dtype if head.logits_dtype is not None else hidden_TD.dtype
    options = score_options(hidden_TD, weight_VD, temperature, head.chunk_size, dtype, "auto")
    options = replace(options, wants_entropy=return_entropy)
    ids_T1 = token_ids_T.long().unsqueeze(1)
    logp, entropy = _KeptLogprob.apply(hidden_TD, weight_VD, ids_T1, rows, head.packed, options)
    return (logp.squeeze(1), entropy) if return_entropy else logp.squeeze(1)
