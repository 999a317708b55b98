"""Published algorithms by name."""

from __future__ import annotations

from dataclasses import replace

from nanorl.algorithms.spec import AlgorithmSpec


def named_spec(name: str) -> AlgorithmSpec:
    """A published recipe. Change parts of it with `dataclasses.replace`."""
    base = AlgorithmSpec()
    recipes = {
        "grpo": base,
        "dr_grpo": replace(
            base, advantage="dr_grpo", aggregation="constant", constant_length=1024, dual_clip=None
        ),
        "rloo": replace(base, advantage="rloo", loss="reinforce"),
        "reinforce_pp": replace(base, advantage="reinforce_pp", kl_reward_coef=1e-3),
        "reinforce_pp_baseline": replace(
            base, advantage="reinforce_pp_baseline", kl_coef=1e-3, kl_estimator="k2"
        ),
        "maxrl": replace(base, advantage="maxrl", loss="reinforce"),
        "ppo": replace(base, advantage="gae"),
        "dapo": replace(base, clip_high=0.28, dynamic_sampling=True, overlong_buffer=128),
        "gspo": replace(
            base,
            loss="gspo",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="seq_mean_token_mean",
        ),
        "sapo": replace(base, loss="sapo", aggregation="seq_mean_token_mean"),
        "cispo": replace(base, loss="cispo"),
        "opd": replace(base, advantage="none", loss="opd"),
    }
    if name not in recipes:
        raise ValueError(f"algorithm {name!r}: choose one of {', '.join(recipes)}")
    return recipes[name]
