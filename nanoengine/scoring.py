"""Scores a micro-batch: the model, then its output head, give the log-probs of its tokens.

Only the rows that predict a counted token reach the head, and the head never holds a
tokens x vocabulary tensor. With context parallelism a rank reads its `Part` of the tokens, and the
log-probs are gathered so that a loss sees whole sequences; with tensor parallelism the head is
split by vocabulary and every rank gets the same log-probs.

Left out: losses, and the loop over micro-batches (engine.py).
Legend: N rows that this rank reads, P rows that reach the head (in a tree one for each distinct
prediction that counts), T predictions of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoengine.model.attention import AttentionContext, PackedContext, SharedPrefixContext
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, collect_all, make_micro_batches
from nanoengine.parallel.context_parallel import ContextSplit
from nanoengine.parallel.mesh import Mesh


@dataclass(frozen=True)
class Part:
    """The rows that one rank reads of a micro-batch, and the predictions it scores."""

    ids_N: Tensor
    positions_N: Tensor
    context: AttentionContext
    rows: Tensor | None  # the row that predicts each target; None: row i predicts target i
    target_ids: Tensor
    counted: Tensor  # the predictions whose loss mask is not 0
    scored: Tensor | None = None  # of those the distinct ones; None: all
    copy_of: Tensor | None = None  # which of the distinct ones each counted one is
    ring: ContextSplit | None = None


class Policy(Protocol):
    """Whoever scores samples: an `Engine`, one over a pipeline, or a `Scorer` alone."""

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """For each sample a log-prob of each token given those before it; the first has 0."""
        ...


class Scorer:
    """A model and the way its micro-batches are read. By itself it is a policy that nobody trains
    (a reference, a teacher); an engine scores with one, so where the weights are equal the
    log-probs are equal bit for bit, and a KL to the policy's own copy starts at exactly 0."""

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh | None = None,
        *,
        micro_batch_tokens: int = 2048,
        share_prefix: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        self.model = model
        self._mesh = mesh if mesh is not None and mesh.size("cp") > 1 else None
        self._budget, self._share_prefix = micro_batch_tokens, share_prefix
        self._checkpoints_activations = activation_checkpointing

    @torch.no_grad()
    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """Score as `Engine.forward_logprobs` does; 0 where the loss mask of a sample is 0."""
        micros = self.micro_batches(samples)
        scored = [self.logprobs(micro, temperature, only_masked=True)[0] for micro in micros]
        return collect_all(samples, micros, scored)

    def micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return make_micro_batches(
            samples, self._budget, share_prefix=self._share_prefix, device=self.model.device
        )

    def logprobs(
        self,
        micro: MicroBatch,
        temperature: float,
        *,
        entropy: bool = False,
        only_masked: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """logp_T, and entropy_T if asked for, of the micro-batch's predictions; `only_masked`
        leaves 0 where the loss mask is 0. Differentiable."""
        part = self.part(micro)
        hidden_ND = self.model(
            part.ids_N,
            part.positions_N,
            part.context,
            activation_checkpointing=self._checkpoints_activations,
        )
        return self.score(part, hidden_ND, temperature, entropy=entropy, only_masked=only_masked)

    def part(self, micro: MicroBatch) -> Part:
        if self._mesh is not None:
            ring = ContextSplit(micro, self._mesh)
            ids, positions = ring.take(micro.ids_N), ring.take(micro.positions_N)
            targets, mask = ring.take(micro.target_ids_T), ring.take(micro.loss_mask_T)
            return Part(ids, positions, ring, None, targets, mask.nonzero().squeeze(1), ring=ring)
        context: AttentionContext = PackedContext(
            micro.cu_seqlens, micro.max_seqlen, batch_invariant=self.model.batch_invariant
        )
        if micro.prefix_of_S is not None:
            context = SharedPrefixContext(micro.bounds, micro.prefix_of_S)
        predicted = (micro.rows_T, micro.target_ids_T, micro.counted_P)
        distinct = (micro.scored_Q, micro.copy_of_P)
        return Part(micro.ids_N, micro.positions_N, context, *predicted, *distinct)

    def score(
        self,
        part: Part,
        hidden_ND: Tensor,
        temperature: float,
        *,
        entropy: bool,
        only_masked: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """logp_T and entropy_T of the micro-batch's predictions from the final hidden states."""
        rows, targets = part.rows, part.target_ids
        if only_masked:
            picked = part.counted if part.scored is None else part.scored
            rows = picked if rows is None else rows[picked]
            targets = targets[picked]
        hidden_PD = hidden_ND if rows is None else hidden_ND.index_select(0, rows)
        logp, entropies = self.model.logprobs(hidden_PD, targets, temperature, entropy=entropy)
        scored = [logp] if entropies is None else [logp, entropies]
        if only_masked:
            scored = [_spread(values, part) for values in scored]
        if part.ring is not None:
            scored = [part.ring.gather(values) for values in scored]
        return scored[0], scored[1] if entropies is not None else None


def _spread(values: Tensor, part: Part) -> Tensor:
    """What was scored, at every prediction that counts; 0 at the others."""
    if part.copy_of is not None:
        values = values.index_select(0, part.copy_of)
    zeros = torch.zeros(len(part.target_ids), dtype=values.dtype, device=values.device)
    return zeros.index_copy(0, part.counted, values)
