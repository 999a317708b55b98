"""The published algorithms by their names, as `--algorithm` takes them: an `AlgorithmSpec` each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from nanorl.algorithms.spec import AlgorithmSpec


class Recipe(NamedTuple):
    """A published algorithm. What its paper leaves open is this repository's choice."""

    summary: str
    spec: AlgorithmSpec


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "grpo": Recipe(
            "rewards normalised in their group, PPO's clip (arXiv 2402.03300)", AlgorithmSpec()
        ),
        "dr_grpo": Recipe(
            "GRPO without its two divisions, by length and by spread (arXiv 2503.20783)",
            AlgorithmSpec(
                advantage="dr_grpo", aggregation="constant", constant_length=1024, dual_clip=None
            ),
        ),
        "rloo": Recipe(
            "REINFORCE; the baseline is the mean of the others (arXiv 2402.14740)",
            AlgorithmSpec(advantage="rloo", loss="reinforce"),
        ),
        "reinforce_pp": Recipe(
            "REINFORCE++: returns of tokens, whitened over the batch (arXiv 2501.03262)",
            AlgorithmSpec(advantage="reinforce_pp", kl_reward_coef=1e-3),
        ),
        "reinforce_pp_baseline": Recipe(
            "REINFORCE++ less the mean of the group, KL in the loss (arXiv 2501.03262)",
            AlgorithmSpec(advantage="reinforce_pp_baseline", kl_coef=1e-3, kl_estimator="k2"),
        ),
        "pass_at_k": Recipe(
            "GRPO that counts a group's success, of any of k members (arXiv 2508.10751)",
            AlgorithmSpec(advantage="pass_at_k"),
        ),
        "maxrl": Recipe(
            "REINFORCE; rewards over the group's success rate (arXiv 2602.02710)",
            AlgorithmSpec(advantage="maxrl", loss="reinforce"),
        ),
        "ppo": Recipe(
            "a critic, GAE, and the clip (arXiv 1707.06347)", AlgorithmSpec(advantage="gae")
        ),
        "dapo": Recipe(
            "GRPO with a higher clip, mixed groups only, a soft limit on length (arXiv 2503.14476)",
            AlgorithmSpec(clip_high=0.28, dynamic_sampling=True, overlong_buffer=128),
        ),
        "gspo": Recipe(
            "GRPO with one ratio for a whole sequence (arXiv 2507.18071)",
            AlgorithmSpec(loss="gspo", aggregation="seq_mean_token_mean"),
        ),
        "gmpo": Recipe(
            "GRPO with the geometric mean of a sequence's ratios (arXiv 2507.20673)",
            AlgorithmSpec(loss="gmpo", aggregation="seq_mean_token_mean"),
        ),
        "sapo": Recipe(
            "a soft gate instead of the clip (arXiv 2511.20347)",
            AlgorithmSpec(loss="sapo", aggregation="seq_mean_token_mean"),
        ),
        "cispo": Recipe(
            "the weight is clipped, so no token loses its gradient (arXiv 2506.13585)",
            AlgorithmSpec(loss="cispo"),
        ),
        "opo": Recipe(
            "REINFORCE; the baseline is the group's mean by length (arXiv 2505.23585)",
            AlgorithmSpec(advantage="opo", loss="reinforce"),
        ),
        "otb": Recipe(
            "REINFORCE; a baseline for each token, by what was uncertain up to it "
            "(arXiv 2602.07078)",
            AlgorithmSpec(advantage="otb", loss="reinforce"),
        ),
        "hgpo": Recipe(
            "GRPO among turns that were taken in the same situation (arXiv 2602.22817)",
            AlgorithmSpec(advantage="hgpo", reward_level="turn", gamma=0.95),
        ),
        "dppo_tv": Recipe(
            "tokens whose probability moved too far from the sampler's learn no more "
            "(arXiv 2602.04879)",
            AlgorithmSpec(loss="dppo_tv", old_policy="rollout"),
        ),
        "dppo_kl": Recipe(
            "the same, measured in nats (arXiv 2602.04879)",
            AlgorithmSpec(loss="dppo_kl", old_policy="rollout"),
        ),
        "kpop": Recipe(
            "tokens about which trainer and sampler differ learn nothing "
            "(ringtech.notion.site/kpop)",
            AlgorithmSpec(correction="kpop"),
        ),
        "decoupled_ppo": Recipe(
            "what is stale is weighed apart from the clip, whose centre is interpolated "
            "(arXiv 2505.24298)",
            AlgorithmSpec(loss="decoupled_ppo", old_policy="interpolated"),
        ),
        "clip_cov": Recipe(
            "tokens whose advantage agrees most with their log-prob learn nothing "
            "(arXiv 2505.22617)",
            AlgorithmSpec(loss="clip_cov"),
        ),
        "kl_cov": Recipe(
            "such tokens may not move far (arXiv 2505.22617)",
            AlgorithmSpec(loss="kl_cov"),
        ),
        "echo": Recipe(
            "GRPO that also learns to foresee what tools answer (arXiv 2605.24517)",
            AlgorithmSpec(observation_coef=0.05),
        ),
        "opd": Recipe(
            "on-policy distillation from --rl.reference, without rewards (arXiv 2306.13649)",
            AlgorithmSpec(advantage="none", loss="opd"),
        ),
        "opd_topk": Recipe(
            "the same over the teacher's likeliest tokens at each place (arXiv 2306.13649)",
            AlgorithmSpec(advantage="none", loss="opd_topk"),
        ),
        "sdft": Recipe(
            "the policy with the task's solution in its prompt teaches itself, as it is; "
            "hindsight-teacher average is the paper's teacher (arXiv 2601.19897)",
            AlgorithmSpec(advantage="none", loss="opd", hindsight="solution"),
        ),
        "sdpo": Recipe(
            "the same with a success of the group, or with what a failure was answered, and with "
            "the same choice of a teacher (arXiv 2601.20802)",
            AlgorithmSpec(advantage="none", loss="opd_topk", hindsight="success_or_feedback"),
        ),
    }
)


def named_spec(name: str) -> AlgorithmSpec:
    """A published recipe. Change parts of it with `dataclasses.replace`."""
    if name not in RECIPES:
        raise ValueError(
            f"--algorithm {name}: no such algorithm; choose one of {', '.join(RECIPES)}"
        )
    return RECIPES[name].spec
