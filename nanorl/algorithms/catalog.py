"""Where the parts of an algorithm are: estimators, losses, corrections, ..., each by its name.

A part of your own is a line here, its name in option_groups.py, and a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ADVANTAGES: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "nanorl.group_advantage:of_groups",
        "dr_grpo": "nanorl.algorithms.advantages:DR_GRPO",
        "rloo": "nanorl.algorithms.advantages:RLOO",
        "maxrl": "nanorl.algorithms.advantages:MAXRL",
        "opo": "nanorl.algorithms.advantages:opo_of_batch",
        "gdpo": "nanorl.algorithms.advantages:gdpo_of_batch",
        "otb": "nanorl.algorithms.token_baseline:otb_of_batch",
        "hgpo": "nanorl.algorithms.hierarchical:hgpo_of_batch",
        "reinforce_pp": "nanorl.algorithms.returns:reinforce_pp_of_batch",
        "reinforce_pp_baseline": "nanorl.algorithms.returns:reinforce_pp_baseline_of_batch",
        "gae": "nanorl.algorithms.returns:gae_of_batch",
        "none": "nanorl.algorithms.advantages:none_of_batch",
    }
)
"""An `Estimator` (nanorl/group_advantage.py) each."""

LOSSES: Mapping[str, str] = MappingProxyType(
    {
        "reinforce": "nanorl.algorithms.losses:Reinforce",
        "ppo": "nanorl.policy_loss:ClippedLoss",
        "gspo": "nanorl.algorithms.losses:GSPO",
        "sapo": "nanorl.algorithms.losses:SAPO",
        "cispo": "nanorl.algorithms.losses:CISPO",
        "dppo_tv": "nanorl.algorithms.dppo:DPPOByProbability",
        "dppo_kl": "nanorl.algorithms.dppo:DPPOByNats",
        "clip_cov": "nanorl.algorithms.covariance:ClipCov",
        "kl_cov": "nanorl.algorithms.covariance:KLCov",
        "decoupled_ppo": "nanorl.algorithms.losses:DecoupledPPO",
        "opd": "nanorl.algorithms.distillation:OPD",
        "opd_topk": "nanorl.algorithms.distillation:TopKDistillation",
    }
)
"""A subclass of `ClippedLoss` (nanorl/policy_loss.py) each."""

CORRECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "none": "nanorl.algorithms.corrections:none",
        "tis": "nanorl.policy_loss:truncated",
        "mis": "nanorl.algorithms.corrections:masked",
        "icepop": "nanorl.algorithms.corrections:bounded",
        "kpop": "nanorl.algorithms.corrections:near",
        "sequence_tis": "nanorl.algorithms.corrections:truncated_sequences",
        "geometric": "nanorl.algorithms.corrections:kept_sequences",
    }
)
"""A `Correction` (nanorl/policy_loss.py) each."""

OLD_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "recomputed": "nanorl.policy_loss:recomputed",
        "rollout": "nanorl.algorithms.old_policy:of_rollout",
        "interpolated": "nanorl.algorithms.old_policy:between",
    }
)
"""An `OldPolicy` (nanorl/policy_loss.py) each."""

_OF_ROLLOUTS = "nanorl.algorithms.aggregation:weights_of_minibatch"
WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "token_mean": "nanorl.batching:token_mean",
        "seq_mean_token_mean": _OF_ROLLOUTS,
        "seq_mean_token_sum": _OF_ROLLOUTS,
        "constant": _OF_ROLLOUTS,
        "prompt_mean": _OF_ROLLOUTS,
    }
)
"""A `Weigher` (nanorl/batching.py) each, by the name of the aggregation."""

_KINDS = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "correction": CORRECTIONS,
    "old_policy": OLD_POLICIES,
    "aggregation": WEIGHTS,
}
_OWN = {
    "advantage": "nanorl.algorithms.own:own_of_batch",
    "loss": "nanorl.algorithms.own:OwnLoss",
}


def path_of(kind: str, name: str) -> str:
    """The "module:name" of a part; an advantage or a loss of another name is the user's own."""
    table = _KINDS[kind]
    return table[name] if name in table or kind not in _OWN else _OWN[kind]
