"""Intervals and tests against numbers from the literature and against brute force."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from nanorl.observability.report.statistics import (
    Z95,
    mean_of_tasks,
    paired_difference,
    pass_at_k,
    share_of_tasks,
    sign_test,
    wilson,
)


def test_wilson_intervals_are_those_of_the_tables() -> None:
    # Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    table = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611)}
    for (won, num), (low, high) in (table | {(1, 29): (0.0061, 0.1718)}).items():
        one = wilson(won, num)
        assert (round(one.low, 4), round(one.high, 4)) == (low, high)
        assert one.value == won / num
    # Its ends are the shares at which the score test just accepts what was seen.
    one = wilson(7, 19)
    for end in (one.low, one.high):
        assert abs(7 / 19 - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / 19))
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="0 of 0"):
        wilson(0, 0)


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([i < c for i in range(n)], k))
                assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, subsets)))
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@5 of 1 right in 4"):
        pass_at_k(4, 1, 5)


def test_the_error_of_a_mean_is_that_of_the_tasks_not_of_their_samples() -> None:
    shares = [0.0, 0.5, 1.0, 0.25, 0.75]
    one = share_of_tasks(shares)
    deviation = math.sqrt(sum((s - 0.5) ** 2 for s in shares) / 4)
    assert one.value == 0.5
    assert one.high - one.value == pytest.approx(1.96 * deviation / math.sqrt(5), rel=1e-4)
    assert share_of_tasks([1.0] * 20) == wilson(20, 20), "counts, where every share is 0 or 1"
    assert share_of_tasks([0.9, 1.0]).high == 1.0, "no share is above 1"
    alone = mean_of_tasks([3.0])
    assert alone.to_json() == {"value": 3.0, "low": None, "high": None}


def test_a_paired_difference_is_agresti_and_mins_for_single_samples() -> None:
    # By hand: 8 won, 2 lost of 40: cells 8.5, 2.5 of 42.
    one = paired_difference([1.0] * 8 + [-1.0] * 2 + [0.0] * 30)
    half = 1.959964 * math.sqrt(8.5 + 2.5 - 6.0**2 / 42) / 42
    assert one.value == pytest.approx(0.15)
    assert (one.low, one.high) == pytest.approx((6 / 42 - half, 6 / 42 + half))
    same = paired_difference([0.0] * 10)
    assert same.low == -same.high < 0, "ten equal tasks do not prove two models equal"
    several = paired_difference([0.5, 0.0, 0.25, 0.25])
    assert several.value == 0.25 and several.low == pytest.approx(
        0.25 - 1.96 * 0.2041 / 2, abs=1e-4
    )


def test_paired_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(0)
    outcomes = [1.0] * 20 + [-1.0] * 10 + [0.0] * 70  # the truth: 0.1
    hits = 0
    for _ in range(1000):
        one = paired_difference(rng.choices(outcomes, k=60))
        hits += one.low <= 0.1 <= one.high
    assert 0.93 < hits / 1000 < 0.98


def test_the_sign_test_is_the_sum_over_all_outcomes_as_rare() -> None:
    for won, lost in itertools.product(range(6), repeat=2):
        num = won + lost
        tails = [sum(coins) for coins in itertools.product((0, 1), repeat=num)]
        as_rare = sum(abs(heads - num / 2) >= abs(won - num / 2) for heads in tails)
        assert sign_test(won, lost) == pytest.approx(as_rare / 2**num)
    assert sign_test(5, 15) == pytest.approx(0.04138947), "as printed by R's binom.test(5, 20)"
    assert sign_test(3000, 3000) == 1.0
