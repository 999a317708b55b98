"""The batches of the training benchmark, the same for every engine. Imports nothing of ours."""

from __future__ import annotations

import random

VOCAB = 49152
EVEN = [256] * 8
RAGGED = [33, 47, 60, 64, 71, 88, 96, 120, 131, 150, 170, 210, 260, 320, 400, 512]
BATCHES = {"even": EVEN, "ragged": RAGGED}
STEPS = 3  # the first warms up


def batch(name: str, step: int) -> list[list[int]]:
    chance = random.Random(f"{name}/{step}")
    return [[chance.randrange(3, VOCAB) for _ in range(n)] for n in BATCHES[name]]


def num_tokens(name: str) -> int:
    """Predictions in a batch."""
    return sum(n - 1 for n in BATCHES[name])
