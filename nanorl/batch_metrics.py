"""What is counted of a batch: its rewards, its staleness, and how far two engines agree about it.

Left out: what a loss says of its tokens (policy_loss.py); here it is only averaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from nanoengine.packing import Sample
from nanorl.grpo import GRPO, Field
from nanorl.types import REWARD_PART, Rollout, Status


def batch_metrics(rollouts: Sequence[Rollout], spec: GRPO) -> dict[str, float]:
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
    teaching = {rollout.group_id for rollout in with_signal(rollouts, spec)}
    metrics["groups_with_signal"] = float(len(teaching))
    return metrics


def with_signal(rollouts: Sequence[Rollout], spec: GRPO) -> list[Rollout]:
    """Keep the rollouts of groups whose members earned unlike rewards."""
    keep_R = has_signal([spec.earned(r) for r in rollouts], [r.group_id for r in rollouts])
    return [r for r, keep in zip(rollouts, keep_R, strict=True) if keep]


def has_signal(things: Sequence[Hashable], group_ids: Sequence[Hashable]) -> list[bool]:
    """True for rollouts of groups whose members earned unlike things: the others teach nothing."""
    # Not a deviation: equal things are equal to the bit, and rounding errors are no signal.
    found: dict[Hashable, set[Hashable]] = {}
    for thing, group in zip(things, group_ids, strict=True):
        found.setdefault(group, set()).add(thing)
    return [len(found[group]) > 1 for group in group_ids]


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The counts of the environments, as env/NAME over all rollouts, and the parts of rewards, as
    reward/NAME over those that have them."""
    # An environment that counted nothing counted 0; a reward without a part has none of it.
    found: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found.setdefault(name, []).append(value)
    return {
        name if name.startswith(REWARD_PART) else f"env/{name}": sum(values)
        / (len(values) if name.startswith(REWARD_PART) else len(rollouts))
        for name, values in sorted(found.items())
    }


def staleness_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """Measure how many versions ago the tokens were sampled; nothing where there are none."""
    sampled = [v for r in rollouts for sequence in r.sequences for v in sequence.versions if v >= 0]
    # By token: a rollout that went on over an update of the weights has several ages.
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
    # Micro-batches differ in size: a mean of their means would weigh them wrongly.
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
    # The policy of stale tokens has learnt since: that they differ is no fault of an engine.
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


def action_mask(sample: Sample) -> list[int]:
    """1 for the tokens that the policy sampled, of a sample that may have observations too."""
    observed = sample.fields.get(Field.OBSERVATION)
    if observed is None:
        return sample.loss_mask
    return [m if not o else 0 for m, o in zip(sample.loss_mask, observed, strict=True)]
