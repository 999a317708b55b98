"""Scores a micro-batch: the model, then its output head, give the log-probs of its tokens.

Only the rows that predict a counted token reach the head, and the head never holds a
tokens x vocabulary tensor. With context parallelism a rank reads its `Part` of the tokens, and the
log-probs are gathered so that a loss sees whole sequences; with tensor parallelism the head is
split by vocabulary and every rank gets the same log-probs.

Left out: losses, and the loop over micro-batches (engine.py).
Of samples with `top` tokens the log-probs of those come from the same logits.
Legend: N rows that this rank reads, P rows that reach the head (in a tree one for each distinct
prediction that counts), T predictions of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanoengine.footprint import Plan, layer_activation_bytes
from nanoengine.model.attention import AttentionContext, PackedContext, SharedPrefixContext
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer
from nanoengine.packing import (
    MicroBatch,
    Sample,
    TopTokens,
    collect_all,
    make_micro_batches,
)
from nanoengine.parallel.context_parallel import ContextSplit
from nanoengine.parallel.mesh import Mesh

_FEWEST_ROWS = 512
"""That a pass is filled with, whatever they take: each pass adds to all gradients and lays all
weights out, which fewer rows do not make up for."""


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
    top_ids: Tensor | None = None  # further tokens to score at each target, [targets, K]


class PartScores(NamedTuple):
    """The word of a model on the predictions of a micro-batch."""

    logp_T: Tensor
    entropy_T: Tensor | None
    top_logp_TK: Tensor | None = None

    def told(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch as a loss reads it, with the log-probs of top tokens where it has any."""
        if self.top_logp_TK is None:
            return micro
        return replace(micro, own_top_logp_TK=self.top_logp_TK)


@dataclass(frozen=True)
class Foresight:
    """What a loss will meet. Where it is true the head takes its gradient with the log-probs, in
    one product less; where it is not, only time is lost."""

    logp_T: Tensor
    loss: Callable[[Tensor], Tensor]
    """From logp_T to what `backward` is called on."""

    def grad(self, part: Part) -> Tensor | None:
        """The gradient by each scored log-prob, as autograd will find it; None for a loss without
        one."""
        picked = part.counted if part.scored is None else part.scored
        with torch.enable_grad():
            logp = self.logp_T[picked].detach().requires_grad_()
            loss = self.loss(_spread(logp, part))
            return torch.autograd.grad(loss, logp)[0] if loss.requires_grad else None


class Policy(Protocol):
    """Whoever scores samples: an `Engine`, one over a pipeline, or a `Scorer` alone."""

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """For each sample a log-prob of each token given those before it; the first has 0."""
        ...

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """For each sample the k likeliest tokens at each place where its loss mask is not 0."""
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
        activation_mb: int = 0,
    ) -> None:
        self.model = model
        self._mesh = mesh if mesh is not None and mesh.size("cp") > 1 else None
        self._budget, self._share_prefix = micro_batch_tokens, share_prefix
        self._checkpoints_activations = activation_checkpointing
        self._fill: int | None = None
        if activation_mb and model.device.type == "cpu":
            self._fill = _rows_of_a_pass(model, activation_mb << 20)

    @torch.no_grad()
    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """Score as `Engine.forward_logprobs` does; 0 where the loss mask of a sample is 0."""
        micros = self.micro_batches(samples)
        scored = [self.logprobs(micro, temperature, only_masked=True).logp_T for micro in micros]
        return collect_all(samples, micros, scored)

    @torch.no_grad()
    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """The k likeliest tokens at each place where the loss mask of a sample is not 0."""
        micros = self.micro_batches(samples)
        return collect_top(samples, micros, [self.top(micro, k, temperature) for micro in micros])

    @torch.no_grad()
    def top(self, micro: MicroBatch, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """(ids_TK, logp_TK) of the likeliest tokens in place of each counted target, likeliest
        first; 0 at the others."""
        part = self.part(micro)
        hidden_ND = self.model(part.ids_N, part.positions_N, part.context)
        return self.pick_top(part, hidden_ND, k, temperature)

    def pick_top(
        self, part: Part, hidden_ND: Tensor, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The same from the final hidden states."""
        rows = part.counted if part.rows is None else part.rows[part.counted]
        found = self.model.likeliest(hidden_ND.index_select(0, rows), k, temperature)
        ids, logp = (_at_places(values, part) for values in found)
        return (ids, logp) if part.ring is None else (part.ring.gather(ids), part.ring.gather(logp))

    def micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return make_micro_batches(
            samples,
            self._budget,
            share_prefix=self._share_prefix,
            fill_tokens=self._fill,
            device=self.model.device,
        )

    def logprobs(
        self,
        micro: MicroBatch,
        temperature: float,
        *,
        entropy: bool = False,
        only_masked: bool = False,
        foresight: Foresight | None = None,
    ) -> PartScores:
        """logp_T, and entropy_T if asked for, of the micro-batch's predictions; `only_masked`
        leaves 0 where the loss mask is 0. Differentiable; `foresight`, of predictions that are
        masked and without entropy, saves time."""
        part = self.part(micro)
        hidden_ND = self.model(
            part.ids_N,
            part.positions_N,
            part.context,
            activation_checkpointing=self._checkpoints_activations,
        )
        expected = None
        if foresight is not None and part.ring is None and part.top_ids is None:
            expected = foresight.grad(part)
        return self.score(
            part,
            hidden_ND,
            temperature,
            entropy=entropy,
            only_masked=only_masked,
            expected_grad=expected,
        )

    def part(self, micro: MicroBatch) -> Part:
        if self._mesh is not None:
            ring = ContextSplit(micro, self._mesh)
            ids, positions = ring.take(micro.ids_N), ring.take(micro.positions_N)
            targets, mask = ring.take(micro.target_ids_T), ring.take(micro.loss_mask_T)
            top = None if micro.top_ids_TK is None else ring.take(micro.top_ids_TK)
            counted = mask.nonzero().squeeze(1)
            return Part(ids, positions, ring, None, targets, counted, ring=ring, top_ids=top)
        context: AttentionContext = PackedContext(
            micro.cu_seqlens, micro.max_seqlen, batch_invariant=self.model.batch_invariant
        )
        if micro.prefix_of_S is not None:
            context = SharedPrefixContext(micro.bounds, micro.prefix_of_S)
        predicted = (micro.rows_T, micro.target_ids_T, micro.counted_P)
        distinct = (micro.scored_Q, micro.copy_of_P)
        return Part(
            micro.ids_N,
            micro.positions_N,
            context,
            *predicted,
            *distinct,
            top_ids=micro.top_ids_TK,
        )

    def score(
        self,
        part: Part,
        hidden_ND: Tensor,
        temperature: float,
        *,
        entropy: bool,
        only_masked: bool,
        expected_grad: Tensor | None = None,
    ) -> PartScores:
        """logp_T and entropy_T of the micro-batch's predictions from the final hidden states."""
        rows, targets = part.rows, part.target_ids
        if part.top_ids is not None:
            targets = torch.cat([targets.unsqueeze(1), part.top_ids], 1)
        if only_masked:
            picked = part.counted if part.scored is None else part.scored
            rows = picked if rows is None else rows[picked]
            targets = targets[picked]
        hidden_PD = hidden_ND if rows is None else hidden_ND.index_select(0, rows)
        options = LogprobOptions(temperature, entropy, expected_grad)
        logp, entropies = self.model.logprobs(hidden_PD, targets, options)
        scored = [logp] if entropies is None else [logp, entropies]
        if only_masked:
            scored = [_spread(values, part) for values in scored]
        if part.ring is not None:
            scored = [part.ring.gather(values) for values in scored]
        entropy_T = scored[1] if entropies is not None else None
        if part.top_ids is None:
            return PartScores(scored[0], entropy_T)
        return PartScores(scored[0][:, 0], entropy_T, scored[0][:, 1:])


def _rows_of_a_pass(model: Transformer, num_bytes: int) -> int:
    """How many rows keep so much for the backward pass on a CPU."""
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(model.dtype, "fp64")
    plan = Plan(dtype=dtype, on_cpu=True)
    row_bytes = layer_activation_bytes(model.config, plan, 1) * model.config.num_layers
    return max(_FEWEST_ROWS, int(num_bytes / row_bytes))


def _spread(values: Tensor, part: Part) -> Tensor:
    """What was scored, at every prediction that counts; 0 at the others."""
    if part.copy_of is not None:
        values = values.index_select(0, part.copy_of)
    return _at_places(values, part)


def _at_places(values: Tensor, part: Part) -> Tensor:
    """What counted predictions have, at their places among all; 0 at the others."""
    zeros = values.new_zeros(len(part.target_ids), *values.shape[1:])
    return zeros.index_copy(0, part.counted, values)


def collect_top(
    samples: Sequence[Sample],
    micros: Sequence[MicroBatch],
    found: Sequence[tuple[Tensor, Tensor]],
) -> list[TopTokens]:
    """For each sample its top tokens, of those of all micro-batches, of which there may be none."""
    ids = collect_all(samples, micros, [ids_TK for ids_TK, _ in found])
    logps = collect_all(samples, micros, [logp_TK.float() for _, logp_TK in found])
    return [TopTokens(*pair) for pair in zip(ids, logps, strict=True)]
