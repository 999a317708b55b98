"""From groups of rollouts to the samples of one optimizer batch: the way of an algorithm.

    rollouts → samples → advantages → weights → loss

Each stage is walked once, over the whole batch, before the engine splits it into micro-batches:
advantages and weights travel with each token as `Sample.fields` (grpo.py). Every per-token list
covers all tokens of its sample; the engine shifts them to the predictions.

A rollout is a sample, and each of its branches is one more. They share its advantage and, where an
aggregation weighs by rollouts, one denominator; ratios and clips of whole sequences (GSPO) are
those of each sample.

Suffixes: R rollouts, S samples (their sequences), T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from nanoengine.packing import Sample
from nanorl.batch_metrics import batch_metrics, staleness_metrics
from nanorl.group_advantage import compute_advantages
from nanorl.grpo import ALWAYS, GRPO, AdvantageBatch, BatchScorer, Field, OwnedSample, part
from nanorl.policy_loss import PolicyLoss
from nanorl.types import Rollout, TokenStats, check_rollout, kind_of

Weigher = Callable[[GRPO, Sequence[Rollout], AdvantageBatch, Tensor], Tensor]
"""(spec, rollouts, batch, [T] which tokens are of a minibatch) -> the weights of those."""


@dataclass(kw_only=True)
class TrainBatch:
    """Holds what the engine trains on, and how the batch looked. `probe` is one group of it, to
    measure the log-prob gap on where no sample has a gradient. The critic, if there is one, learns
    from all samples. `places` says of each of `samples` which sequence of which rollout it is,
    `stats` has what the batch says about the tokens of every rollout that was scored.

        batch = build_batch(groups, AlgorithmSpec(), max_tokens=512, version=3)
        engine.train_step(batch.samples, batch.loss_fn)
    """

    samples: list[Sample]
    critic_samples: list[Sample]
    probe: list[Sample]
    loss_fn: PolicyLoss
    metrics: dict[str, float]
    places: list[tuple[str, int]]
    stats: dict[str, TokenStats]
    minibatch_of: list[int]
    """The minibatch of each of `samples`."""

    def minibatches(self) -> list[list[int]]:
        """The places in `samples` of each minibatch that has any: one optimizer step each."""
        found: dict[int, list[int]] = {}
        for place, minibatch in enumerate(self.minibatch_of):
            found.setdefault(minibatch, []).append(place)
        return [found[minibatch] for minibatch in sorted(found)]


def build_batch(
    groups: Sequence[Sequence[Rollout]],
    spec: GRPO,
    *,
    max_tokens: int,
    version: int,
    scoring: BatchScorer | None = None,
    num_minibatches: int = 1,
) -> TrainBatch:
    """Samples with advantages and weights, one for each sequence of each rollout. A rollout without
    an action token counts among the others of its group and batch, and carries no gradient itself.

    `max_tokens` is the length limit of a sequence (the overlong penalty ends there), `version` the
    policy that will be updated. Advantages are of the whole batch; each of `num_minibatches`, whole
    rollouts in their order, has weights of its own. `scoring` asks other models.
    `ValueError` names a rollout whose rewards, metrics, log-probs or advantages are not finite.
    """
    rollouts = [rollout for group in groups for rollout in group]
    # Counted before any is left out: the log tells of all that were sampled.
    metrics = batch_metrics(rollouts, spec) | staleness_metrics(rollouts, version)
    for rollout in rollouts:
        check_rollout(rollout)  # one NaN would spoil the advantages of a whole group, in silence
    # A batch without a signal can still say whether the two engines agree: on this group.
    probe = _first_group(rollouts, version)
    rollouts = spec.select(rollouts, metrics)
    split_R = minibatch_of_rollouts(rollouts, num_minibatches)
    samples = samples_of(rollouts, version)
    if scoring is not None and rollouts:
        samples = scoring.apply(spec, rollouts, samples)
    if rollouts:
        samples = _with_advantages(rollouts, samples, spec, max_tokens, split_R)
    stats = _token_stats(rollouts, samples)
    # A sequence that the policy said nothing in was compared with the others, and has no loss.
    owned = [one for one in _owned(rollouts, samples, split_R) if any(one.sample.loss_mask)]
    check_fields(one.sample for one in owned)
    # A critic learns from all of them, also where the policy has nothing left to learn.
    is_for_critic = any(Field.RETURN in one.sample.fields for one in owned)
    critic_samples = [one.sample for one in owned] if is_for_critic else []
    if spec.is_proportional:
        # After the weights were computed over all of them: the gradient is the same, sooner.
        owned = [one for one in owned if any(one.sample.fields[Field.ADVANTAGE])]
    trained = [one.sample for one in owned]
    metrics["num_trained_rollouts"] = float(len({one.place[0] for one in owned}))
    metrics["trained_tokens"] = float(sum(sum(sample.loss_mask) for sample in trained))
    owned = spec.finish(rollouts, owned, scoring, metrics)
    return TrainBatch(
        samples=[one.sample for one in owned],
        critic_samples=critic_samples,
        probe=probe,
        loss_fn=PolicyLoss(spec),
        metrics=metrics,
        places=[one.place for one in owned],
        stats=stats,
        minibatch_of=[one.minibatch for one in owned],
    )


def samples_of(rollouts: Sequence[Rollout], version: int) -> list[Sample]:
    """A sample of each sequence of each rollout, in their order. `staleness` is how many versions
    ago a token was sampled; 0 where the loss mask is 0."""
    return [
        Sample(
            tokens=sequence.tokens,
            loss_mask=sequence.loss_mask,
            fields={
                Field.ROLLOUT_LOGP: sequence.logps,
                Field.STALENESS: [float(version - v) if v >= 0 else 0.0 for v in sequence.versions],
            },
            group=rollout.group_id,
            kept=sequence.kept or None,
            images=sequence.images,
            kind=kind_of(rollout.task_id),
        )
        for rollout in rollouts
        for sequence in rollout.sequences
    ]


def _first_group(rollouts: Sequence[Rollout], version: int) -> list[Sample]:
    samples = [sample for sample in samples_of(rollouts, version) if any(sample.loss_mask)]
    return [sample for sample in samples if sample.group == samples[0].group]


def minibatch_of_rollouts(rollouts: Sequence[Rollout], num_minibatches: int) -> list[int]:
    """The minibatch of each rollout: runs of equal length, of whole groups where there are enough
    groups."""
    # A group stays in one piece where it can: its advantages balance only together.
    groups = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
    if len(groups) < num_minibatches:
        return [i * num_minibatches // len(rollouts) for i in range(len(rollouts))]
    of_group = {group: i * num_minibatches // len(groups) for i, group in enumerate(groups)}
    return [of_group[rollout.group_id] for rollout in rollouts]


def _with_advantages(
    rollouts: Sequence[Rollout],
    samples: list[Sample],
    spec: GRPO,
    max_tokens: int,
    split_R: Sequence[int],
) -> list[Sample]:
    """The samples with what the loss reads."""
    batch = spec.reward(rollouts, _advantage_batch(rollouts, samples), max_tokens)
    advantage_T, return_T = compute_advantages(spec, batch)
    _check_advantages(rollouts, spec, batch, advantage_T)
    weight_T = token_weights(rollouts, spec, batch, split_R)
    lengths = [len(sample.tokens) for sample in samples]
    samples = with_field(samples, Field.ADVANTAGE, advantage_T.split(lengths))
    if return_T is not None:
        samples = with_field(samples, Field.RETURN, return_T.split(lengths))
    samples = spec.mark(samples, batch, advantage_T)
    return with_field(samples, Field.WEIGHT, weight_T.split(lengths))


def _advantage_batch(rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> AdvantageBatch:
    # Flat and by ids, so that sequences of any length need no padding.
    lengths_S = torch.tensor([len(sample.tokens) for sample in samples])
    counts_R = torch.tensor([len(rollout.sequences) for rollout in rollouts])
    scored: dict[str, Any] = {
        f"{name}_T": _flat(samples, name) for name in samples[0].fields if f"{name}_T" in _READ
    }
    # Where nobody was asked, the policy that sampled is the old one.
    scored.setdefault("old_logp_T", _flat(samples, Field.ROLLOUT_LOGP))
    return AdvantageBatch(
        reward_R=torch.tensor([r.total_reward for r in rollouts], dtype=torch.float32),
        group_ids=[r.group_id for r in rollouts],
        mask_T=torch.tensor([m for s in samples for m in s.loss_mask], dtype=torch.float32),
        sequence_ids_T=torch.repeat_interleave(torch.arange(len(samples)), lengths_S),
        rollout_ids_S=torch.repeat_interleave(torch.arange(len(rollouts)), counts_R),
        **scored,
    )


_READ = frozenset(one.name for one in fields(AdvantageBatch))


def _flat(samples: Sequence[Sample], name: str) -> Tensor:
    """The field of all samples' tokens, one after the other."""
    return torch.tensor([value for s in samples for value in s.fields[name]], dtype=torch.float32)


def _check_advantages(
    rollouts: Sequence[Rollout], spec: GRPO, batch: AdvantageBatch, advantage_T: Tensor
) -> None:
    """`ValueError` names a rollout whose advantage is not finite: of a function of the user's, or
    of numbers too large for fp32."""
    # Outside the mask an estimator may write what it likes: nothing reads it.
    is_bad_T = ~advantage_T.isfinite() & batch.mask_T.bool()
    if is_bad_T.any():
        place = int(is_bad_T.nonzero()[0])
        owner = rollouts[int(batch.rollout_of_token[place])]
        raise ValueError(
            f"rollout {owner.rollout_id}: its advantage is {advantage_T[place]:g} "
            f"(--rl.algorithm.advantage {spec.advantage}, reward {owner.total_reward:g}); it must "
            "be a finite number"
        )


def token_weights(
    rollouts: Sequence[Rollout], spec: GRPO, batch: AdvantageBatch, split_R: Sequence[int]
) -> Tensor:
    """[T] fp32, 0 outside the mask: the loss is `Σ weight·token_loss`. Those of each minibatch are
    over that minibatch, before it is split into micro-batches or over ranks, so that the gradient
    does not depend on the split; a mean of means would."""
    weigh: Weigher = part("aggregation", spec.aggregation)
    # Denominators are of a minibatch, since each is an optimizer step of its own.
    weight_T = torch.zeros_like(batch.mask_T)
    minibatch_T = torch.tensor(split_R)[batch.rollout_of_token]
    for minibatch in minibatch_T.unique():
        is_here_T = minibatch_T == minibatch
        weight_T[is_here_T] = weigh(spec, rollouts, batch, is_here_T)
    return weight_T


def token_mean(
    spec: GRPO, rollouts: Sequence[Rollout], batch: AdvantageBatch, is_here_T: Tensor
) -> Tensor:
    """`m/Σm`: every action token counts the same."""
    mask_T = batch.mask_T[is_here_T]
    # A mean within each rollout first would give a token of a short one more to say.
    return mask_T / mask_T.sum().clamp(min=1)


def _owned(
    rollouts: Sequence[Rollout], scored: Sequence[Sample], split_R: Sequence[int]
) -> list[OwnedSample]:
    places = [
        ((rollout.rollout_id, i), minibatch)
        for rollout, minibatch in zip(rollouts, split_R, strict=True)
        for i in range(len(rollout.sequences))
    ]
    return [OwnedSample(sample, *place) for sample, place in zip(scored, places, strict=True)]


def _token_stats(rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> dict[str, TokenStats]:
    """The batch's numbers on the tokens of each rollout, by its id; 0 where the loss mask is 0."""
    names = (Field.ADVANTAGE, Field.VALUE, Field.REF_LOGP, Field.TEACHER_LOGP)
    stats = {rollout.rollout_id: TokenStats() for rollout in rollouts}
    owners = (one.rollout_id for one in rollouts for _ in one.sequences)
    for owner, sample in zip(owners, samples, strict=True):
        for name in names:
            if name in sample.fields:
                stats[owner].values.setdefault(name.value, []).append(list(sample.fields[name]))
    return stats


def with_field(samples: Sequence[Sample], name: Field, values: Sequence[Tensor]) -> list[Sample]:
    """The samples with one more field, a number for each token."""
    return [
        replace(sample, fields={**sample.fields, name: value.tolist()})
        for sample, value in zip(samples, values, strict=True)
    ]


def check_fields(samples: Iterable[Sample]) -> None:
    """`ValueError` for a sample of a finished batch that lacks a field, or has an unknown one."""
    for sample in samples:
        names = set(sample.fields)
        missing, unknown = ALWAYS - names, names - set(Field)
        if missing or unknown:
            raise ValueError(
                f"a sample has the fields {', '.join(sorted(names))}; missing: "
                f"{', '.join(sorted(missing)) or 'none'}, unknown: "
                f"{', '.join(sorted(unknown)) or 'none'} (nanorl/grpo.py)"
            )
