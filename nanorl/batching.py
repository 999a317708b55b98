"""From groups of rollouts to the samples of one optimizer batch, and the loss the engine calls.

Advantages and aggregation weights are computed here, over the whole batch, before the engine splits
it into micro-batches; they travel with each token as `Sample.fields`. Every per-token list covers
all tokens of its rollout; the engine shifts them to the predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanoengine.packing import MicroBatch, Sample
from nanorl.algorithms.advantage_batch import AdvantageBatch, compute_advantages
from nanorl.algorithms.advantages import has_signal, overlong_penalty
from nanorl.algorithms.aggregation import token_weights
from nanorl.algorithms.segments import index_by_id
from nanorl.algorithms.spec import AlgorithmSpec, LossBatch, LossFn, make_loss
from nanorl.types import Rollout, Status


@dataclass(kw_only=True)
class TrainBatch:
    """What the engine trains on, and how the batch looked. `probe` is one group of the batch, to
    measure the log-prob gap on where no sample has a gradient. The critic, if there is one, learns
    from all samples."""

    samples: list[Sample]
    critic_samples: list[Sample]
    probe: list[Sample]
    token_loss: LossFn
    metrics: dict[str, float]

    def loss_fn(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The engine's callback: a SUM over the micro-batch, and summed statistics."""
        fields = micro.fields_T
        sequences, local_ids_T = torch.unique(micro.sequence_ids_T, return_inverse=True)
        batch = LossBatch(
            old_logp_T=fields["old_logp"],
            rollout_logp_T=fields["rollout_logp"],
            advantage_T=fields["advantage"],
            mask_T=micro.loss_mask_T,
            weight_T=fields["weight"],
            sequence_ids_T=local_ids_T,
            num_sequences=len(sequences),
            ref_logp_T=fields.get("ref_logp"),
            entropy_T=entropy_T,
        )
        return self.token_loss(logp_T, batch)


ScoreFn = Callable[[Sequence[Sample]], Sequence[Tensor]]
"""Samples to one tensor each, aligned with its tokens."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Who scores a batch beside the policy that sampled it; each is called at most once."""

    old: ScoreFn | None = None
    """The trainer's policy before the update; without it, that of the rollouts."""
    reference: ScoreFn | None = None
    values: ScoreFn | None = None


def build_batch(
    groups: Sequence[Sequence[Rollout]],
    spec: AlgorithmSpec,
    *,
    max_tokens: int,
    scoring: Scoring | None = None,
) -> TrainBatch:
    """Samples with advantages and weights; rollouts without an action token carry no gradient.

    `max_tokens` is the length limit of a rollout (the overlong penalty ends there).
    """
    scoring = Scoring() if scoring is None else scoring
    rollouts = [rollout for group in groups for rollout in group if rollout.num_action_tokens]
    metrics = batch_metrics([rollout for group in groups for rollout in group])
    rewards_R = torch.tensor([r.reward for r in rollouts], dtype=torch.float32)
    if spec.overlong_buffer and rollouts:
        lengths_R = torch.tensor([r.num_action_tokens for r in rollouts])
        rewards_R = rewards_R + overlong_penalty(lengths_R, max_tokens, spec.overlong_buffer)
    if spec.dynamic_sampling and rollouts:
        is_correct_R = torch.tensor([r.reward >= 1.0 for r in rollouts])
        keep_R = has_signal(is_correct_R, [r.group_id for r in rollouts])
        rollouts = [r for r, keep in zip(rollouts, keep_R.tolist(), strict=True) if keep]
        rewards_R = rewards_R[keep_R]
    samples = _samples(rollouts, rewards_R, spec, scoring) if rollouts else []
    probe = [sample for sample in samples if sample.group == samples[0].group]
    trained = samples
    if is_proportional_to_advantage(spec):
        trained = [sample for sample in samples if any(sample.fields["advantage"])]
    if scoring.old is not None and not spec.compares_old_to_reference:
        trained = _with_field(trained, "old_logp", scoring.old(trained))
    metrics["num_trained_rollouts"] = float(len(trained))
    return TrainBatch(
        samples=trained,
        critic_samples=samples if scoring.values is not None else [],
        probe=probe,
        token_loss=make_loss(spec),
        metrics=metrics,
    )


def is_proportional_to_advantage(spec: AlgorithmSpec) -> bool:
    """Whether a sample whose advantages are all 0 has a gradient of exactly 0, so that leaving it
    out (after the weights of the whole batch are computed) changes nothing but the time."""
    terms = (spec.kl_coef, spec.entropy_coef, spec.distill_coef)
    return spec.loss != "opd" and not any(terms)


def _samples(
    rollouts: list[Rollout], rewards_R: Tensor, spec: AlgorithmSpec, scoring: Scoring
) -> list[Sample]:
    """All samples, scored by everybody whose word the advantages or the loss depend on."""
    samples = [
        Sample(
            tokens=rollout.tokens,
            loss_mask=rollout.loss_mask,
            fields={"rollout_logp": rollout.logps, "old_logp": rollout.logps},
            group=rollout.group_id,
        )
        for rollout in rollouts
    ]
    if scoring.old is not None and spec.compares_old_to_reference:
        samples = _with_field(samples, "old_logp", scoring.old(samples))
    if scoring.reference is not None:
        samples = _with_field(samples, "ref_logp", scoring.reference(samples))
    if scoring.values is not None:
        samples = _with_field(samples, "value", scoring.values(samples))
    lengths = [len(r.tokens) for r in rollouts]
    mask_T = torch.tensor([m for r in rollouts for m in r.loss_mask], dtype=torch.float32)
    ids_T = torch.repeat_interleave(torch.arange(len(rollouts)), torch.tensor(lengths))
    group_ids = [r.group_id for r in rollouts]
    advantage_T, return_T = compute_advantages(
        spec,
        AdvantageBatch(
            reward_R=rewards_R,
            group_ids=group_ids,
            mask_T=mask_T,
            sequence_ids_T=ids_T,
            old_logp_T=_field(samples, "old_logp"),
            ref_logp_T=_field(samples, "ref_logp"),
            value_T=_field(samples, "value"),
        ),
    )
    weight_T = token_weights(
        spec.aggregation,
        mask_T,
        ids_T,
        len(rollouts),
        rollout_ids_S=index_by_id([r.rollout_id for r in rollouts])[0],
        prompt_ids_S=index_by_id(group_ids)[0],
        constant_length=spec.constant_length,
    )
    samples = _with_field(samples, "advantage", advantage_T.split(lengths))
    if return_T is not None:
        samples = _with_field(samples, "return", return_T.split(lengths))
    return _with_field(samples, "weight", weight_T.split(lengths))


def _with_field(samples: list[Sample], name: str, values: Sequence[Tensor]) -> list[Sample]:
    return [
        replace(sample, fields={**sample.fields, name: value.tolist()})
        for sample, value in zip(samples, values, strict=True)
    ]


def _field(samples: list[Sample], name: str) -> Tensor | None:
    """The field of all samples' tokens, one after the other."""
    if name not in samples[0].fields:
        return None
    return torch.tensor([value for s in samples for value in s.fields[name]], dtype=torch.float32)


def batch_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts of a batch."""
    count = max(len(rollouts), 1)
    metrics = {
        "reward": sum(r.reward for r in rollouts) / count,
        "success": sum(r.reward >= 1.0 for r in rollouts) / count,
        "num_rollouts": float(len(rollouts)),
        "action_tokens": float(sum(r.num_action_tokens for r in rollouts)),
        "total_tokens": float(sum(len(r.tokens) for r in rollouts)),
        "turns": sum(len(r.turn_spans) for r in rollouts) / count,
    }
    for status in (Status.TRUNCATED_TURN, Status.TRUNCATED_CONTEXT):
        metrics[f"{status}_fraction"] = sum(r.status == status for r in rollouts) / count
    groups: dict[str, set[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, set()).add(rollout.reward)
    metrics["groups_with_signal"] = float(sum(len(rewards) > 1 for rewards in groups.values()))
    return metrics


def per_action_token(result: Mapping[str, float]) -> dict[str, float]:
    """The engine's sums of statistics as means per action token, under their names without _sum.

    Maxima do not survive a sum over micro-batches: they are left out (see `logp_gap`).
    """
    count = max(result.get("action_count", 0.0), 1.0)
    means = {n.removesuffix("_sum"): v / count for n, v in result.items() if n.endswith("_sum")}
    others = {n: v for n, v in result.items() if not n.endswith(("_sum", "_max", "_count"))}
    return {**others, **means}


def logp_gap(samples: Sequence[Sample], trainer_logps: Sequence[Tensor]) -> dict[str, Any]:
    """|engine - trainer| over sampled tokens, in nats, and the k3 estimate of their KL."""
    gaps = []
    for sample, trainer_logp in zip(samples, trainer_logps, strict=True):
        is_action = torch.tensor(sample.loss_mask, dtype=torch.bool)
        rollout_logp = torch.tensor(sample.fields["rollout_logp"], dtype=torch.float32)
        gaps.append((trainer_logp.float() - rollout_logp)[is_action])
    gap_A = torch.cat(gaps) if gaps else torch.zeros(0)
    if not gap_A.numel():
        return {"logp_gap_max": 0.0, "logp_gap_mean": 0.0, "logp_gap_kl": 0.0}
    return {
        "logp_gap_max": gap_A.abs().max().item(),
        "logp_gap_mean": gap_A.abs().mean().item(),
        "logp_gap_kl": (gap_A.exp() - 1 - gap_A).mean().item(),
    }
