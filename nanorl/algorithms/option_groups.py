"""The options of `--rl.algorithm` by their owners: what each may be, and who acts for it.

Each group is a record of its own beside GRPO's. `check` refuses what it cannot be, and
`modifier` names the class that acts for it in the stages of a batch ("module:class", empty where
the option is off). Nothing here imports torch: options are read before anything is computed.
Next: spec.py, which puts the groups together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from nanorl.algorithms.modifier import Modified
from nanorl.algorithms.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    LOSSES,
    OLD_POLICIES,
    OWN_ADVANTAGE,
    OWN_LOSS,
    AdvantagePart,
    LossPart,
)
from nanorl.bounds import check_number
from nanorl.plugins import load_object

if TYPE_CHECKING:
    Advantage = str
    Loss = str
    Aggregation = str
    Correction = str
    OldPolicy = str
else:  # choices of an option are read off its type: those that the registry has
    Advantage = Literal[tuple(ADVANTAGES)]
    Loss = Literal[tuple(LOSSES)]
    Aggregation = Literal[tuple(AGGREGATIONS)]
    Correction = Literal[("auto", *CORRECTIONS)]
    OldPolicy = Literal[tuple(OLD_POLICIES)]
KLEstimator = Literal["k2", "k3", "rk3"]
RewardLevel = Literal["outcome", "turn"]
TurnPeers = Literal["group", "batch"]
DistillKL = Literal["reverse", "forward"]
Hindsight = Literal["none", "solution", "success", "feedback", "success_or_feedback"]
HindsightTeacher = Literal["policy", "reference", "average"]

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {name: part.bounds for name, part in CORRECTIONS.items() if part.bounds}
)
"""(correction_low, correction_high) of the corrections that have them."""

TURN_REWARDS = "turn_rewards"
"""The part of the reward that turns earned beside the others (gdpo)."""

DISTILLS = tuple(name for name, part in LOSSES.items() if part.is_distillation)
"""Losses that compare with a teacher, and with nothing else."""


def is_own(value: str) -> bool:
    """True if an advantage or a loss is the user's own function."""
    return value.endswith(".py") or ":" in value


def load_own(name: str, value: str) -> Callable[..., Any]:
    """The user's function. ValueError where there is none."""
    return load_object(value, what=f"rl.algorithm.{name}", known={}, fits=isfunction)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """`ValueError` unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def check_own(name: str, value: str, choices: Sequence[str]) -> None:
    """`ValueError` unless it is one of ours, or a function of the user's that can be loaded."""
    if is_own(value):
        load_own(name, value)
    else:
        check_choice(name, value, choices)


@dataclass(frozen=True, kw_only=True)
class OptionGroup(Modified):
    """The options of one owner; here none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for owner in self.owners("check"):
            owner.check(self)

    def owners(self, name: str) -> list[type[OptionGroup]]:
        """The groups of options that define a method, in the order of their options."""
        found = reversed(type(self).__mro__)
        return [one for one in found if issubclass(one, OptionGroup) and name in vars(one)]

    @property
    def advantage_part(self) -> AdvantagePart:
        """The declaration of the advantage estimator."""
        return ADVANTAGES.get(self.advantage, OWN_ADVANTAGE)

    @property
    def loss_part(self) -> LossPart:
        """The declaration of the loss."""
        return LOSSES.get(self.loss, OWN_LOSS)

    def check(self) -> None:
        """`ValueError` names an option that cannot be what it is."""

    def modifier(self) -> str:
        """Whoever acts for the options in the stages of a batch; empty: nobody has to."""
        return ""


@dataclass(frozen=True, kw_only=True)
class RewardPartOptions(OptionGroup):
    """GDPO's (algorithms/reward_parts.py)."""

    reward_parts: tuple[str, ...] = ()
    """The parts of the reward that gdpo normalises apart: names, or name=weight. What turns earned
    is one of its own, turn_rewards, named or not."""

    @property
    def part_weights(self) -> dict[str, float]:
        """`reward_parts` as weights by name; 1 where none is given. With them come the rewards of
        turns, which are no part of the outcome's and may not be lost."""
        weights = self._named_weights
        return {**weights, TURN_REWARDS: weights.get(TURN_REWARDS, 1.0)} if weights else {}

    @property
    def _named_weights(self) -> dict[str, float]:
        pairs = (part.partition("=") for part in self.reward_parts)
        return {name: float(weight) if sign else 1.0 for name, sign, weight in pairs}

    def check(self) -> None:
        """Parts of the reward, and somebody who reads them."""
        if bool(self.reward_parts) != (self.advantage == "gdpo"):
            raise ValueError(
                f"reward_parts={', '.join(self.reward_parts) or 'none'} with "
                f"advantage={self.advantage!r}: name the parts to normalise exactly with gdpo, "
                "as reward_parts='rule short=-0.1'"
            )
        try:
            weights = self._named_weights
        except ValueError:
            raise ValueError(
                f"reward_parts={' '.join(self.reward_parts)}: a weight that is no number; write "
                "NAME or NAME=WEIGHT"
            ) from None
        for name, weight in weights.items():
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(f"reward_parts: {name}={weight:g}: it must be finite and not 0")
        if len(weights) < len(self.reward_parts):
            raise ValueError(f"reward_parts={' '.join(self.reward_parts)}: a name comes twice")

    def modifier(self) -> str:
        return "nanorl.algorithms.reward_parts:RewardParts" if self.reward_parts else ""


@dataclass(frozen=True, kw_only=True)
class TurnOptions(OptionGroup):
    """Those of rewards of turns (algorithms/turn_rewards.py)."""

    reward_level: RewardLevel = "outcome"
    """What is rewarded: the outcome alone, or also single turns (`Rollout.turn_rewards`), each with
    what came of it later."""
    turn_peers: TurnPeers = "group"
    """Whose turns a turn's return is compared with (reward_level turn): the same turn of the group,
    or of the whole batch."""

    def check(self) -> None:
        """Options about turns, and an advantage that reads them."""
        check_choice("reward_level", self.reward_level, get_args(RewardLevel))
        check_choice("turn_peers", self.turn_peers, get_args(TurnPeers))
        if self.reward_level == "turn" and self.advantage == "none":
            raise ValueError(
                "reward_level='turn': advantage='none' reads no rewards; choose another advantage, "
                "or reward_level='outcome'"
            )
        if self.advantage == "hgpo" and self.reward_level != "turn":
            raise ValueError(
                "advantage='hgpo' compares turns: set reward_level='turn' (without rewards of "
                "turns the outcome belongs to the last one)"
            )
        reads_peers = self.reward_level == "turn" and self.advantage_part.compares_turns
        if self.turn_peers == "batch" and not reads_peers:
            able = ", ".join(name for name, part in ADVANTAGES.items() if part.compares_turns)
            raise ValueError(
                f"turn_peers='batch' with reward_level={self.reward_level!r} and "
                f"advantage={self.advantage!r}: nothing compares turns with those of other "
                f"rollouts; set reward_level='turn' and one of {able}, or "
                "turn_peers='group'"
            )

    def modifier(self) -> str:
        return "nanorl.algorithms.turn_rewards:TurnRewards" if self.reward_level == "turn" else ""


@dataclass(frozen=True, kw_only=True)
class HierarchyOptions(OptionGroup):
    """HGPO's (algorithms/hierarchical.py)."""

    hierarchy_depth: int = 2
    """Of hgpo: so many observations back two turns may have to agree to be compared."""
    hierarchy_power: float = 1.0
    """α of hgpo: the comparison of depth k weighs (k + 1)^α."""

    def check(self) -> None:
        check_number("hierarchy_depth=", self.hierarchy_depth, 1)
        check_number("hierarchy_power=", self.hierarchy_power, 0)


@dataclass(frozen=True, kw_only=True)
class PassAtKOptions(TurnOptions):
    """That of pass@k training (algorithms/pass_at_k.py)."""

    pass_k: int = 2
    """k of pass_at_k: a group is judged by the chance that one of k members succeeds."""

    def check(self) -> None:
        """k, and an advantage that compares whole rollouts by their success alone."""
        check_number("pass_k=", self.pass_k, 1)
        if self.advantage == "pass_at_k" and self.reward_level == "turn":
            raise ValueError(
                "reward_level='turn': advantage='pass_at_k' counts the successes of whole rollouts "
                "and reads no rewards of turns; set reward_level='outcome'"
            )

    def modifier(self) -> str:
        is_on = self.advantage == "pass_at_k"
        return "nanorl.algorithms.pass_at_k:Successes" if is_on else ""


@dataclass(frozen=True, kw_only=True)
class SapoOptions(OptionGroup):
    """SAPO's (algorithms/losses.py)."""

    tau_positive: float = 1.0
    """SAPO's temperature for positive advantages."""
    tau_negative: float = 1.05
    """SAPO's temperature for the others."""

    def check(self) -> None:
        check_number("tau_positive=", self.tau_positive, 0, is_open=True)
        check_number("tau_negative=", self.tau_negative, 0, is_open=True)


@dataclass(frozen=True, kw_only=True)
class CovarianceOptions(OptionGroup):
    """Those of Clip-Cov and KL-Cov (algorithms/covariance.py)."""

    covariance_share: float | None = None
    """Share of the tokens that clip_cov and kl_cov choose; None: 2e-4 and 2e-3."""
    covariance_low: float = 1.0
    """clip_cov chooses among tokens whose covariance is above this."""
    covariance_high: float = 5.0
    """clip_cov chooses among tokens whose covariance is below this."""
    covariance_kl_coef: float = 1.0
    """Weight of |log r| on the tokens that kl_cov chooses."""

    @property
    def chosen_share(self) -> float:
        """The share of tokens that the loss chooses by their covariance; 0: it chooses none."""
        share = self.loss_part.chosen_share
        return self.covariance_share if share and self.covariance_share is not None else share

    def check(self) -> None:
        check_number("covariance_kl_coef=", self.covariance_kl_coef, 0)
        check_number("covariance_low=", self.covariance_low, 0)
        check_number("covariance_high=", self.covariance_high, self.covariance_low, is_open=True)
        if self.covariance_share is not None:
            check_number("covariance_share=", self.covariance_share, 0, 1, is_open=True)

    def modifier(self) -> str:
        return "nanorl.algorithms.covariance:ChosenTokens" if self.chosen_share else ""


@dataclass(frozen=True, kw_only=True)
class KLOptions(OptionGroup):
    """Those of a KL to the reference, in the loss (algorithms/regularisers.py)."""

    kl_coef: float = 0.0
    """Weight of the KL loss to the reference policy."""
    kl_estimator: KLEstimator = "k2"
    """k2 and rk3 give the gradient of KL(π‖ref), k3 that of KL(ref‖π)."""

    def check(self) -> None:
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1': its gradient is 0 in expectation; choose k2, k3 or rk3"
            )
        check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        check_number("kl_coef=", self.kl_coef, 0)

    def modifier(self) -> str:
        return "nanorl.algorithms.regularisers:KLPenalty" if self.kl_coef else ""


@dataclass(frozen=True, kw_only=True)
class RewardKLOptions(OptionGroup):
    """That of a KL to the reference, in the rewards (algorithms/returns.py)."""

    kl_reward_coef: float = 0.0
    """β of the k1 penalty inside the rewards (advantages reinforce_pp, gae and otb)."""

    def check(self) -> None:
        check_number("kl_reward_coef=", self.kl_reward_coef, 0)
        if self.kl_reward_coef and not self.advantage_part.is_of_tokens:
            raise ValueError(
                f"kl_reward_coef={self.kl_reward_coef}: advantage={self.advantage!r} scores whole "
                "rollouts and has no place for a penalty on tokens; choose reinforce_pp, gae or "
                "otb, or set kl_coef, the KL in the loss"
            )


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(OptionGroup):
    """Those of distillation (algorithms/distillation.py)."""

    distill_coef: float = 0.0
    """λ of `A −= λ(log π_o − log π_T)`; the teacher is the reference policy."""
    top_k: int = 20
    """Tokens that opd_topk compares at each place: the likeliest ones of the teacher."""
    distill_kl: DistillKL = "reverse"
    """The divergence of opd_topk: reverse is KL(policy‖teacher), forward KL(teacher‖policy)."""
    distill_trust_region: float = 0.0
    """Of opd: a token learns no more where its probability is farther than this from that of the
    policy that sampled it, and the teacher would move it farther (0.2 is prime-rl's); 0: none."""

    def check(self) -> None:
        check_choice("distill_kl", self.distill_kl, get_args(DistillKL))
        check_number("distill_coef=", self.distill_coef, 0)
        check_number("top_k=", self.top_k, 1)
        check_number("distill_trust_region=", self.distill_trust_region, 0, 1)
        if self.distill_trust_region and self.loss != "opd":
            raise ValueError(
                f"distill_trust_region={self.distill_trust_region}: loss={self.loss!r} has none; "
                "it bounds how far π_θ/μ of opd may go, and opd_topk compares whole distributions, "
                "without a ratio: choose loss='opd', or leave distill_trust_region out"
            )

    def modifier(self) -> str:
        return "nanorl.algorithms.distillation:TeacherAdvantage" if self.distill_coef else ""


@dataclass(frozen=True, kw_only=True)
class HindsightOptions(OptionGroup):
    """Those of SDFT and SDPO (algorithms/self_distillation.py)."""

    hindsight: Hindsight = "none"
    """What the teacher of opd and opd_topk reads beside the prompt: the task's solution (SDFT), a
    success of the same group, the last observation of a failure, or the latter where there is no
    success (SDPO). Rollouts for which there is none take no part."""
    hindsight_teacher: HindsightTeacher = "policy"
    """Who reads it: the policy itself as it is before the update, the reference, or an average of
    the policy over its optimizer steps (that of the papers of SDFT and SDPO)."""
    hindsight_rate: float = 0.05
    """Of the average: what each step's weights count for in it, and those before by the rest."""
    hindsight_tokens: int = 256
    """The most tokens that it may have; longer ones lose their middle."""

    @property
    def has_hindsight(self) -> bool:
        """True if the teacher reads more than the policy."""
        return self.hindsight != "none"

    @property
    def has_average(self) -> bool:
        """True if the teacher is an average of the policy over time."""
        return self.has_hindsight and self.hindsight_teacher == "average"

    @property
    def needs_success(self) -> bool:
        """True if nothing is learnt without another rollout of the group that succeeded."""
        return self.hindsight == "success"

    def check(self) -> None:
        """A teacher that reads more than the policy, and a loss that asks it."""
        check_choice("hindsight", self.hindsight, get_args(Hindsight))
        check_choice("hindsight_teacher", self.hindsight_teacher, get_args(HindsightTeacher))
        check_number("hindsight_tokens=", self.hindsight_tokens, 1)
        check_number("hindsight_rate=", self.hindsight_rate, 0, 1, is_open=True)
        if not self.has_hindsight and self.hindsight_teacher != "policy":
            raise ValueError(
                f"hindsight_teacher={self.hindsight_teacher!r} with hindsight='none': it reads "
                "what the policy does; choose what it reads beside that, as hindsight='solution', "
                "or leave hindsight_teacher out"
            )
        if self.has_hindsight and not self.loss_part.is_distillation:
            raise ValueError(
                f"hindsight={self.hindsight!r}: loss={self.loss!r} has no teacher to read it; "
                "choose loss='opd' or 'opd_topk', or hindsight='none'"
            )
        if self.advantage != "none" and (self.loss == "opd_topk" or self.has_hindsight):
            raise ValueError(
                f"advantage={self.advantage!r}: loss={self.loss!r} "
                f"{'with hindsight ' if self.has_hindsight else ''}reads no advantages; set "
                "advantage='none'"
            )

    def modifier(self) -> str:
        return "nanorl.algorithms.self_distillation:Hindsight" if self.has_hindsight else ""


@dataclass(frozen=True, kw_only=True)
class EntropyOptions(OptionGroup):
    """That of the entropy bonus (algorithms/regularisers.py)."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus on action tokens."""

    def check(self) -> None:
        check_number("entropy_coef=", self.entropy_coef, 0)

    def modifier(self) -> str:
        return "nanorl.algorithms.regularisers:EntropyBonus" if self.entropy_coef else ""


@dataclass(frozen=True, kw_only=True)
class EntropyMaskOptions(TeacherOptions):
    """That of the tokens that learn (algorithms/entropy_mask.py)."""

    entropy_share: float = 1.0
    """Share of the sampled tokens, those with the highest entropy, that learn from their advantage
    (0.2 is usual); 1: all."""

    @property
    def chooses_by_entropy(self) -> bool:
        """True if the policy's entropies say which tokens learn."""
        return self.entropy_share < 1

    def check(self) -> None:
        """A share, and a loss in which each token has an advantage of its own."""
        check_number("entropy_share=", self.entropy_share, 0, 1, "0.2 is usual", is_open=True)
        if not self.chooses_by_entropy:
            return
        start = f"entropy_share={self.entropy_share:g}: "
        if self.loss_part.chosen_share:
            raise ValueError(
                f"{start}loss={self.loss!r} chooses tokens itself; choose another loss, or set "
                "entropy_share=1"
            )
        if self.loss_part.is_of_sequences:
            raise ValueError(
                f"{start}loss={self.loss!r} is of whole sequences, whose tokens do not learn "
                "apart; choose another loss, or set entropy_share=1"
            )
        if self.loss_part.is_distillation or (self.advantage == "none" and not self.distill_coef):
            raise ValueError(
                f"{start}it takes the advantage of the other tokens away, and advantage="
                f"{self.advantage!r} with loss={self.loss!r} learns from none; set entropy_share=1"
            )

    def modifier(self) -> str:
        return "nanorl.algorithms.entropy_mask:EntropyMask" if self.chooses_by_entropy else ""


@dataclass(frozen=True, kw_only=True)
class ObservationOptions(OptionGroup):
    """ECHO's (algorithms/observation.py)."""

    observation_coef: float = 0.0
    """λ of ECHO: weight of the cross-entropy on what tools and environments answered."""

    def check(self) -> None:
        check_number("observation_coef=", self.observation_coef, 0)

    def modifier(self) -> str:
        return "nanorl.algorithms.observation:ObservationLoss" if self.observation_coef else ""


@dataclass(frozen=True, kw_only=True)
class ReturnOptions(OptionGroup):
    """Those of returns and of GAE (algorithms/returns.py, turns.py)."""

    gamma: float = 1.0
    """Discount per action token (reinforce_pp, gae, otb), or per turn (reward_level turn,
    others)."""
    lam: float = 0.95
    """λ of generalised advantage estimation."""
    whiten_gae: bool = True
    """Whiten the advantages of gae over the batch, as PPO usually does."""

    def check(self) -> None:
        check_number("gamma=", self.gamma, 0, 1)
        check_number("lam=", self.lam, 0, 1)


@dataclass(frozen=True, kw_only=True)
class CorrectionOptions(OptionGroup):
    """Those of the corrections beyond tis (algorithms/corrections.py)."""

    correction_kl: float = 0.1
    """φ of kpop, in nats: the most that the two policies may differ about a token."""
    correction_low: float | None = None
    """Lower bound a of w; None: 0.5 for icepop, 0.999 for geometric."""
    correction_high: float | None = None
    """Upper bound b of w; None: 5 for icepop, 1.001 for geometric."""
    veto_below: float = 0.0
    """Drop a sequence if any token has w below this (1e-4 is usual); 0 turns it off."""

    @property
    def bounds(self) -> tuple[float, float]:
        """(correction_low, correction_high), those of the correction where none are given."""
        low, high = BOUNDS.get(self.correction, (0.0, math.inf))
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    def check(self) -> None:
        """Numbers; bounds of sequences are narrow, for wide ones would never act."""
        check_number("correction_cap=", self.correction_cap, 1)
        check_number("correction_kl=", self.correction_kl, 0, is_open=True)
        check_number("veto_below=", self.veto_below, 0, 0.5, "1e-4 is usual")
        given = {"correction_low": self.correction_low, "correction_high": self.correction_high}
        for name, value in given.items():
            if value is not None and self.correction not in BOUNDS:
                raise ValueError(
                    f"{name}={value}: correction={self.correction!r} has no bounds, it reads "
                    f"correction_cap; leave it out, or choose one of {', '.join(BOUNDS)}"
                )
        if self.correction in BOUNDS:
            low, high = self.bounds
            is_mean = self.correction == "geometric"
            why = "a mean of log w over a sequence is near 0: such bounds never reject"
            reason = why if is_mean else ""
            check_number("correction_low=", low, 0.9 if is_mean else 1e-6, 1, reason)
            check_number("correction_high=", high, 1, 1.1 if is_mean else 1e6, reason)

    def modifier(self) -> str:
        return "nanorl.algorithms.corrections:Veto" if self.veto_below > 0 else ""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """DAPO's choice of groups (algorithms/dynamic_sampling.py)."""

    dynamic_sampling: bool = False
    """Train only on groups whose members earned unlike rewards."""

    def modifier(self) -> str:
        if not self.dynamic_sampling:
            return ""
        return "nanorl.algorithms.dynamic_sampling:DynamicSampling"


@dataclass(frozen=True, kw_only=True)
class TruncationOptions(OptionGroup):
    """DAPO's overlong filtering (algorithms/truncation.py)."""

    mask_truncated: bool = False
    """Rollouts that a limit of tokens or turns cut off have no loss; their rewards count in their
    group."""

    def modifier(self) -> str:
        return "nanorl.algorithms.truncation:TruncationMask" if self.mask_truncated else ""


@dataclass(frozen=True, kw_only=True)
class LengthOptions(TurnOptions):
    """That of Kimi k1.5's length reward (algorithms/length_reward.py)."""

    length_coef: float = 0.0
    """Weight of a reward of 1/2 for the shortest rollout of a group down to -1/2 for the longest;
    failures get the part below 0 alone."""

    def check(self) -> None:
        """A weight, and an advantage whose rewards it may change."""
        check_number("length_coef=", self.length_coef, 0)
        if not self.length_coef:
            return
        start = f"length_coef={self.length_coef:g}: "
        if self.reward_level == "turn":
            raise ValueError(
                f"{start}it is part of the outcome, and reward_level='turn' rewards turns; set "
                "reward_level='outcome', or length_coef=0"
            )
        reasons = {
            "maxrl": "divides by the mean of rewards, which it makes negative",
            "pass_at_k": "counts successes and reads no other reward",
            "gdpo": "reads the parts of the outcome, of which it is none",
            "none": "reads no rewards",
        }
        if self.advantage in reasons:
            raise ValueError(
                f"{start}advantage={self.advantage!r} {reasons[self.advantage]}; set "
                "length_coef=0, or choose another advantage"
            )

    def modifier(self) -> str:
        return "nanorl.algorithms.length_reward:LengthReward" if self.length_coef else ""


@dataclass(frozen=True, kw_only=True)
class OverlongOptions(TurnOptions):
    """DAPO's penalty on length (algorithms/overlong.py)."""

    overlong_buffer: int = 0
    """Tokens before the length limit in which the soft penalty grows to −1; 0 turns it off."""

    def check(self) -> None:
        check_number("overlong_buffer=", self.overlong_buffer, 0)
        if self.advantage == "maxrl" and self.overlong_buffer:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer}: it makes rewards negative, and "
                "advantage='maxrl' divides by their mean; set it to 0"
            )
        if self.advantage == "pass_at_k" and self.overlong_buffer:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer}: advantage='pass_at_k' counts successes "
                "and reads no penalty; set it to 0"
            )

    def modifier(self) -> str:
        is_of_outcome = self.reward_level == "outcome"  # of turns: TurnRewards does both
        is_on = self.overlong_buffer and is_of_outcome
        return "nanorl.algorithms.overlong:OverlongPenalty" if is_on else ""
