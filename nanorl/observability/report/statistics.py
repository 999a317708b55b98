"""How sure a figure of an evaluation is: intervals of 95 %, pass@k, and paired comparison.

Sources: Wilson 1927 (the interval of a proportion), Chen et al. 2021 (pass@k, arXiv 2107.03374),
Miller 2024 (errors clustered by task and paired differences, arXiv 2411.00640), Agresti and Min
2005 (the interval of a paired difference of proportions), McNemar 1947 in its exact form.
Left out: bootstraps, which say the same here with more work and noise of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution
_T975 = (math.inf, 12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The same of Student's t with 0, 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Measured:
    """A value and its interval of 95 %; infinite ends where one measurement says nothing of it."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        ends = {"low": self.low, "high": self.high}
        return {"value": self.value} | {
            name: end if math.isfinite(end) else None for name, end in ends.items()
        }


def wilson(num_successes: int, num: int) -> Measured:
    """The proportion and its Wilson score interval, which is honest at 0 and 1 and for few."""
    if not 0 <= num_successes <= num or num == 0:
        raise ValueError(f"{num_successes} of {num}: give a part of at least one")
    share, z2 = num_successes / num, Z95 * Z95
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num)) / (1 + z2 / num)
    low = 0.0 if num_successes == 0 else middle - half  # exactly, whatever was rounded
    return Measured(share, low, 1.0 if num_successes == num else middle + half)


def share_of_tasks(values: Sequence[float]) -> Measured:
    """The mean of one share in [0, 1] for each task.

    Samples of one task depend on each other: the error is that of the tasks' means (clustered). If
    all are 0 or 1 they are counts, and the interval is Wilson's.
    """
    if set(values) <= {0.0, 1.0}:
        return wilson(round(sum(values)), len(values))
    return _normal(values, 0.0, 1.0)


def mean_of_tasks(values: Sequence[float]) -> Measured:
    """The mean of one unbounded value for each task, such as its mean reward.

    Equal values do not say how much others would differ: no interval.
    """
    if min(values) == max(values):
        return Measured(values[0], -math.inf, math.inf)
    return _normal(values, -math.inf, math.inf)


def _normal(values: Sequence[float], lowest: float, highest: float) -> Measured:
    """Mean +- 1.96 standard errors, within the bounds."""
    mean = fmean(values)
    half = Z95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Measured(mean, max(lowest, mean - half), min(highest, mean + half))


def mean_of_runs(values: Sequence[float]) -> Measured:
    """The mean over runs that differ in their seeds, with Student's interval: few runs say little
    about how much others would differ. One run: no interval."""
    mean, num = fmean(values), len(values)
    if num == 1:
        return Measured(mean, -math.inf, math.inf)
    half = _t975(num - 1) * stdev(values) / math.sqrt(num)
    return Measured(mean, mean - half, mean + half)


def _t975(freedom: int) -> float:
    """The 97.5 % point of Student's t; from 10 degrees of freedom on by its expansion around the
    normal one (Abramowitz and Stegun 26.7.5), whose error is below 2e-4 there."""
    if freedom < len(_T975):
        return _T975[freedom]
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate that one of `k` samples is right: 1 - C(n - c, k) / C(n, k)."""
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_correct} right in {num_samples} samples: k must be at least 1 and "
            "at most the number of samples"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def paired_difference(differences: Sequence[float]) -> Measured:
    """The mean of one difference for each task that both played, in [-1, 1].

    Where each is -1, 0 or 1 the interval is Agresti and Min's: half a task is added to each of the
    four outcomes, so it has a width even where no task or every task differs.
    """
    num = len(differences)
    mean = fmean(differences)
    if set(differences) <= {-1.0, 0.0, 1.0}:
        num_won = sum(d > 0 for d in differences) + 0.5
        num_lost = sum(d < 0 for d in differences) + 0.5
        middle = (num_won - num_lost) / (num + 2)
        spread = num_won + num_lost - (num_won - num_lost) ** 2 / (num + 2)
        half = Z95 * math.sqrt(spread) / (num + 2)
        return Measured(mean, max(-1.0, middle - half), min(1.0, middle + half))
    return _normal(differences, -1.0, 1.0)


def sign_test(num_won: int, num_lost: int) -> float:
    """The two-sided p of so uneven a count if winning and losing were alike probable.

    With one sample a task it is McNemar's exact test of two models on the same tasks.
    """
    num = num_won + num_lost
    below = sum(math.comb(num, i) for i in range(min(num_won, num_lost) + 1))
    return min(1.0, 2 * below / 2**num)
