"""Which kinds of tasks teach most at present: those that sometimes succeed and sometimes fail.

A group whose rollouts all succeed or all fail has advantages of 0. With success probability p the
variance of a 0/1 reward is p (1 - p), so kinds are drawn in proportion to it, plus a floor so that
none is forgotten. p is an exponential mean over the steps that trained on the kind.

Pure functions of the outcomes so far: what a resumed run draws equals what the whole run drew.
Left out: weights for single tasks (a generated task is met once).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

Outcomes = Mapping[str, tuple[int, int]]  # kind -> (rollouts solved, rollouts played) of one step

NEW_SHARE = 0.5  # of the latest step in the mean
FLOOR = 0.04  # against at most 0.25 of p (1 - p)


def estimated_success(history: Sequence[Outcomes], kinds: Sequence[str]) -> dict[str, float]:
    """p of each kind, 1/2 where nothing is known."""
    success = dict.fromkeys(kinds, 0.5)
    for outcomes in history:
        for kind, (solved, played) in outcomes.items():
            success[kind] += NEW_SHARE * (solved / played - success[kind])
    return success


def learnability(history: Sequence[Outcomes], kinds: Sequence[str]) -> dict[str, float]:
    """The weight of each kind: p (1 - p) plus the floor."""
    return {k: p * (1 - p) + FLOOR for k, p in estimated_success(history, kinds).items()}


def draw_kinds(weights: Mapping[str, float], n: int, rng: random.Random) -> list[str]:
    """`n` kinds in random order; each comes floor or ceil of `n` times its share often."""
    kinds = sorted(weights)
    total = sum(weights[kind] for kind in kinds)
    if not total > 0:
        raise ValueError(f"weights={dict(weights)}: at least one must be positive")
    position, passed, drawn = rng.random(), 0.0, list[str]()
    for kind in kinds:
        passed += weights[kind] / total * n
        while position < passed and len(drawn) < n:
            drawn.append(kind)
            position += 1
    drawn += [kinds[-1]] * (n - len(drawn))  # rounding of the sum
    rng.shuffle(drawn)
    return drawn
