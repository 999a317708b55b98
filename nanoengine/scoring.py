"""From a micro-batch to the log-probs of its tokens: the model, then the output head.

Only the rows that predict a counted token reach the head, and the head never holds a
tokens x vocabulary tensor. With context parallelism a rank reads its `Part` of the tokens, and the
log-probs are gathered so that a loss sees whole sequences; with tensor parallelism the head is
split by vocabulary and every rank gets the same log-probs.

Left out: losses, and the loop over micro-batches (engine.py).
Legend: N rows that this rank reads, P rows that reach the head, T predictions of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import linear_logprob, pack_weight
from nanoengine.model.attention import AttentionContext, PackedContext
from nanoengine.model.linear import PackedLinear
from nanoengine.model.moe import ExpertStack
from nanoengine.model.shared_prefix import SharedPrefixContext
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, collect_all, make_micro_batches
from nanoengine.parallel.context_parallel import ContextSplit
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.tensor_parallel import TensorParallel, vocab_parallel_logprob


@dataclass(frozen=True)
class Part:
    """What one rank reads of a micro-batch, and the predictions it scores."""

    ids_N: Tensor
    positions_N: Tensor
    context: AttentionContext
    rows: Tensor | None  # the row that predicts each target; None: row i predicts target i
    target_ids: Tensor
    counted: Tensor  # the predictions whose loss mask is not 0
    ring: ContextSplit | None = None


class Scorer:
    """Owns the wide copy of the output head, if one is asked for."""

    def __init__(self, model: Transformer, mesh: Mesh | None, *, lm_head_fp32: bool) -> None:
        self.model = model
        self._mesh = mesh if mesh is not None and mesh.size("cp") > 1 else None
        self._is_wide = lm_head_fp32 and model.dtype == torch.bfloat16
        self._head_packed: Tensor | None = None

    def refresh(self) -> None:
        """After any change to the weights."""
        self.model.repack()
        if self._is_wide:
            self._head_packed = pack_weight(self.model.lm_head_weight.detach().float())

    def forget_packed(self) -> None:
        """Drop every prepacked copy: they are made on the fly where weights come and go."""
        for module in self.model.modules():
            if isinstance(module, PackedLinear):
                module.packed = None
            elif isinstance(module, ExpertStack):
                module.packed = [None] * len(module.packed)
        self.model.lm_head_packed = None
        self._head_packed = None

    def part(self, micro: MicroBatch) -> Part:
        if self._mesh is not None:
            ring = ContextSplit(micro, self._mesh)
            ids, positions = ring.take(micro.ids_N), ring.take(micro.positions_N)
            targets, mask = ring.take(micro.target_ids_T), ring.take(micro.loss_mask_T)
            return Part(ids, positions, ring, None, targets, mask.nonzero().squeeze(1), ring)
        context: AttentionContext = PackedContext(
            micro.cu_seqlens, micro.max_seqlen, batch_invariant=self.model.batch_invariant
        )
        if micro.prefix_of_S is not None:
            context = SharedPrefixContext(micro.bounds, micro.prefix_of_S, self.model.dtype)
        scored = (micro.rows_T, micro.target_ids_T, micro.counted_P)
        return Part(micro.ids_N, micro.positions_N, context, *scored)

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
        rows, targets, picked = part.rows, part.target_ids, None
        if only_masked:
            picked = part.counted
            rows = picked if rows is None else rows[picked]
            targets = targets[picked]
        hidden_PD = hidden_ND if rows is None else hidden_ND.index_select(0, rows)
        scored = self._head(hidden_PD, targets, temperature, entropy)
        if picked is not None:
            count = len(part.target_ids)
            scored = [_spread(values, picked, count) for values in scored]
        if part.ring is not None:
            scored = [part.ring.gather(values) for values in scored]
        return scored[0], scored[1] if entropy else None

    def _head(
        self, hidden_PD: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> list[Tensor]:
        """[logp] or [logp, entropy], of the picked rows."""
        model = self.model
        packed = self._head_packed if self._is_wide else model.lm_head_packed
        dtype = torch.float32 if self._is_wide else None
        if model.split is None:
            scored = linear_logprob(
                hidden_PD,
                model.lm_head_weight,
                targets,
                temperature=temperature,
                return_entropy=entropy,
                packed=packed,
                logits_dtype=dtype,
                batch_invariant=model.batch_invariant,
            )
        else:
            assert isinstance(model.split, TensorParallel), "the engine checked it"
            scored = vocab_parallel_logprob(
                hidden_PD,
                model.lm_head_weight,
                targets,
                model.split,
                model.config.vocab_size,
                temperature=temperature,
                return_entropy=entropy,
                packed=packed,
                logits_dtype=dtype,
            )
        return list(scored) if isinstance(scored, tuple) else [scored]


def _spread(values: Tensor, picked: Tensor, count: int) -> Tensor:
    zeros = torch.zeros(count, dtype=values.dtype, device=values.device)
    return zeros.index_copy(0, picked, values)


# A policy that only scores: a reference, a teacher. No gradients, no optimizer, one process.
#
# It runs the lines that the engine runs, so where the weights are equal the log-probs are equal bit
# for bit, and a KL to the policy's own copy starts at exactly 0.


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
