"""The lengths of answers: a function of seed, task and rollout, so two runs draw the same.

A logarithm of a length is normal; its group has `group_share` of the variance in common (hard tasks
have long answers). What exceeds the cap is cut there, as the engines do.
Left out: lengths that grow while the policy learns; simulate the run piece by piece.
"""

from __future__ import annotations

import math
import random
from functools import cache
from statistics import NormalDist

from nanorl.inspection.simulate.simulation_config import AnswerLengths
from nanorl.task import derive_seed

_NORMAL = NormalDist()


def draw_length(lengths: AnswerLengths, seed: int, task_id: str, rollout_id: str) -> int:
    """Tokens of one rollout's answer, at least 1."""
    if lengths.kind == "constant":
        return round(lengths.mean)
    own = random.Random(derive_seed(seed, "own", rollout_id))
    if lengths.kind == "empirical":
        return min(own.choice(lengths.values), lengths.cap)
    shared = random.Random(derive_seed(seed, "shared", task_id))
    share = lengths.group_share
    z = math.sqrt(share) * shared.gauss() + math.sqrt(1 - share) * own.gauss()
    mu = log_median(lengths.mean, lengths.sigma, lengths.cap)
    return max(1, min(lengths.cap, round(math.exp(mu + lengths.sigma * z))))


def mean_length(lengths: AnswerLengths) -> float:
    """Tokens of an answer on average."""
    if lengths.kind == "empirical":
        return sum(min(one, lengths.cap) for one in lengths.values) / len(lengths.values)
    return lengths.mean


def clipped_mean(mu: float, sigma: float, cap: float) -> float:
    """The mean of min(X, cap), where log X is normal with `mu` and `sigma`."""
    z = (math.log(cap) - mu) / sigma
    below = math.exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma)
    return below + cap * (1 - _NORMAL.cdf(z))


@cache
def log_median(mean: float, sigma: float, cap: float) -> float:
    """The `mu` for which `clipped_mean` is `mean`, by bisection."""
    low, high = math.log(mean) - sigma**2, math.log(cap) + 20 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        if clipped_mean(middle, sigma, cap) < mean:
            low = middle
        else:
            high = middle
    return low
