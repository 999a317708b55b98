"""`AlgorithmSpec`: one frozen record that says which algorithm this is.

The default is GRPO, whose options and departures from the paper stand in nanorl/grpo.py; each group
of the others belongs to the option that reads it (option_groups.py).

By default the clip is around the trainer's policy o and every token is weighed by min(π_o/μ, 2),
what verl calls `token_is`. It holds for tokens of any staleness, and where nothing is stale the
weights are 1. The other usual choice, the ratio against μ itself (`old_policy="rollout"`), drops
every stale token that has drifted past the clip, so it learns less the staler the data.

The recipes that have a name (`--algorithm gspo`) are in recipes.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from pkgutil import resolve_name
from typing import get_args

from nanorl.algorithms import option_groups as groups
from nanorl.algorithms.modifier import Modifier
from nanorl.algorithms.option_groups import (
    Advantage,
    Aggregation,
    Correction,
    Loss,
    OldPolicy,
    check_choice,
    check_own,
    is_own,
)
from nanorl.bounds import check_number
from nanorl.grpo import GRPO, Field


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(  # options stand in the order of the lines, from the last one up
    groups.LengthOptions,
    groups.TruncationOptions,
    groups.OverlongOptions,
    groups.SamplingOptions,
    groups.CorrectionOptions,
    groups.ReturnOptions,
    groups.ObservationOptions,
    groups.EntropyMaskOptions,
    groups.EntropyOptions,
    groups.HindsightOptions,
    groups.TeacherOptions,
    groups.RewardKLOptions,
    groups.KLOptions,
    groups.CovarianceOptions,
    groups.SapoOptions,
    groups.PassAtKOptions,
    groups.HierarchyOptions,
    groups.TurnOptions,
    groups.RewardPartOptions,
):
    """Everything that decides a gradient, given rollouts."""

    advantage: Advantage | str = "grpo"
    """How rewards become advantages; "none" gives 0 (pure distillation). A function of yours as
    mine.py:name, of (reward_R, group_ids), or of the whole batch."""
    loss: Loss | str = "ppo"
    """The per-token policy loss; a function of yours as mine.py:name, of (logp_T, batch)."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, over the whole optimizer batch."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 − clip_low; None: 0.2, for gspo 3e-4, for cispo 1 (not). For
    gmpo at e^−clip_low: 0.4. For dppo_tv and dppo_kl how far a probability may fall: 0.15, and
    0.05 nats."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + clip_high; None: 0.2, for gspo 4e-4, for cispo 0.28. For
    gmpo at e^clip_high: 0.4. For dppo_tv and dppo_kl how far a probability may rise: 0.15, and
    0.05 nats."""
    old_policy: OldPolicy = "recomputed"
    """Whose log-probs the ratio is against: the trainer's, or (o := μ) those of the rollout, or
    between μ and θ, the nearer to θ the staler the token, which no pass over the batch computes."""
    correction: Correction = "auto"
    """Off-policy weight from w = π_o/μ; auto: tis, or none where the loss has μ in it already
    (old_policy rollout, decoupled_ppo, opd)."""

    def __post_init__(self) -> None:
        check_own("advantage", self.advantage, get_args(Advantage))
        check_own("loss", self.loss, get_args(Loss))
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_choice("correction", self.correction, get_args(Correction))
        check_choice("old_policy", self.old_policy, get_args(OldPolicy))
        _check_grpo(self)
        _check_sense(self)
        super().__post_init__()

    @cached_property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The modifiers that act in the stages of a batch, in the order of the options."""
        paths = [owner.modifier(self) for owner in self.owners("modifier")]
        return tuple(resolve_name(path)(self) for path in paths if path)

    @cached_property
    def clip(self) -> tuple[float, float]:
        """(clip_low, clip_high), those of the loss where none are given."""
        low, high = self.loss_part.clip
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @cached_property
    def weighs_by_itself(self) -> bool:
        """True if the ratio of the loss is against μ already, so that w must not come in again."""
        return self.old_policy == "rollout" or self.loss_part.is_against_sampler

    @cached_property
    def resolved_correction(self) -> str:
        """The correction, "auto" replaced by what it stands for."""
        if self.correction != "auto":
            return self.correction
        return "none" if self.weighs_by_itself else "tis"

    @cached_property
    def is_proportional(self) -> bool:
        """True if a sample whose advantages are all 0 has a gradient of exactly 0."""
        terms = (self.kl_coef, self.entropy_coef, self.distill_coef, self.observation_coef)
        return self.loss_part.is_proportional and not any(terms)

    @cached_property
    def is_foreseeable(self) -> bool:
        """False for a loss of the user's own, which is called once."""
        return not is_own(self.loss)

    @cached_property
    def acting(self) -> GRPO:
        """GRPO itself where these options ask for nothing else, or this record."""
        parts = (self.advantage, self.loss, self.aggregation, self.old_policy)
        is_grpo = parts == ("grpo", "ppo", "token_mean", "recomputed")
        if self.modifiers or not is_grpo or self.resolved_correction != "tis":
            return self
        return GRPO(**{one.name: getattr(self, one.name) for one in fields(GRPO)})

    # What a run has to open, and to refuse.

    @property
    def answers_for_staleness(self) -> bool:
        """True if tokens that another policy sampled are weighed, clipped or rejected for it."""
        has_ratio = self.weighs_by_itself and self.loss_part.has_ratio
        return has_ratio or self.resolved_correction != "none"

    @property
    def compares_members(self) -> bool:
        """True if a group of one rollout has nothing to learn from."""
        is_of_group = self.turn_peers == "group" and self.advantage_part.compares_members
        return is_of_group or self.needs_success or self.dynamic_sampling

    @property
    def needs_reference(self) -> bool:
        """True if there is a reference (or teacher) policy, whoever reads what of it."""
        is_policy = self.has_hindsight and self.hindsight_teacher != "reference"
        return self.needs_ref_logp or (self.loss_part.is_distillation and not is_policy)

    @property
    def needs_ref_logp(self) -> bool:
        """True if the reference's log-probs of the sampled tokens are read, by their own prompt."""
        coefs = (self.kl_coef, self.kl_reward_coef, self.distill_coef)
        return any(coef != 0 for coef in coefs) or (self.loss == "opd" and not self.has_hindsight)

    @property
    def needs_critic(self) -> bool:
        """True if the advantages read a critic's values."""
        return self.advantage_part.reads == Field.VALUE

    @property
    def needs_old_logp(self) -> bool:
        """True if the advantages read the old policy's log-probs, before any loss is computed. A
        loss alone never asks for them: see `LossBatch.old_logp_T`."""
        return self.kl_reward_coef != 0 or self.distill_coef != 0 or self.needs_sharp_logp

    @property
    def needs_sharp_logp(self) -> bool:
        """True if the advantages read the old policy's log-probs at half the temperature."""
        return self.advantage_part.reads == Field.SHARP_LOGP


def _check_grpo(spec: AlgorithmSpec) -> None:
    """The numbers of the base. Clips of sequences are narrow, for wide ones would never act."""
    if spec.dual_clip is not None:
        check_number("dual_clip=", spec.dual_clip, 1, is_open=True)
    if spec.constant_length is not None:
        check_number("constant_length=", spec.constant_length, 1)
    if (spec.aggregation == "constant") != (spec.constant_length is not None):
        raise ValueError(
            f"constant_length={spec.constant_length} with aggregation={spec.aggregation!r}: "
            "give it exactly with 'constant'"
        )
    low, high = spec.clip
    is_gspo, why = spec.loss == "gspo", "a sequence's ratio is a mean over its tokens, near 1"
    check_number("clip_low=", low, 0, 0.1 if is_gspo else 1, why if is_gspo else "")
    check_number("clip_high=", high, 0, 0.1 if is_gspo else math.inf, why if is_gspo else "")


def _check_sense(spec: AlgorithmSpec) -> None:
    """Refuse options of several groups that would be ignored, count twice, or learn nothing."""
    if spec.reward_parts and (spec.reward_level == "turn" or spec.overlong_buffer):
        raise ValueError(
            "advantage='gdpo' reads the parts of the outcome: set reward_level='outcome' and "
            "overlong_buffer=0"
        )
    if spec.old_policy == "rollout" and (
        spec.resolved_correction != "none" or spec.veto_below > 0 or spec.loss == "decoupled_ppo"
    ):
        raise ValueError(
            "old_policy='rollout' makes w = π_o/μ = 1: set correction='none', veto_below=0 and "
            "a loss other than decoupled_ppo, or old_policy='recomputed'"
        )
    if spec.weighs_by_itself and spec.resolved_correction != "none":
        raise ValueError(
            f"loss={spec.loss!r} already weighs by the sampling policy: "
            f"correction={spec.correction!r} would apply it twice; set correction='none'"
        )
    terms = (spec.kl_coef, spec.distill_coef, spec.entropy_coef, spec.observation_coef)
    if spec.advantage == "none" and not spec.loss_part.is_distillation and not any(terms):
        raise ValueError(
            "advantage='none': nothing is left to learn from; choose loss='opd' or set "
            "distill_coef, kl_coef, entropy_coef or observation_coef"
        )
    if spec.has_hindsight and spec.dynamic_sampling:
        raise ValueError(
            f"dynamic_sampling with hindsight={spec.hindsight!r}: hindsight chooses the rollouts "
            "itself; set dynamic_sampling=False"
        )
