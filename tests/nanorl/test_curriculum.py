"""The curriculum: hand-computed weights, exact quotas, and nothing but the outcomes decides."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nanorl.data.curriculum import FLOOR, draw_kinds, estimated_success, learnability
from nanorl.data.smollm2_family import smollm2_family
from nanorl.data.tasks import TaskSource

KINDS = ["a", "b", "c"]


def test_estimates_follow_the_outcomes_as_worked_out_by_hand() -> None:
    history = [{"a": (8, 8), "b": (0, 8)}, {"a": (4, 8)}]
    # a: 0.5 -> 0.75 -> 0.625, b: 0.5 -> 0.25, c: never met
    assert estimated_success(history, KINDS) == {"a": 0.625, "b": 0.25, "c": 0.5}
    assert learnability(history, KINDS) == pytest.approx(
        {"a": 0.625 * 0.375 + FLOOR, "b": 0.1875 + FLOOR, "c": 0.25 + FLOOR}
    )


def test_each_kind_comes_floor_or_ceil_of_its_quota_and_on_average_exactly_it() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    counts: Counter[str] = Counter()
    for seed in range(4000):
        drawn = Counter(draw_kinds(weights, 8, random.Random(seed)))
        assert drawn["a"] == 4 and drawn["b"] in (2, 3) and drawn["c"] in (1, 2), drawn
        counts += drawn
    assert counts["b"] / 4000 == pytest.approx(2.4, abs=0.05)
    assert counts["c"] / 4000 == pytest.approx(1.6, abs=0.05)


def test_a_kind_of_weight_zero_is_never_drawn_and_all_zero_is_refused() -> None:
    for seed in range(200):
        assert "b" not in draw_kinds({"a": 1.0, "b": 0.0, "c": 2.0}, 5, random.Random(seed))
    with pytest.raises(ValueError, match="at least one must be positive"):
        draw_kinds({"a": 0.0}, 5, random.Random(0))


def test_a_weighted_batch_is_a_function_of_step_and_weights() -> None:
    source = TaskSource([smollm2_family()], seed=3)
    weights = dict.fromkeys(source.kinds, 0.0) | {"dates": 3.0, "primes": 1.0}
    batch = source.batch(5, 8, weights)
    assert Counter(task.kind for task in batch) == {"dates": 6, "primes": 2}
    assert TaskSource([smollm2_family()], seed=3).batch(5, 8, weights) == batch
    assert source.batch(6, 8, weights) != batch
    assert {task.split for task in batch} == {"train"}
