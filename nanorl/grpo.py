"""GRPO, the algorithm of a run that names no other, as a record, and what its stages hand on.

    rollouts → samples → advantages → weights → loss

batching.py walks this way once for each optimizer batch: group_advantage.py reads an
`AdvantageBatch`, policy_loss.py a `LossBatch`. `GRPO` says by name which estimator, loss and
weights they use, and has a method wherever another algorithm may change a stage.

Three policies meet in a loss: μ sampled the tokens, o is the trainer's when the batch came, θ is
being updated. The clip is around o, and every token is weighed by min(π_o/μ, 2): the decoupled
objective of AReaL (arXiv 2505.24298) with truncated weights (TIS). No forward pass is needed for o:
in the first step on a batch o is θ, and the later steps reuse the log-probs of the first.

What GRPO is here against its paper (DeepSeekMath, arXiv 2402.03300):

    tokens   every action token of the batch weighs the same (DAPO's token mean); the paper
             averages within each rollout first, which favours short ones
    KL       there is none, so no reference model is held; the paper adds 0.04·k3
    std      the sample standard deviation of the group; a group of one learns nothing
    clip     a token with A < 0 costs at most 3·|A| (dual clip, arXiv 1912.09729)
    turns    tokens that the model did not sample, a tool's output, have no loss

Left out: the options of all other algorithms (algorithms/spec.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache, cached_property
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nanorl.types import Rollout

GroupEstimator = Callable[["Tensor", Sequence[Hashable]], "Tensor"]
"""([N] rewards, the group of each) -> [N] advantages."""

Term = tuple["Tensor", dict[str, "Tensor"]]
"""A sum and its statistics."""

if TYPE_CHECKING:  # options are read before anything is computed, and torch takes seconds to import
    from torch import Tensor

    from nanoengine.packing import Sample


_PARTS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("advantage", "grpo"): "nanorl.group_advantage:of_groups",
        ("loss", "ppo"): "nanorl.policy_loss:ClippedLoss",
        ("correction", "tis"): "nanorl.policy_loss:truncated",
        ("old_policy", "recomputed"): "nanorl.policy_loss:recomputed",
        ("aggregation", "token_mean"): "nanorl.batching:token_mean",
    }
)


@cache
def part(kind: str, name: str) -> Any:
    """The part that an option of `GRPO` names. The parts of GRPO are in the table above, all others
    in a registry that is read only where one of them is asked for."""
    own = _PARTS.get((kind, name))
    return resolve_name(own or resolve_name("nanorl.algorithms.registry:path_of")(kind, name))


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Holds what decides a gradient, given rollouts. `algorithms.spec.AlgorithmSpec` has all other
    options too, algorithms/registry.py all names.

    GRPO(clip_high=0.28, dual_clip=None)
    """

    advantage: str = "grpo"
    loss: str = "ppo"
    aggregation: str = "token_mean"
    constant_length: int | None = None
    """Tokens that aggregation "constant" divides by; needed there and nowhere else."""
    clip_low: float | None = None  # 0.2
    clip_high: float | None = None  # 0.2
    dual_clip: float | None = 3.0
    """Bound c on the loss of negative advantages (ppo only); None turns it off."""
    old_policy: str = "recomputed"
    correction: str = "auto"
    correction_cap: float = 2.0
    """C of tis, mis and sequence_tis."""

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{option.name}={value}: must be a finite number")

    # Computed once: the loss of every micro-batch reads them.

    @cached_property
    def clip(self) -> tuple[float, float]:
        """(clip_low, clip_high), 0.2 where none is given."""
        low, high = self.clip_low, self.clip_high
        return 0.2 if low is None else low, 0.2 if high is None else high

    @cached_property
    def resolved_correction(self) -> str:
        """The correction, "auto" replaced by what it stands for."""
        return "tis" if self.correction == "auto" else self.correction

    @cached_property
    def is_proportional(self) -> bool:
        """True if a sample whose advantages are all 0 has a gradient of exactly 0, so that leaving
        it out (after the weights of the whole batch are computed) changes nothing but the time."""
        return True

    @cached_property
    def is_foreseeable(self) -> bool:
        """True if calling the loss twice, once before the forward pass, does no harm."""
        return True

    # The places where other algorithms change the way of a batch, in their order. Here nothing is
    # changed; algorithms/modifier.py says who does.

    def earned(self, rollout: Rollout) -> Hashable:
        """The earnings of a rollout, by which the members of a group are compared."""
        return rollout.total_reward

    def select(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[Rollout]:
        """The rollouts that take part."""
        return rollouts

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with other rewards than those of outcomes."""
        return batch

    def compare(self, estimator: GroupEstimator, batch: AdvantageBatch) -> Tensor | None:
        """[T] What the estimator says of other things than rollouts; None: it compares those."""
        return None

    def advantages(self, batch: AdvantageBatch, advantage_T: Tensor) -> Tensor:
        """The advantages after the estimator's."""
        return advantage_T

    def mark(
        self, samples: list[Sample], batch: AdvantageBatch, advantage_T: Tensor
    ) -> list[Sample]:
        """The samples with one more field for the loss."""
        return samples

    def finish(
        self,
        rollouts: Sequence[Rollout],
        owned: list[OwnedSample],
        scoring: BatchScorer | None,
        metrics: dict[str, float],
    ) -> list[OwnedSample]:
        """The samples that are trained on."""
        return owned

    def correct(self, weight_T: Tensor, log_w_T: Tensor, batch: LossBatch) -> Tensor:
        """The weights of tokens after the correction's."""
        return weight_T

    def token_loss(self, loss_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """The losses of action tokens with their regularisers."""
        return loss_T

    def terms(self, logp_T: Tensor, batch: LossBatch) -> list[Term]:
        """Sums that are added to the loss of a micro-batch."""
        return []


class Field(StrEnum):
    """A name in `Sample.fields` (nanoengine.packing), which holds a number for each token of a
    sample; there are no others. The engine packs, splits and shifts them with the tokens, and hands
    them to the loss as fp32 tensors.

        Sample(
            tokens=[5, 6, 7, 8],       # two of the prompt, two that the policy sampled
            loss_mask=[0, 0, 1, 1],
            fields={
                Field.ROLLOUT_LOGP: [0.0, 0.0, -0.5, -1.2],
                Field.STALENESS: [0.0, 0.0, 0.0, 0.0],
                Field.ADVANTAGE: [0.0, 0.0, 0.7, 0.7],
                Field.WEIGHT: [0.0, 0.0, 0.25, 0.25],
            },
        )

    Log-probs are nats of the tempered distribution. All but OBSERVATION are 0 where the policy did
    not sample, or are not read there. The last seven are written for other algorithms only.
    """

    ROLLOUT_LOGP = "rollout_logp"  # log μ; read by corrections, losses and `logp_gap`
    STALENESS = "staleness"  # versions ago that the token was sampled; read by `logp_gap`
    OLD_LOGP = "old_logp"  # log π_o, by `Scoring.old` or of the first step; read by losses
    ADVANTAGE = "advantage"  # A, by `build_batch`
    WEIGHT = "weight"  # the share of the token in the loss, by `build_batch`
    REF_LOGP = "ref_logp"  # log π_ref, by `Scoring.reference`; read by advantages and losses
    SHARP_LOGP = "sharp_logp"  # log π_o at half the temperature, by `Scoring.sharp`, for otb's Σπ²
    TEACHER_LOGP = "teacher_logp"  # log π_T that reads hindsight, by `Scoring.teacher`, for opd
    VALUE = "value"  # V before the update, by the critic; read by advantages and its loss
    RETURN = "return"  # the critic's target, by `build_batch`
    CHOSEN = "chosen"  # 1 for tokens chosen by their covariance (clip_cov, kl_cov) or entropy
    OBSERVATION = "observation"  # an observation's share in ECHO's loss, by `ObservationLoss`


ALWAYS = frozenset({Field.ROLLOUT_LOGP, Field.STALENESS, Field.ADVANTAGE, Field.WEIGHT})
"""Every sample of a finished batch has these; the others depend on the algorithm."""


@dataclass(frozen=True, kw_only=True)
class AdvantageBatch:
    """The whole optimizer batch, packed: T tokens of S sequences of R rollouts, a rollout's one
    after the other. Two rollouts of one task, of one and two action tokens after a prompt token:

        AdvantageBatch(
            reward_R=tensor([1.0, 0.0]),
            group_ids=["s0-g0", "s0-g0"],
            mask_T=tensor([0.0, 1.0, 0.0, 1.0, 1.0]),
            sequence_ids_T=tensor([0, 0, 1, 1, 1]),
        )

    Below `rollout_ids_S` stands what other algorithms read: log-probs and values of [T], parts of
    the reward ([R] each), rewards of turns (`algorithms.turn_rewards.Turns`).
    """

    reward_R: Tensor
    group_ids: Sequence[Hashable]
    mask_T: Tensor
    sequence_ids_T: Tensor
    rollout_ids_S: Tensor | None = None
    """The rollout of each sequence; None: every sequence is one."""
    turns: object | None = None
    reward_parts: Mapping[str, Tensor] | None = None
    old_logp_T: Tensor | None = None
    sharp_logp_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    value_T: Tensor | None = None

    @property
    def rollout_of_token(self) -> Tensor:
        """[T]"""
        ids_T = self.sequence_ids_T
        return ids_T if self.rollout_ids_S is None else self.rollout_ids_S[ids_T]


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """One micro-batch, packed. Sequences are whole; all tensors are [T] and without gradient,
    except `entropy_T` and `top_logp_TK`, which are of the policy being updated. Two sequences of
    two tokens:

        LossBatch(
            rollout_logp_T=tensor([0.0, -0.5, 0.0, -1.2]),
            advantage_T=tensor([0.0, 0.7, 0.0, -0.7]),
            mask_T=tensor([0.0, 1.0, 0.0, 1.0]),
            weight_T=tensor([0.0, 0.5, 0.0, 0.5]),
            sequence_ids_T=tensor([0, 0, 1, 1]),
            num_sequences=2,
        )

    `weight_T` is of the whole optimizer batch and holds the mask. `old_logp_T` is None in the first
    step on a batch: θ has not left o, its own log-probs are the old ones. The rest is what other
    algorithms read (`Field`); `teacher_top_logp_TK` are the teacher's log-probs of the K tokens
    that it holds likeliest, `top_logp_TK` the policy's of the same.
    """

    rollout_logp_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor
    weight_T: Tensor
    sequence_ids_T: Tensor
    num_sequences: int
    old_logp_T: Tensor | None = None
    entropy_T: Tensor | None = None
    staleness_T: Tensor | None = None
    ref_logp_T: Tensor | None = None
    teacher_logp_T: Tensor | None = None
    observation_T: Tensor | None = None
    chosen_T: Tensor | None = None
    top_logp_TK: Tensor | None = None
    teacher_top_logp_TK: Tensor | None = None


class BatchScorer(Protocol):
    """Models that say something of a batch before its advantages (algorithms/batch_scoring.py)."""

    def apply(self, spec: Any, rollouts: Sequence[Rollout], samples: list[Sample]) -> list[Sample]:
        """The samples with more fields: old log-probs, those of a reference, values."""
        ...


class OwnedSample(NamedTuple):
    """A sample, which sequence of which rollout it is, and its minibatch."""

    sample: Sample
    place: tuple[str, int]
    minibatch: int
