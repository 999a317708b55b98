"""The parts of an algorithm by their names, and what each declares: a line here, and a file.

    --rl.algorithm.advantage otb     an `Estimator` (nanorl/group_advantage.py)
    --rl.algorithm.loss gspo         a subclass of `ClippedLoss` (nanorl/policy_loss.py)
    --rl.algorithm.correction mis    a `Correction` (nanorl/policy_loss.py)
    --rl.algorithm.old-policy ...    an `OldPolicy` (nanorl/policy_loss.py)
    --rl.algorithm.aggregation ...   a `Weigher` (nanorl/batching.py)

What is declared is what a run has to open, and what an `AlgorithmSpec` refuses. The options that a
part reads beside GRPO's are a group in option_groups.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nanorl.grpo import Field


class AdvantagePart(NamedTuple):
    """An estimator, as "module:name"."""

    path: str
    compares_members: bool = True  # so that a group of one has nothing to learn from
    compares_turns: bool = False  # with rewards of turns, a turn with the same one of others
    is_of_tokens: bool = False  # so that a penalty on tokens has a place in its rewards
    reads: Field | None = None  # what has to be scored for it


ADVANTAGES: Mapping[str, AdvantagePart] = MappingProxyType(
    {
        "grpo": AdvantagePart("nanorl.group_advantage:of_groups", compares_turns=True),
        "dr_grpo": AdvantagePart("nanorl.algorithms.advantages:DR_GRPO", compares_turns=True),
        "rloo": AdvantagePart("nanorl.algorithms.advantages:RLOO", compares_turns=True),
        "opo": AdvantagePart("nanorl.algorithms.advantages:opo_of_batch", compares_turns=True),
        "gdpo": AdvantagePart("nanorl.algorithms.advantages:gdpo_of_batch"),
        "otb": AdvantagePart(
            "nanorl.algorithms.token_baseline:otb_of_batch",
            is_of_tokens=True,
            reads=Field.SHARP_LOGP,
        ),
        "hgpo": AdvantagePart("nanorl.algorithms.hierarchical:hgpo_of_batch"),
        "reinforce_pp": AdvantagePart(
            "nanorl.algorithms.returns:reinforce_pp_of_batch",
            compares_members=False,
            is_of_tokens=True,
        ),
        "reinforce_pp_baseline": AdvantagePart(
            "nanorl.algorithms.returns:reinforce_pp_baseline_of_batch", compares_turns=True
        ),
        "pass_at_k": AdvantagePart("nanorl.algorithms.pass_at_k:pass_at_k_of_batch"),
        "maxrl": AdvantagePart("nanorl.algorithms.advantages:MAXRL", compares_turns=True),
        "gae": AdvantagePart(
            "nanorl.algorithms.returns:gae_of_batch",
            compares_members=False,
            is_of_tokens=True,
            reads=Field.VALUE,
        ),
        "none": AdvantagePart("nanorl.algorithms.advantages:none_of_batch", compares_members=False),
    }
)
OWN_ADVANTAGE = AdvantagePart(
    "nanorl.algorithms.own:own_of_batch", compares_members=False, compares_turns=True
)


class LossPart(NamedTuple):
    """A loss of a token, as "module:class"."""

    path: str
    clip: tuple[float, float] = (0.2, 0.2)  # clip_low and clip_high where none are given
    is_against_sampler: bool = False  # μ is in its ratio: w must not come in again
    has_ratio: bool = True
    is_distillation: bool = False  # it compares with a teacher, and with nothing else
    is_proportional: bool = True  # to the advantage: where that is 0, nothing is learnt
    is_of_sequences: bool = False  # all tokens of a sequence share one loss
    chosen_share: float = 0.0  # of the tokens, that it chooses by their covariance


LOSSES: Mapping[str, LossPart] = MappingProxyType(
    {
        "reinforce": LossPart("nanorl.algorithms.losses:Reinforce", has_ratio=False),
        "ppo": LossPart("nanorl.policy_loss:ClippedLoss"),
        # arXiv 2507.18071: the ratio is a mean over a sequence.
        "gspo": LossPart("nanorl.algorithms.losses:GSPO", clip=(3e-4, 4e-4)),
        # arXiv 2507.20673: of the logarithm of the ratio.
        "gmpo": LossPart(
            "nanorl.algorithms.geometric_mean:GMPO", clip=(0.4, 0.4), is_of_sequences=True
        ),
        "sapo": LossPart("nanorl.algorithms.losses:SAPO"),
        # arXiv 2506.13585 has no lower bound; 0.28 is Trinity-RFT's.
        "cispo": LossPart("nanorl.algorithms.losses:CISPO", clip=(1.0, 0.28)),
        # arXiv 2602.04879: distances of probabilities, not of ratios; then nats.
        "dppo_tv": LossPart("nanorl.algorithms.dppo:DPPOByProbability", clip=(0.15, 0.15)),
        "dppo_kl": LossPart("nanorl.algorithms.dppo:DPPOByNats", clip=(0.05, 0.05)),
        # arXiv 2505.22617
        "clip_cov": LossPart("nanorl.algorithms.covariance:ClipCov", chosen_share=2e-4),
        "kl_cov": LossPart(
            "nanorl.algorithms.covariance:KLCov", chosen_share=2e-3, is_proportional=False
        ),
        "decoupled_ppo": LossPart("nanorl.algorithms.losses:DecoupledPPO", is_against_sampler=True),
        "opd": LossPart(
            "nanorl.algorithms.distillation:OPD",
            is_against_sampler=True,
            is_distillation=True,
            is_proportional=False,
        ),
        "opd_topk": LossPart(
            "nanorl.algorithms.distillation:TopKDistillation",
            is_distillation=True,
            is_proportional=False,
        ),
    }
)
OWN_LOSS = LossPart("nanorl.algorithms.own:OwnLoss", is_proportional=False)


class CorrectionPart(NamedTuple):
    """A correction, as "module:name"."""

    path: str
    bounds: tuple[float, float] | None = None  # correction_low and _high where none are given


CORRECTIONS: Mapping[str, CorrectionPart] = MappingProxyType(
    {
        "none": CorrectionPart("nanorl.algorithms.corrections:none"),
        "tis": CorrectionPart("nanorl.policy_loss:truncated"),
        "mis": CorrectionPart("nanorl.algorithms.corrections:masked"),
        # arXiv 2510.18855
        "icepop": CorrectionPart("nanorl.algorithms.corrections:bounded", bounds=(0.5, 5.0)),
        "kpop": CorrectionPart("nanorl.algorithms.corrections:near"),
        "sequence_tis": CorrectionPart("nanorl.algorithms.corrections:truncated_sequences"),
        # "When speed kills stability": the mean of many tokens.
        "geometric": CorrectionPart(
            "nanorl.algorithms.corrections:kept_sequences", bounds=(0.999, 1.001)
        ),
    }
)

OLD_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "recomputed": "nanorl.policy_loss:recomputed",
        "rollout": "nanorl.algorithms.old_policy:of_rollout",
        "interpolated": "nanorl.algorithms.old_policy:between",
    }
)

_OF_ROLLOUTS = "nanorl.algorithms.aggregation:weights_of_minibatch"
AGGREGATIONS: Mapping[str, str] = MappingProxyType(
    {
        "token_mean": "nanorl.batching:token_mean",
        "seq_mean_token_mean": _OF_ROLLOUTS,
        "seq_mean_token_sum": _OF_ROLLOUTS,
        "constant": _OF_ROLLOUTS,
        "prompt_mean": _OF_ROLLOUTS,
    }
)


def path_of(kind: str, name: str) -> str:
    """The "module:name" of a part; an advantage or a loss of another name is the user's own."""
    if kind == "advantage":
        return ADVANTAGES.get(name, OWN_ADVANTAGE).path
    if kind == "loss":
        return LOSSES.get(name, OWN_LOSS).path
    if kind == "correction":
        return CORRECTIONS[name].path
    return (OLD_POLICIES if kind == "old_policy" else AGGREGATIONS)[name]
