"""Scores a micro-batch: the model, then its output head, give the log-probs of its tokens.

Only the rows that predict a counted token reach the head, and the head never holds a
tokens x vocabulary tensor. Of samples with `top` tokens the log-probs of those come from the same
logits.

Left out: losses, and the loop over micro-batches (engine.py); tokens that are spread over processes
(parallel/ring_scorer.py); policies that only score (heads/scorer.py).
Legend: N rows that this rank reads, P rows that reach the head (in a tree one for each distinct
prediction that counts), T predictions of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoengine.model.attention import AttentionContext, PackedContext, SharedPrefixContext
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample, make_micro_batches

_KEPT = "nanoengine.heads.kept_tokens:kept_logprobs"
_SEEN = "nanoengine.vision.seen_samples:seen_in"
_ROWS_OF_A_PASS = "nanoengine.plan.footprint:rows_of_a_pass"


@dataclass(frozen=True)
class Part:
    """The rows that the model reads of a micro-batch, and the predictions that are scored."""

    ids_N: Tensor
    positions_N: Tensor
    context: AttentionContext
    rows: Tensor | None  # the row that predicts each target; None: row i predicts target i
    target_ids: Tensor
    counted: Tensor  # the predictions whose loss mask is not 0
    scored: Tensor | None = None  # of those the distinct ones; None: all
    copy_of: Tensor | None = None  # which of the distinct ones each counted one is
    top_ids: Tensor | None = None  # further tokens to score at each target, [targets, K]
    kept: list[list[int]] | None = None  # what the distribution of each target is over
    seen: Any = None  # what rows of pictures read (vision/seeing_transformer.py)


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
    """A guess at the numbers that a loss will meet. Where it is right, the head takes its gradient
    with the log-probs, in one product less; where it is not, only time is lost."""

    logp_T: Tensor
    loss: Callable[[Tensor], Tensor]
    """From logp_T to what `backward` is called on."""

    def grad(self, part: Part) -> Tensor | None:
        """The gradient by each scored log-prob, as autograd will find it; None for a loss without
        one."""
        # In a tree several samples may count the same prediction; the head has it once, and its
        # gradient is the sum of theirs.
        picked = part.counted if part.scored is None else part.scored
        with torch.enable_grad():
            logp = self.logp_T[picked].detach().requires_grad_()
            loss = self.loss(_spread(logp, part))
            return torch.autograd.grad(loss, logp)[0] if loss.requires_grad else None


class PassScorer:
    """A model and the way its micro-batches are read. A policy that nobody trains reads them as an
    engine does (heads/scorer.py), so where the weights are equal the log-probs are equal bit for
    bit, and a KL to the policy's own copy starts at exactly 0."""

    def __init__(
        self,
        model: Transformer,
        *,
        micro_batch_tokens: int = 2048,
        share_prefix: bool = False,
        activation_checkpointing: bool = False,
        activation_mb: int = 0,
    ) -> None:
        self.model = model
        self._budget, self._share_prefix = micro_batch_tokens, share_prefix
        self._checkpoints_activations = activation_checkpointing
        self._fill: int | None = None
        if activation_mb and model.device.type == "cpu":
            self._fill = resolve_name(_ROWS_OF_A_PASS)(model, activation_mb << 20)

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
        hidden_ND = self.hidden(part)
        expected = None
        if foresight is not None and part.top_ids is None:
            expected = foresight.grad(part)
        return self.score(
            part,
            hidden_ND,
            temperature,
            entropy=entropy,
            only_masked=only_masked,
            expected_grad=expected,
        )

    def hidden(self, part: Part) -> Tensor:
        """The final hidden states of the rows that are read."""
        hidden_ND: Tensor = self.model(
            part.ids_N,
            part.positions_N,
            part.context,
            activation_checkpointing=self._checkpoints_activations,
            **({} if part.seen is None else {"rows": part.seen}),
        )
        return hidden_ND

    def part(self, micro: MicroBatch) -> Part:
        """The rows of a micro-batch that the model reads, with the context in which its rows see
        each other."""
        context: AttentionContext = PackedContext(
            micro.cu_seqlens, micro.max_seqlen, batch_invariant=self.model.batch_invariant
        )
        if micro.prefix_of_S is not None:
            context = SharedPrefixContext(micro.bounds, micro.prefix_of_S)
        positions_N, seen = micro.positions_N, None
        if micro.images is not None:
            positions_N, seen = resolve_name(_SEEN)(self.model, micro)
        read = (micro.ids_N, positions_N, context)
        predicted = (micro.rows_T, micro.target_ids_T, micro.counted_P)
        distinct = (micro.scored_Q, micro.copy_of_P)
        kept, top_ids = micro.kept_T, micro.top_ids_TK
        return Part(*read, *predicted, *distinct, top_ids=top_ids, kept=kept, seen=seen)

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
        rows, targets, kept = part.rows, part.target_ids, part.kept
        if part.top_ids is not None:
            targets = torch.cat([targets.unsqueeze(1), part.top_ids], 1)
        if only_masked:  # a row costs the head a whole vocabulary: prompts never get there
            picked = part.counted if part.scored is None else part.scored
            rows = picked if rows is None else rows[picked]
            targets = targets[picked]
            kept = kept and [kept[i] for i in picked.tolist()]
        hidden_PD = hidden_ND if rows is None else hidden_ND.index_select(0, rows)
        options = LogprobOptions(temperature, entropy, expected_grad)
        logprobs = resolve_name(_KEPT)(self.model, kept) if kept else self.model.logprobs
        scored = [x for x in logprobs(hidden_PD, targets, options) if x is not None]
        if only_masked:
            scored = [_spread(values, part) for values in scored]
        scored = [self.whole(values, part) for values in scored]
        entropy_T = scored[1] if entropy else None
        if part.top_ids is None:
            return PartScores(scored[0], entropy_T)
        return PartScores(scored[0][:, 0], entropy_T, scored[0][:, 1:])

    def whole(self, values: Tensor, part: Part) -> Tensor:
        """The values of the whole micro-batch, of which this process may read a part."""
        return values


def _spread(values: Tensor, part: Part) -> Tensor:
    """The scores, spread to every prediction that counts; 0 at the others."""
    if part.copy_of is not None:
        values = values.index_select(0, part.copy_of)
    return at_places(values, part)


def at_places(values: Tensor, part: Part) -> Tensor:
    """Put the values of counted predictions at their places among all predictions; 0 at the
    others."""
    zeros = values.new_zeros(len(part.target_ids), *values.shape[1:])
    return zeros.index_copy(0, part.counted, values)
