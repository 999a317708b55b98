"""Published algorithms by name. What each leaves open is this repository's choice."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanorl.algorithms.spec import AlgorithmSpec

RECIPES: Mapping[str, AlgorithmSpec] = MappingProxyType(
    {
        "grpo": AlgorithmSpec(),
        "dr_grpo": AlgorithmSpec(
            advantage="dr_grpo", aggregation="constant", constant_length=1024, dual_clip=None
        ),
        "rloo": AlgorithmSpec(advantage="rloo", loss="reinforce"),
        "reinforce_pp": AlgorithmSpec(advantage="reinforce_pp", kl_reward_coef=1e-3),
        "reinforce_pp_baseline": AlgorithmSpec(
            advantage="reinforce_pp_baseline", kl_coef=1e-3, kl_estimator="k2"
        ),
        "maxrl": AlgorithmSpec(advantage="maxrl", loss="reinforce"),
        "ppo": AlgorithmSpec(advantage="gae"),
        "dapo": AlgorithmSpec(clip_high=0.28, dynamic_sampling=True, overlong_buffer=128),
        "gspo": AlgorithmSpec(loss="gspo", aggregation="seq_mean_token_mean"),
        "sapo": AlgorithmSpec(loss="sapo", aggregation="seq_mean_token_mean"),
        "cispo": AlgorithmSpec(loss="cispo"),
        "opd": AlgorithmSpec(advantage="none", loss="opd"),
    }
)


def named_spec(name: str) -> AlgorithmSpec:
    """A published recipe. Change parts of it with `dataclasses.replace`."""
    if name not in RECIPES:
        raise ValueError(f"algorithm {name!r}: choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
