"""`AlgorithmSpec`: one frozen record that says which algorithm this is.

The default is GRPO (DeepSeekMath, arXiv 2402.03300). What ours changes against that paper:

    1. tokens    every action token of the batch weighs the same (DAPO's token mean); the paper
                 averages within each rollout first, which favours short ones
    2. KL        there is none, so no reference model is held; the paper adds 0.04·k3
    3. clip      a token with A < 0 costs at most 3·|A| (dual clip, arXiv 1912.09729)
    4. μ         the clip is around the trainer's policy, and every token is weighed by how far
                 that is from the policy that sampled it (below); in the paper they are one
    5. std       the sample standard deviation of the group; a group of one learns nothing
    6. turns     tokens that the model did not sample, a tool's output, have no loss

Three policies meet in a loss: μ sampled the tokens, o is the trainer's when the batch came, θ is
being updated. By default the clip is around o and every token is weighed by min(π_o/μ, 2): the
decoupled objective of AReaL (arXiv 2505.24298) with truncated weights (TIS), what verl calls
`token_is`. It holds for tokens of any staleness, and where nothing is stale the weights are 1. No
forward pass is needed for o: in the first step on a batch o is θ, and the later steps reuse the
log-probs of the first. The other usual choice, the ratio against μ itself (`old_policy="rollout"`),
drops every stale token that has drifted past the clip, so it learns less the staler the data.

The recipes that have a name (`--algorithm gspo`) are in recipes.py.
Next: advantages.py (`compute_advantages`, once on the whole optimizer batch) and losses.py (the
function of `make_loss(spec)`, on every micro-batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from types import MappingProxyType
from typing import Any, Literal, get_args

from nanorl.options.bounds import check_number
from nanorl.plugins import load_object

Advantage = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gdpo",
    "otb",
    "hgpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "maxrl",
    "gae",
    "none",
]
Loss = Literal[
    "reinforce",
    "ppo",
    "gspo",
    "sapo",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "decoupled_ppo",
    "opd",
    "opd_topk",
]
Correction = Literal["auto", "none", "tis", "mis", "icepop", "kpop", "sequence_tis", "geometric"]
KLEstimator = Literal["k2", "k3", "rk3"]
RewardLevel = Literal["outcome", "turn"]
TurnPeers = Literal["group", "batch"]
DistillKL = Literal["reverse", "forward"]
Hindsight = Literal["none", "solution", "success", "feedback", "success_or_feedback"]
HindsightTeacher = Literal["policy", "reference"]

CLIPS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "gspo": (3e-4, 4e-4),  # arXiv 2507.18071: the ratio is a mean over a sequence
        "cispo": (1.0, 0.28),  # arXiv 2506.13585 has no lower bound; 0.28 is Trinity-RFT's
        "dppo_tv": (0.15, 0.15),  # arXiv 2602.04879: distances of probabilities, not of ratios
        "dppo_kl": (0.05, 0.05),  # nats
    }
)
"""(clip_low, clip_high) of a loss whose paper departs from PPO's 0.2 and 0.2."""

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "icepop": (0.5, 5.0),  # arXiv 2510.18855
        "geometric": (0.999, 1.001),  # "When speed kills stability": the mean of many tokens
    }
)
"""(correction_low, correction_high) of the corrections that have them."""

TURN_REWARDS = "turn_rewards"
"""The part of the reward that turns earned beside the others (gdpo)."""

COVARIANCE_SHARES: Mapping[str, float] = MappingProxyType({"clip_cov": 2e-4, "kl_cov": 2e-3})
"""The share of a batch's tokens that a loss chooses by their covariance (arXiv 2505.22617)."""

OLD_POLICIES = ("recomputed", "rollout", "interpolated")

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "prompt_mean"
]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
COMPARES_MEMBERS = tuple(
    name for name in get_args(Advantage) if name not in ("reinforce_pp", "gae", "none")
)
"""Advantages of a rollout against the others of its group."""

COMPARES_TURNS = ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "reinforce_pp_baseline")
"""Those that, with rewards of turns, compare a turn with the same one of other rollouts."""

DISTILLS = ("opd", "opd_topk")
"""Losses that compare with a teacher, and with nothing else."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec:
    """Everything that decides a gradient, given rollouts."""

    advantage: Advantage | str = "grpo"
    """How rewards become advantages; "none" gives 0 (pure distillation). A function of yours as
    mine.py:name, of (reward_R, group_ids), or of the whole batch."""
    reward_parts: tuple[str, ...] = ()
    """The parts of the reward that gdpo normalises apart: names, or name=weight. What turns earned
    is one of its own, turn_rewards, named or not."""
    reward_level: RewardLevel = "outcome"
    """What is rewarded: the outcome alone, or also single turns (`Rollout.turn_rewards`), each with
    what came of it later."""
    turn_peers: TurnPeers = "group"
    """Whose turns a turn's return is compared with (reward_level turn): the same turn of the group,
    or of the whole batch."""
    hierarchy_depth: int = 2
    """Of hgpo: so many observations back two turns may have to agree to be compared."""
    hierarchy_power: float = 1.0
    """α of hgpo: the comparison of depth k weighs (k + 1)^α."""
    loss: Loss | str = "ppo"
    """The per-token policy loss; a function of yours as mine.py:name, of (logp_T, batch)."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, over the whole optimizer batch."""
    constant_length: int | None = None
    """Tokens that aggregation "constant" divides by; needed there and nowhere else."""
    clip_low: float | None = None
    """The ratio is clipped below at 1 − clip_low; None: 0.2, for gspo 3e-4, for cispo 1 (not). For
    dppo_tv and dppo_kl how far a probability may fall: 0.15, and 0.05 nats."""
    clip_high: float | None = None
    """The ratio is clipped above at 1 + clip_high; None: 0.2, for gspo 4e-4, for cispo 0.28. For
    dppo_tv and dppo_kl how far a probability may rise: 0.15, and 0.05 nats."""
    dual_clip: float | None = 3.0
    """Bound c on the loss of negative advantages (ppo only); None turns it off."""
    tau_positive: float = 1.0
    """SAPO's temperature for positive advantages."""
    tau_negative: float = 1.05
    """SAPO's temperature for the others."""
    covariance_share: float | None = None
    """Share of the tokens that clip_cov and kl_cov choose; None: 2e-4 and 2e-3."""
    covariance_low: float = 1.0
    """clip_cov chooses among tokens whose covariance is above this."""
    covariance_high: float = 5.0
    """clip_cov chooses among tokens whose covariance is below this."""
    covariance_kl_coef: float = 1.0
    """Weight of |log r| on the tokens that kl_cov chooses."""
    kl_coef: float = 0.0
    """Weight of the KL loss to the reference policy."""
    kl_estimator: KLEstimator = "k2"
    """k2 and rk3 give the gradient of KL(π‖ref), k3 that of KL(ref‖π)."""
    kl_reward_coef: float = 0.0
    """β of the k1 penalty inside the rewards (advantages reinforce_pp and gae)."""
    distill_coef: float = 0.0
    """λ of `A −= λ(log π_o − log π_T)`; the teacher is the reference policy."""
    top_k: int = 20
    """Tokens that opd_topk compares at each place: the likeliest ones of the teacher."""
    distill_kl: DistillKL = "reverse"
    """The divergence of opd_topk: reverse is KL(policy‖teacher), forward KL(teacher‖policy)."""
    hindsight: Hindsight = "none"
    """What the teacher of opd and opd_topk reads beside the prompt: the task's solution (SDFT), a
    success of the same group, the last observation of a failure, or the latter where there is no
    success (SDPO). Rollouts for which there is none take no part."""
    hindsight_teacher: HindsightTeacher = "policy"
    """Who reads it: the policy itself as it is before the update, or the reference."""
    hindsight_tokens: int = 256
    """The most tokens that it may have; longer ones lose their middle."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus on action tokens."""
    observation_coef: float = 0.0
    """λ of ECHO: weight of the cross-entropy on what tools and environments answered."""
    gamma: float = 1.0
    """Discount per action token (reinforce_pp, gae, otb), or per turn (reward_level turn,
    others)."""
    lam: float = 0.95
    """λ of generalised advantage estimation."""
    whiten_gae: bool = True
    """Whiten the advantages of gae over the batch, as PPO usually does."""
    old_policy: Literal["recomputed", "rollout", "interpolated"] = "recomputed"
    """Whose log-probs the ratio is against: the trainer's, or (o := μ) those of the rollout, or
    between μ and θ, the nearer to θ the staler the token, which no pass over the batch computes."""
    correction: Correction = "auto"
    """Off-policy weight from w = π_o/μ; auto: tis, or none where the loss has μ in it already
    (old_policy rollout, decoupled_ppo, opd)."""
    correction_cap: float = 2.0
    """C of tis, mis and sequence_tis."""
    correction_kl: float = 0.1
    """φ of kpop, in nats: the most that the two policies may differ about a token."""
    correction_low: float | None = None
    """Lower bound a of w; None: 0.5 for icepop, 0.999 for geometric."""
    correction_high: float | None = None
    """Upper bound b of w; None: 5 for icepop, 1.001 for geometric."""
    veto_below: float = 0.0
    """Drop a sequence if any token has w below this (1e-4 is usual); 0 turns it off."""
    dynamic_sampling: bool = False
    """Train only on groups whose members earned unlike rewards."""
    overlong_buffer: int = 0
    """Tokens before the length limit in which the soft penalty grows to −1; 0 turns it off."""

    def __post_init__(self) -> None:
        _check_own("advantage", self.advantage, get_args(Advantage))
        _check_choice("reward_level", self.reward_level, get_args(RewardLevel))
        _check_choice("turn_peers", self.turn_peers, get_args(TurnPeers))
        _check_own("loss", self.loss, get_args(Loss))
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)
        _check_choice("correction", self.correction, get_args(Correction))
        _check_choice("old_policy", self.old_policy, OLD_POLICIES)
        _check_choice("distill_kl", self.distill_kl, get_args(DistillKL))
        _check_choice("hindsight", self.hindsight, get_args(Hindsight))
        _check_choice("hindsight_teacher", self.hindsight_teacher, get_args(HindsightTeacher))
        if self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator='k1': its gradient is 0 in expectation; choose k2, k3 or rk3"
            )
        _check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        _check_numbers(self)
        _check_bounds(self)
        _check_sense(self)

    @property
    def clip(self) -> tuple[float, float]:
        """(clip_low, clip_high), those of the loss where none are given."""
        low, high = CLIPS.get(self.loss, (0.2, 0.2))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """(correction_low, correction_high), those of the correction where none are given."""
        low, high = BOUNDS.get(self.correction, (0.0, math.inf))
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

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

    @property
    def chosen_share(self) -> float:
        """The share of tokens that the loss chooses by their covariance; 0: it chooses none."""
        share = COVARIANCE_SHARES.get(self.loss, 0.0)
        return self.covariance_share if share and self.covariance_share is not None else share

    @property
    def weighs_by_itself(self) -> bool:
        """True if the ratio of the loss is against μ already, so that w must not come in again."""
        return self.old_policy == "rollout" or self.loss in ("decoupled_ppo", "opd")

    @property
    def resolved_correction(self) -> str:
        """The correction, "auto" replaced by what it stands for."""
        if self.correction != "auto":
            return self.correction
        return "none" if self.weighs_by_itself else "tis"

    @property
    def answers_for_staleness(self) -> bool:
        """True if tokens that another policy sampled are weighed, clipped or rejected for it."""
        has_ratio = self.weighs_by_itself and self.loss != "reinforce"
        return has_ratio or self.resolved_correction != "none"

    @property
    def compares_members(self) -> bool:
        """True if a group of one rollout has nothing to learn from."""
        is_of_group = self.turn_peers == "group" and self.advantage in COMPARES_MEMBERS
        return is_of_group or self.needs_success or self.dynamic_sampling

    @property
    def needs_reference(self) -> bool:
        """True if there is a reference (or teacher) policy, whoever reads what of it."""
        is_own = self.has_hindsight and self.hindsight_teacher == "policy"
        return self.needs_ref_logp or (self.loss in DISTILLS and not is_own)

    @property
    def needs_ref_logp(self) -> bool:
        """True if the reference's log-probs of the sampled tokens are read, by their own prompt."""
        coefs = (self.kl_coef, self.kl_reward_coef, self.distill_coef)
        return any(coef != 0 for coef in coefs) or (self.loss == "opd" and not self.has_hindsight)

    @property
    def has_hindsight(self) -> bool:
        """True if the teacher reads more than the policy."""
        return self.hindsight != "none"

    @property
    def needs_success(self) -> bool:
        """True if nothing is learnt without another rollout of the group that succeeded."""
        return self.hindsight == "success"

    @property
    def needs_critic(self) -> bool:
        """True if the advantages read a critic's values."""
        return self.advantage == "gae"

    @property
    def needs_old_logp(self) -> bool:
        """True if the advantages read the old policy's log-probs, before any loss is computed. A
        loss alone never asks for them: see `LossBatch.old_logp_T`."""
        return self.kl_reward_coef != 0 or self.distill_coef != 0 or self.needs_sharp_logp

    @property
    def needs_sharp_logp(self) -> bool:
        """True if the advantages read the old policy's log-probs at half the temperature."""
        return self.advantage == "otb"


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def _check_own(name: str, value: str, choices: Sequence[str]) -> None:
    """One of ours, or a function of the user's that can be loaded."""
    if is_own(value):
        load_own(name, value)
    else:
        _check_choice(name, value, choices)


def is_own(value: str) -> bool:
    """True if an advantage or a loss is the user's own function."""
    return value.endswith(".py") or ":" in value


def load_own(name: str, value: str) -> Callable[..., Any]:
    """The user's function. ValueError where there is none."""
    return load_object(value, what=f"rl.algorithm.{name}", known={}, fits=isfunction)


def _check_numbers(spec: AlgorithmSpec) -> None:
    at_least_0 = ("kl_coef", "kl_reward_coef", "distill_coef", "entropy_coef", "overlong_buffer")
    for name in (*at_least_0, "observation_coef"):
        check_number(f"{name}=", getattr(spec, name), 0)
    for name in ("gamma", "lam"):
        check_number(f"{name}=", getattr(spec, name), 0, 1)
    for name in ("tau_positive", "tau_negative"):
        check_number(f"{name}=", getattr(spec, name), 0, is_open=True)
    check_number("correction_cap=", spec.correction_cap, 1)
    check_number("correction_kl=", spec.correction_kl, 0, is_open=True)
    check_number("covariance_kl_coef=", spec.covariance_kl_coef, 0)
    check_number("covariance_low=", spec.covariance_low, 0)
    check_number("covariance_high=", spec.covariance_high, spec.covariance_low, is_open=True)
    if spec.covariance_share is not None:
        check_number("covariance_share=", spec.covariance_share, 0, 1, is_open=True)
    check_number("veto_below=", spec.veto_below, 0, 0.5, "1e-4 is usual")
    if spec.dual_clip is not None:
        check_number("dual_clip=", spec.dual_clip, 1, is_open=True)
    if spec.constant_length is not None:
        check_number("constant_length=", spec.constant_length, 1)
    for name in ("top_k", "hierarchy_depth", "hindsight_tokens"):
        check_number(f"{name}=", getattr(spec, name), 1)
    check_number("hierarchy_power=", spec.hierarchy_power, 0)


def _check_bounds(spec: AlgorithmSpec) -> None:
    """Clips and bounds: those of sequences are narrow, for wide ones would never act."""
    low, high = spec.clip
    is_gspo, why = spec.loss == "gspo", "a sequence's ratio is a mean over its tokens, near 1"
    check_number("clip_low=", low, 0, 0.1 if is_gspo else 1, why if is_gspo else "")
    check_number("clip_high=", high, 0, 0.1 if is_gspo else math.inf, why if is_gspo else "")
    given = {"correction_low": spec.correction_low, "correction_high": spec.correction_high}
    for name, value in given.items():
        if value is not None and spec.correction not in BOUNDS:
            raise ValueError(
                f"{name}={value}: correction={spec.correction!r} has no bounds, it reads "
                f"correction_cap; leave it out, or choose one of {', '.join(BOUNDS)}"
            )
    if spec.correction in BOUNDS:
        low, high = spec.bounds
        is_mean = spec.correction == "geometric"
        why = "a mean of log w over a sequence is near 0: such bounds never reject"
        check_number("correction_low=", low, 0.9 if is_mean else 1e-6, 1, why if is_mean else "")
        check_number("correction_high=", high, 1, 1.1 if is_mean else 1e6, why if is_mean else "")


def _check_parts(spec: AlgorithmSpec) -> None:
    """Parts of the reward, and somebody who reads them."""
    if bool(spec.reward_parts) != (spec.advantage == "gdpo"):
        raise ValueError(
            f"reward_parts={', '.join(spec.reward_parts) or 'none'} with "
            f"advantage={spec.advantage!r}: name the parts to normalise exactly with gdpo, "
            "as reward_parts='rule short=-0.1'"
        )
    try:
        weights = spec._named_weights
    except ValueError:
        raise ValueError(
            f"reward_parts={' '.join(spec.reward_parts)}: a weight that is no number; write "
            "NAME or NAME=WEIGHT"
        ) from None
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight == 0:
            raise ValueError(f"reward_parts: {name}={weight:g}: it must be finite and not 0")
    if len(weights) < len(spec.reward_parts):
        raise ValueError(f"reward_parts={' '.join(spec.reward_parts)}: a name comes twice")
    if spec.reward_parts and (spec.reward_level == "turn" or spec.overlong_buffer):
        raise ValueError(
            "advantage='gdpo' reads the parts of the outcome: set reward_level='outcome' and "
            "overlong_buffer=0"
        )


def _check_sense(spec: AlgorithmSpec) -> None:
    """Refuse what would be ignored, count twice, or learn nothing."""
    _check_parts(spec)
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
    if (spec.aggregation == "constant") != (spec.constant_length is not None):
        raise ValueError(
            f"constant_length={spec.constant_length} with aggregation={spec.aggregation!r}: "
            "give it exactly with 'constant'"
        )
    if spec.kl_reward_coef and spec.advantage not in ("reinforce_pp", "gae", "otb"):
        raise ValueError(
            f"kl_reward_coef={spec.kl_reward_coef}: advantage={spec.advantage!r} scores whole "
            "rollouts and has no place for a penalty on tokens; choose reinforce_pp, gae or otb, "
            "or set kl_coef, the KL in the loss"
        )
    if spec.advantage == "maxrl" and spec.overlong_buffer:
        raise ValueError(
            f"overlong_buffer={spec.overlong_buffer}: it makes rewards negative, and "
            "advantage='maxrl' divides by their mean; set it to 0"
        )
    if spec.reward_level == "turn" and spec.advantage == "none":
        raise ValueError(
            "reward_level='turn': advantage='none' reads no rewards; choose another advantage, or "
            "reward_level='outcome'"
        )
    terms = (spec.kl_coef, spec.distill_coef, spec.entropy_coef, spec.observation_coef)
    if spec.advantage == "none" and spec.loss not in DISTILLS and not any(terms):
        raise ValueError(
            "advantage='none': nothing is left to learn from; choose loss='opd' or set "
            "distill_coef, kl_coef, entropy_coef or observation_coef"
        )
    _check_turns(spec)
    _check_hindsight(spec)


def _check_turns(spec: AlgorithmSpec) -> None:
    """Options about turns, and an advantage that reads them."""
    if spec.advantage == "hgpo" and spec.reward_level != "turn":
        raise ValueError(
            "advantage='hgpo' compares turns: set reward_level='turn' (without rewards of turns "
            "the outcome belongs to the last one)"
        )
    reads_peers = spec.reward_level == "turn" and (
        spec.advantage in COMPARES_TURNS or is_own(spec.advantage)
    )
    if spec.turn_peers == "batch" and not reads_peers:
        raise ValueError(
            f"turn_peers='batch' with reward_level={spec.reward_level!r} and "
            f"advantage={spec.advantage!r}: nothing compares turns with those of other rollouts; "
            f"set reward_level='turn' and one of {', '.join(COMPARES_TURNS)}, or "
            "turn_peers='group'"
        )


def _check_hindsight(spec: AlgorithmSpec) -> None:
    """A teacher that reads more than the policy, and a loss that asks it."""
    if not spec.has_hindsight and spec.hindsight_teacher == "reference":
        raise ValueError(
            "hindsight_teacher='reference' with hindsight='none': the reference reads what the "
            "policy does; choose what it reads beside that, as hindsight='solution', or leave "
            "hindsight_teacher out"
        )
    if spec.has_hindsight and spec.loss not in DISTILLS:
        raise ValueError(
            f"hindsight={spec.hindsight!r}: loss={spec.loss!r} has no teacher to read it; choose "
            "loss='opd' or 'opd_topk', or hindsight='none'"
        )
    if spec.advantage != "none" and (spec.loss == "opd_topk" or spec.has_hindsight):
        raise ValueError(
            f"advantage={spec.advantage!r}: loss={spec.loss!r} "
            f"{'with hindsight ' if spec.has_hindsight else ''}reads no advantages; set "
            "advantage='none'"
        )
    if spec.has_hindsight and spec.dynamic_sampling:
        raise ValueError(
            f"dynamic_sampling with hindsight={spec.hindsight!r}: hindsight chooses the rollouts "
            "itself; set dynamic_sampling=False"
        )
