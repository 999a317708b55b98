"""From groups of rollouts to the samples of one optimizer batch, and the loss the engine calls.

Advantages and aggregation weights are computed here, over the whole batch, before the engine splits
it into micro-batches; they travel with each token as `Sample.fields` (algorithms/fields.py). Every
per-token list covers all tokens of its sample; the engine shifts them to the predictions.

A rollout is a sample, and each of its branches is one more. They share its advantage and, where an
aggregation weighs by rollouts, one denominator; ratios and clips of whole sequences (GSPO) are
those of each sample.

Suffixes: R rollouts, S samples (their sequences), T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nanoengine.packing import MicroBatch, Sample, TopTokens
from nanorl.algorithms.advantages import (
    AdvantageBatch,
    Turns,
    compute_advantages,
    overlong_penalty,
)
from nanorl.algorithms.aggregation import token_weights
from nanorl.algorithms.covariance import choose_by_covariance
from nanorl.algorithms.fields import Field, check_fields
from nanorl.algorithms.loss_batch import LossBatch
from nanorl.algorithms.losses import make_loss
from nanorl.algorithms.segments import index_by_id
from nanorl.algorithms.self_distillation import (
    aligned,
    aligned_top,
    teacher_samples,
    with_hindsight,
)
from nanorl.algorithms.signal import earned, has_signal, part_of
from nanorl.algorithms.spec import DISTILLS, TURN_REWARDS, AlgorithmSpec, is_own
from nanorl.finite import PART, check_logps, check_rollout
from nanorl.types import Branch, Rollout, Status, TokenStats, kind_of

if TYPE_CHECKING:
    from nanorl.observed import Scaffold


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


@dataclass(frozen=True)
class PolicyLoss:
    """The engine's callback for an algorithm: a SUM over a micro-batch, and summed statistics. It
    holds nothing but the spec, so it travels to the ranks of an engine."""

    spec: AlgorithmSpec
    is_exact: bool = False
    """The policy is expected to say of the tokens what it said when it sampled them, bit for bit:
    the step that follows a rollout on the same processor."""

    def foreseen_logp(self, micro: MicroBatch) -> Tensor | None:
        """The log-probs of the rollouts, where they are those of the policy (ForeseeingLoss): on a
        CPU. A loss of the user's own is called once."""
        if not self.is_exact or micro.ids_N.device.type != "cpu" or is_own(self.spec.loss):
            return None
        return micro.fields_T[Field.ROLLOUT_LOGP]

    def __call__(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        fields = micro.fields_T
        mask_T, observation_T = micro.loss_mask_T, fields.get(Field.OBSERVATION)
        batch = LossBatch(
            old_logp_T=fields.get(Field.OLD_LOGP),
            rollout_logp_T=fields[Field.ROLLOUT_LOGP],
            advantage_T=fields[Field.ADVANTAGE],
            mask_T=mask_T if observation_T is None else mask_T * (observation_T == 0),
            observation_T=observation_T,
            weight_T=fields[Field.WEIGHT],
            sequence_ids_T=micro.local_ids_T,
            num_sequences=len(micro.index),
            ref_logp_T=fields.get(Field.REF_LOGP),
            teacher_logp_T=fields.get(Field.TEACHER_LOGP),
            top_logp_TK=micro.own_top_logp_TK,
            teacher_top_logp_TK=micro.top_logp_TK,
            chosen_T=fields.get(Field.CHOSEN),
            staleness_T=fields.get(Field.STALENESS),
            entropy_T=entropy_T,
        )
        return make_loss(self.spec)(logp_T, batch)


ScoreFn = Callable[[Sequence[Sample]], Sequence[Tensor]]
"""Samples to one tensor each, aligned with its tokens."""

TopFn = Callable[[Sequence[Sample]], Sequence[TopTokens]]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Names who scores a batch beside the policy that sampled it; each is called at most once."""

    old: ScoreFn | None = None
    """The trainer's policy before the update, where the advantages read its log-probs and it is
    not the policy that sampled; without it they read those of the rollouts."""
    sharp: ScoreFn | None = None
    """The same at half the temperature, where the advantages need to know how sharp it was."""
    reference: ScoreFn | None = None
    teacher: ScoreFn | None = None
    """Whoever reads hindsight in place of the prompts, where a loss compares sampled tokens."""
    top: TopFn | None = None
    """The teacher, with hindsight or without, where a loss compares its likeliest tokens."""
    values: ScoreFn | None = None
    known: Mapping[str, Mapping[Field, Sequence[Tensor]]] = field(default_factory=dict)
    """What somebody has said before, by rollout_id: a tensor for each sequence of the rollout. A
    field that is known of all rollouts of a batch is not asked for again."""

    def scorers(self) -> list[tuple[Field, ScoreFn]]:
        """Those who are there, with the field that each of them writes."""
        scorers = {
            Field.OLD_LOGP: self.old,
            Field.SHARP_LOGP: self.sharp,
            Field.REF_LOGP: self.reference,
            Field.VALUE: self.values,
        }
        return [(name, score) for name, score in scorers.items() if score is not None]


def score_group(
    rollouts: Sequence[Rollout], version: int, scoring: Scoring
) -> dict[str, dict[Field, list[Tensor]]]:
    """What `scoring` says of rollouts before their batch is complete, as `Scoring.known`."""
    samples = _scored(rollouts, samples_of(rollouts, version), scoring)
    found: dict[str, dict[Field, list[Tensor]]] = {}
    rest = iter(samples)
    for rollout in rollouts:
        own = list(islice(rest, len(rollout.sequences)))
        found[rollout.rollout_id] = {
            name: [torch.tensor(sample.fields[name]) for sample in own]
            for name, _ in scoring.scorers()
        }
    return found


def build_batch(
    groups: Sequence[Sequence[Rollout]],
    spec: AlgorithmSpec,
    *,
    max_tokens: int,
    version: int,
    scoring: Scoring | None = None,
    num_minibatches: int = 1,
    scaffold: Scaffold | None = None,
) -> TrainBatch:
    """Samples with advantages and weights, one for each sequence of each rollout. A rollout without
    an action token counts among the others of its group and batch, and carries no gradient itself.

    `max_tokens` is the length limit of a sequence (the overlong penalty ends there), `version` the
    policy that will be updated. Advantages are of the whole batch; each of `num_minibatches`, whole
    rollouts in their order, has weights of its own. `scaffold` tells what an environment said from
    what the chat template put around it (ECHO); without it all counts that follows a turn.
    `ValueError` names a rollout whose rewards, metrics, log-probs or advantages are not finite.
    """
    scoring = Scoring() if scoring is None else scoring
    rollouts = [rollout for group in groups for rollout in group]
    metrics = batch_metrics(rollouts, spec) | staleness_metrics(rollouts, version)
    for rollout in rollouts:
        check_rollout(rollout)
    probe = _first_group(rollouts, version)
    if spec.dynamic_sampling:
        rollouts = _with_signal(rollouts, spec)
    if spec.has_hindsight:
        judged = with_hindsight(rollouts)
        metrics["num_without_hindsight"] = float(len(rollouts) - len(judged))
        rollouts = judged
    split_R = minibatch_of_rollouts(rollouts, num_minibatches)
    scored = (
        _scored_samples(rollouts, spec, scoring, max_tokens, version, split_R) if rollouts else []
    )
    owned = [one for one in _owned(rollouts, scored, split_R) if any(one.sample.loss_mask)]
    samples = [one.sample for one in owned]
    check_fields(samples)
    if is_proportional_to_advantage(spec):
        owned = [one for one in owned if any(one.sample.fields[Field.ADVANTAGE])]
    metrics["num_trained_rollouts"] = float(len({one.place[0] for one in owned}))
    trained = [one.sample for one in owned]
    metrics["trained_tokens"] = float(sum(sum(sample.loss_mask) for sample in trained))
    if spec.observation_coef:
        trained = _with_observations(rollouts, owned, scaffold)
        shares = [share for sample in trained for share in sample.fields[Field.OBSERVATION]]
        metrics["observed_tokens"] = float(sum(share > 0 for share in shares))
    return TrainBatch(
        samples=trained,
        critic_samples=samples if scoring.values is not None else [],
        probe=probe,
        loss_fn=PolicyLoss(spec),
        metrics=metrics,
        places=[one.place for one in owned],
        stats=_token_stats(rollouts, scored),
        minibatch_of=[one.minibatch for one in owned],
    )


def minibatch_of_rollouts(rollouts: Sequence[Rollout], num_minibatches: int) -> list[int]:
    """The minibatch of each rollout: runs of equal length, of whole groups where there are enough
    groups."""
    groups = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
    if len(groups) < num_minibatches:
        return [i * num_minibatches // len(rollouts) for i in range(len(rollouts))]
    of_group = {group: i * num_minibatches // len(groups) for i, group in enumerate(groups)}
    return [of_group[rollout.group_id] for rollout in rollouts]


class _Owned(NamedTuple):
    """A sample, which sequence of which rollout it is, and its minibatch."""

    sample: Sample
    place: tuple[str, int]
    minibatch: int


def _owned(
    rollouts: Sequence[Rollout], scored: Sequence[Sample], split_R: Sequence[int]
) -> list[_Owned]:
    places = [
        ((rollout.rollout_id, i), minibatch)
        for rollout, minibatch in zip(rollouts, split_R, strict=True)
        for i in range(len(rollout.sequences))
    ]
    return [_Owned(sample, *place) for sample, place in zip(scored, places, strict=True)]


def _token_stats(rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> dict[str, TokenStats]:
    """What the batch says about the tokens of each rollout; 0 where the loss mask is 0."""
    names = {
        Field.ADVANTAGE: "advantage",
        Field.VALUE: "value",
        Field.REF_LOGP: "ref_logp",
        Field.TEACHER_LOGP: "teacher_logp",
    }
    stats = {rollout.rollout_id: TokenStats() for rollout in rollouts}
    owners = (one.rollout_id for one in rollouts for _ in one.sequences)
    for owner, sample in zip(owners, samples, strict=True):
        for written, name in names.items():
            if written in sample.fields:
                stats[owner].values.setdefault(name, []).append(list(sample.fields[written]))
    return stats


def _with_observations(
    rollouts: Sequence[Rollout], owned: Sequence[_Owned], scaffold: Scaffold | None
) -> list[Sample]:
    """The samples with the tokens of observations in their loss masks, each with the same share of
    a cross-entropy over all of its minibatch."""
    by_id = {rollout.rollout_id: rollout.sequences for rollout in rollouts}
    found = [_observations(by_id[one.place[0]][one.place[1]], scaffold) for one in owned]
    totals: Counter[int] = Counter()
    for one, observed in zip(owned, found, strict=True):
        totals[one.minibatch] += sum(observed)
    shares = [1 / max(totals[one.minibatch], 1) for one in owned]
    return [
        replace(
            one.sample,
            loss_mask=[int(m or o) for m, o in zip(one.sample.loss_mask, observed, strict=True)],
            fields={**one.sample.fields, Field.OBSERVATION: [share * o for o in observed]},
        )
        for one, observed, share in zip(owned, found, shares, strict=True)
    ]


def _observations(sequence: Branch, scaffold: Scaffold | None) -> list[int]:
    """1 for the tokens of what a turn of the policy was answered, before its next."""
    is_observed = [0] * len(sequence.tokens)
    for span in sequence.turn_spans:
        place = slice(span.action_end, span.observation_end)
        tokens = sequence.tokens[place]
        is_observed[place] = [1] * len(tokens) if scaffold is None else scaffold.said(tokens)
    return [o if not m else 0 for o, m in zip(is_observed, sequence.loss_mask, strict=True)]


def action_mask(sample: Sample) -> list[int]:
    """1 for the tokens that the policy sampled, of a sample that may have observations too."""
    observed = sample.fields.get(Field.OBSERVATION)
    if observed is None:
        return sample.loss_mask
    return [m if not o else 0 for m, o in zip(sample.loss_mask, observed, strict=True)]


def is_proportional_to_advantage(spec: AlgorithmSpec) -> bool:
    """True if a sample whose advantages are all 0 has a gradient of exactly 0, so that leaving it
    out (after the weights of the whole batch are computed) changes nothing but the time."""
    terms = (spec.kl_coef, spec.entropy_coef, spec.distill_coef, spec.observation_coef)
    return spec.loss not in (*DISTILLS, "kl_cov") and not is_own(spec.loss) and not any(terms)


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
            kind=kind_of(rollout.task_id),
        )
        for rollout in rollouts
        for sequence in rollout.sequences
    ]


def _rollout_ids(rollouts: Sequence[Rollout]) -> Tensor:
    """[S] the place of each sample's rollout."""
    counts = torch.tensor([len(rollout.sequences) for rollout in rollouts], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(rollouts)), counts)


def _first_group(rollouts: Sequence[Rollout], version: int) -> list[Sample]:
    samples = [sample for sample in samples_of(rollouts, version) if any(sample.loss_mask)]
    return [sample for sample in samples if sample.group == samples[0].group]


def _with_signal(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> list[Rollout]:
    """Keep the rollouts of groups whose members earned unlike rewards."""
    keep_R = has_signal([earned(spec, r) for r in rollouts], [r.group_id for r in rollouts])
    return [r for r, keep in zip(rollouts, keep_R, strict=True) if keep]


def _scored_samples(
    rollouts: list[Rollout],
    spec: AlgorithmSpec,
    scoring: Scoring,
    max_tokens: int,
    version: int,
    split_R: Sequence[int],
) -> list[Sample]:
    """A sample of each sequence of each rollout, with what the loss reads."""
    samples = _scored(rollouts, samples_of(rollouts, version), scoring)
    samples = _taught(rollouts, samples, spec, scoring)
    batch = _advantage_batch(rollouts, samples, spec, max_tokens)
    lengths = [len(sample.tokens) for sample in samples]
    advantage_T, return_T = compute_advantages(spec, batch)
    _check_advantages(rollouts, spec, batch, advantage_T)
    weight_T = _token_weights(rollouts, spec, batch, split_R)
    samples = with_field(samples, Field.ADVANTAGE, advantage_T.split(lengths))
    if return_T is not None:
        samples = with_field(samples, Field.RETURN, return_T.split(lengths))
    if spec.chosen_share:
        assert batch.old_logp_T is not None, "the trainer's, or those of the rollouts"
        chosen_T = choose_by_covariance(spec, advantage_T, batch.old_logp_T, batch.mask_T)
        samples = with_field(samples, Field.CHOSEN, chosen_T.split(lengths))
    return with_field(samples, Field.WEIGHT, weight_T.split(lengths))


def _check_advantages(
    rollouts: Sequence[Rollout], spec: AlgorithmSpec, batch: AdvantageBatch, advantage_T: Tensor
) -> None:
    """`ValueError` names a rollout whose advantage is not finite: of a function of the user's, or
    of numbers too large for fp32."""
    is_bad_T = ~advantage_T.isfinite() & batch.mask_T.bool()
    if is_bad_T.any():
        place = int(is_bad_T.nonzero()[0])
        owner = rollouts[int(batch.rollout_of_token[place])]
        raise ValueError(
            f"rollout {owner.rollout_id}: its advantage is {advantage_T[place]:g} "
            f"(--rl.algorithm.advantage {spec.advantage}, reward {owner.total_reward:g}); it must "
            "be a finite number"
        )


def _token_weights(
    rollouts: Sequence[Rollout],
    spec: AlgorithmSpec,
    batch: AdvantageBatch,
    split_R: Sequence[int],
) -> Tensor:
    """[T] those of each minibatch, whose tokens are in one piece, over that minibatch."""
    rollout_ids_S = _rollout_ids(rollouts)
    prompt_ids_S = index_by_id(batch.group_ids)[0][rollout_ids_S]
    own_ids_S = index_by_id([r.rollout_id for r in rollouts])[0][rollout_ids_S]
    minibatch_S = torch.tensor(split_R)[rollout_ids_S]
    minibatch_T = minibatch_S[batch.sequence_ids_T]
    weights = []
    for minibatch in minibatch_S.unique():
        here_S, here_T = minibatch_S == minibatch, minibatch_T == minibatch
        sequence_ids_T = batch.sequence_ids_T[here_T]
        weights.append(
            token_weights(
                spec.aggregation,
                batch.mask_T[here_T],
                sequence_ids_T - int(here_S.nonzero()[0]),
                int(here_S.sum()),
                rollout_ids_S=own_ids_S[here_S],
                prompt_ids_S=prompt_ids_S[here_S],
                constant_length=spec.constant_length,
            )
        )
    return torch.cat(weights)


def _scored(rollouts: Sequence[Rollout], samples: list[Sample], scoring: Scoring) -> list[Sample]:
    """The samples with the word of everybody whom the advantages or the loss depend on."""
    for name, score in scoring.scorers():
        said = [scoring.known.get(rollout.rollout_id, {}).get(name) for rollout in rollouts]
        if all(one is not None for one in said):
            tensors: Sequence[Tensor] = [tensor for one in said for tensor in one or ()]
        else:
            tensors = score(samples)
        samples = with_field(samples, name, tensors)
        values = iter([sample.fields[name] for sample in samples])
        for rollout in rollouts:
            own = list(islice(values, len(rollout.sequences)))
            check_logps(rollout, own, f"the model behind {str(name)!r}")
    return samples


def _taught(
    rollouts: list[Rollout], samples: list[Sample], spec: AlgorithmSpec, scoring: Scoring
) -> list[Sample]:
    """The samples with the word of a teacher that reads hindsight, or that names its likeliest
    tokens."""
    if scoring.teacher is not None:
        judged = scoring.teacher(teacher_samples(rollouts, samples))
        values = aligned(rollouts, samples, judged)
        _check_teacher(rollouts, values)
        samples = with_field(samples, Field.TEACHER_LOGP, values)
    if scoring.top is not None:
        if spec.has_hindsight:
            tops = scoring.top(teacher_samples(rollouts, samples))
            tops = aligned_top(rollouts, samples, tops)
        else:
            tops = scoring.top(samples)
        _check_teacher(rollouts, [top.logps.sum(1) for top in tops])
        samples = [replace(one, top=top) for one, top in zip(samples, tops, strict=True)]
    return samples


def _check_teacher(rollouts: Sequence[Rollout], values: Sequence[Tensor]) -> None:
    given = iter([value.tolist() for value in values])
    for rollout in rollouts:
        check_logps(rollout, list(islice(given, len(rollout.sequences))), "the teacher")


def _advantage_batch(
    rollouts: list[Rollout], samples: list[Sample], spec: AlgorithmSpec, max_tokens: int
) -> AdvantageBatch:
    # Turns are rewarded one by one, or their rewards belong to the outcome.
    is_by_turn = spec.reward_level == "turn"
    rewards = [r.reward if is_by_turn else r.total_reward for r in rollouts]
    reward_R = torch.tensor(rewards, dtype=torch.float32)
    if spec.overlong_buffer:
        longest_R = torch.tensor([max(len(s.tokens) for s in r.sequences) for r in rollouts])
        reward_R = reward_R + overlong_penalty(longest_R, max_tokens, spec.overlong_buffer)
    old_logp = _field(samples, Field.OLD_LOGP)
    lengths_S = torch.tensor([len(sample.tokens) for sample in samples])
    return AdvantageBatch(
        reward_R=reward_R,
        group_ids=[r.group_id for r in rollouts],
        mask_T=torch.tensor([m for s in samples for m in s.loss_mask], dtype=torch.float32),
        sequence_ids_T=torch.repeat_interleave(torch.arange(len(samples)), lengths_S),
        rollout_ids_S=_rollout_ids(rollouts),
        turns=_turns(rollouts, reward_R) if is_by_turn else None,
        reward_parts=_reward_parts(rollouts, spec) if spec.reward_parts else None,
        old_logp_T=_field(samples, Field.ROLLOUT_LOGP) if old_logp is None else old_logp,
        sharp_logp_T=_field(samples, Field.SHARP_LOGP),
        ref_logp_T=_field(samples, Field.REF_LOGP),
        value_T=_field(samples, Field.VALUE),
    )


def _reward_parts(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> dict[str, Tensor]:
    """[R] each part of the reward that the algorithm names. `ValueError` for a rollout without."""
    found = {}
    for name in spec.part_weights:
        values = [part_of(rollout, name) for rollout in rollouts]
        for rollout, value in zip(rollouts, values, strict=True):
            has = [key.removeprefix(PART) for key in rollout.metrics if key.startswith(PART)]
            if value is None:
                raise ValueError(
                    f"rollout {rollout.rollout_id}: its reward has no part {name!r}; there are: "
                    f"{', '.join(sorted(has)) or 'none'}; correct --rl.algorithm.reward-parts"
                )
            if name == TURN_REWARDS in has:
                raise ValueError(
                    f"rollout {rollout.rollout_id}: its reward has a part {name!r}, which is what "
                    "gdpo calls the rewards of turns; give the part another name"
                )
        found[name] = torch.tensor(values, dtype=torch.float32)
    return found


def _turns(rollouts: list[Rollout], outcome_R: Tensor) -> Turns:
    """Rewards of turns, the outcome's added to the last.

    The turns of a rollout are those of its histories and then its own: each of these sequences has
    all the rewards, so that a turn in one of them shares in what was earned in later ones. A
    sequence beside is a single turn that earned all that the rollout did; what its own turns
    earned belongs to the outcome. A sequence without turn rewards has zeros, one without spans is a
    single turn. `ValueError` for another number of turn rewards than turns.
    """
    all_rewards, index = [], []
    states: list[list[Hashable]] = []
    for rollout, outcome in zip(rollouts, outcome_R.tolist(), strict=True):
        beside = [branch for branch in rollout.branches if not branch.is_history]
        chain = [branch for branch in rollout.branches if branch.is_history]
        own = rollout.sequences[0]
        rewards = [reward for one in (*chain, own) for reward in _turn_rewards(one, rollout)]
        rewards[-1] += outcome + sum(sum(branch.turn_rewards) for branch in beside)
        first = {}  # the place of each sequence's first turn in the whole
        place = 0
        for one in (*chain, own):
            first[id(one)] = place
            place += max(len(one.turn_spans), 1)
        seen = [state for one in (*chain, own) for state in _states(one)]
        for one in (own, *rollout.branches):
            if id(one) in first:
                all_rewards.append(rewards)
                states.append(seen)
                index += _turn_index(one, first[id(one)])
            else:
                all_rewards.append([sum(rewards)])
                states.append([])
                index += [0 if m else -1 for m in one.loss_mask]
    return Turns(rewards=all_rewards, index_T=torch.tensor(index), states=states)


def _states(sequence: Branch) -> list[Hashable]:
    """The tokens that the policy read before each turn and after the one before it."""
    ends = [0, *(span.action_end for span in sequence.turn_spans)]
    starts = [span.action_start for span in sequence.turn_spans] or [0]
    return [tuple(sequence.tokens[end:start]) for end, start in zip(ends, starts, strict=False)]


def _turn_rewards(sequence: Branch, rollout: Rollout) -> list[float]:
    num_turns = len(sequence.turn_spans) or 1
    rewards = list(sequence.turn_rewards) or [0.0] * num_turns
    if len(rewards) != num_turns:
        raise ValueError(
            f"rollout {rollout.rollout_id}: {len(rewards)} turn rewards for {num_turns} "
            "turns; give one for each turn, or none at all"
        )
    return rewards


def _turn_index(sequence: Branch, first: int) -> list[int]:
    """The turn of each action token, where the sequence's first one is number `first`."""
    spans = [(span.action_start, span.action_end) for span in sequence.turn_spans]
    turn_of = [-1] * len(sequence.tokens)
    for turn, (start, end) in enumerate(spans or [(0, len(sequence.tokens))], first):
        turn_of[start:end] = [turn] * (end - start)
    return [t if m else -1 for t, m in zip(turn_of, sequence.loss_mask, strict=True)]


def with_field(samples: Sequence[Sample], name: Field, values: Sequence[Tensor]) -> list[Sample]:
    """The samples with one more field, a number for each token."""
    return [
        replace(sample, fields={**sample.fields, name: value.tolist()})
        for sample, value in zip(samples, values, strict=True)
    ]


def _field(samples: list[Sample], name: Field) -> Tensor | None:
    """The field of all samples' tokens, one after the other."""
    if name not in samples[0].fields:
        return None
    return torch.tensor([value for s in samples for value in s.fields[name]], dtype=torch.float32)


def batch_metrics(rollouts: Sequence[Rollout], spec: AlgorithmSpec) -> dict[str, float]:
    """Count and average over the rollouts of a batch; no means where there is no rollout."""
    count = len(rollouts)
    metrics = {
        "num_rollouts": float(count),
        "action_tokens": float(sum(r.num_action_tokens for r in rollouts)),
        "total_tokens": float(sum(r.num_tokens for r in rollouts)),
    }
    if rollouts:
        metrics["reward"] = sum(r.total_reward for r in rollouts) / count
        metrics["success"] = sum(r.is_success for r in rollouts) / count
        metrics["turns"] = sum(r.num_turns for r in rollouts) / count
        for status in (Status.TRUNCATED_TURN, Status.TRUNCATED_CONTEXT):
            metrics[f"{status}_fraction"] = sum(r.status == status for r in rollouts) / count
    metrics |= episode_metrics(rollouts)
    teaching = {rollout.group_id for rollout in _with_signal(rollouts, spec)}
    metrics["groups_with_signal"] = float(len(teaching))
    return metrics


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What environments counted, as env/NAME over all rollouts, and the parts of rewards, as
    reward/NAME over those that have them."""
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found.setdefault(name, []).append(value)
    return {
        name if name.startswith("reward/") else f"env/{name}": sum(values)
        / (len(values) if name.startswith("reward/") else len(rollouts))
        for name, values in sorted(found.items())
    }


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Measure how many versions ago the tokens were sampled; nothing where there are none."""
    sampled = [v for r in rollouts for sequence in r.sequences for v in sequence.versions if v >= 0]
    ages = [version - v for v in sampled]
    if not ages:
        return {}
    return {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": float(max(ages)),
        "stale_fraction": sum(age > 0 for age in ages) / len(ages),
        **{f"staleness_tokens/{age}": float(n) for age, n in sorted(Counter(ages).items())},
    }


def merge_steps(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The engine's results of several minibatches as those of one: sums and counts are added, all
    else is averaged."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.items():
            found.setdefault(name, []).append(value)
    return {
        name: sum(values) / (1 if name.endswith(("_sum", "_count")) else len(values))
        for name, values in found.items()
    }


def per_action_token(result: Mapping[str, float]) -> dict[str, float]:
    """The engine's sums of statistics as means per action token, under their names without _sum.

    Maxima do not survive a sum over micro-batches: they are left out (see `logp_gap`).
    """
    count = max(result.get("action_count", 0.0), 1.0)
    means = {n.removesuffix("_sum"): v / count for n, v in result.items() if n.endswith("_sum")}
    others = {n: v for n, v in result.items() if not n.endswith(("_sum", "_max", "_count"))}
    return {**others, **means}


def logp_gap(samples: Sequence[Sample], trainer_logps: Sequence[Tensor]) -> dict[str, float]:
    """Measure how far the trainer's log-probs (nats) are from those of the rollouts.

    `logp_gap_*` is an error: it covers the `logp_gap_tokens` tokens that the very weights of the
    trainer sampled, and should be 0. `drift_*` covers the stale ones, whose policy has moved on
    since. Means and maxima of |difference|, and the k3 estimate of the KL; none of no tokens.
    """
    differences, staleness = [], []
    for sample, trainer_logp in zip(samples, trainer_logps, strict=True):
        is_action = torch.tensor(action_mask(sample), dtype=torch.bool)
        rollout_logp = torch.tensor(sample.fields[Field.ROLLOUT_LOGP], dtype=torch.float32)
        differences.append((trainer_logp.float().cpu() - rollout_logp)[is_action])
        staleness.append(torch.tensor(sample.fields[Field.STALENESS])[is_action])
    difference_A, staleness_A = torch.cat(differences), torch.cat(staleness)
    gap_A, drift_A = difference_A[staleness_A == 0], difference_A[staleness_A != 0]
    return {
        "logp_gap_tokens": float(gap_A.numel()),
        **_spread("logp_gap", gap_A),
        **_spread("drift", drift_A),
    }


def _spread(name: str, difference_A: Tensor) -> dict[str, float]:
    if not difference_A.numel():
        return {}
    return {
        f"{name}_max": difference_A.abs().max().item(),
        f"{name}_mean": difference_A.abs().mean().item(),
        f"{name}_kl": (difference_A.exp() - 1 - difference_A).mean().item(),
    }
