"""The batches of the training benchmark, the same for every engine. Imports nothing of ours.

`tree_batch` is a group of 8 rollouts after one prompt, each forked 4 times: its own trunk, and a
fork that leaves the trunk after each quarter of it. A token is trained in one sequence only.
"""

from __future__ import annotations

import random

VOCAB = 49152
EVEN = [256] * 8
RAGGED = [33, 47, 60, 64, 71, 88, 96, 120, 131, 150, 170, 210, 260, 320, 400, 512]
BATCHES = {"even": EVEN, "ragged": RAGGED}
STEPS = 3  # the first warms up
ROLLOUTS, FORKS, PROMPT, TRUNK, OWN = 8, 4, 96, 96, 32


def batch(name: str, step: int) -> list[list[int]]:
    chance = random.Random(f"{name}/{step}")
    return [[chance.randrange(3, VOCAB) for _ in range(n)] for n in BATCHES[name]]


def num_tokens(name: str) -> int:
    """Predictions in a batch."""
    return sum(n - 1 for n in BATCHES[name])


def tree_batch(step: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss mask of each sequence."""
    chance = random.Random(f"tree/{step}")

    def draw(n: int) -> list[int]:
        return [chance.randrange(3, VOCAB) for _ in range(n)]

    prompt = draw(PROMPT)
    sequences = []
    for _ in range(ROLLOUTS):
        trunk = draw(TRUNK)
        for fork in range(FORKS):
            is_whole = fork == FORKS - 1  # this one trains the trunk
            kept = TRUNK * (fork + 1) // FORKS
            mask = [0] * PROMPT + [int(is_whole)] * kept + [1] * OWN
            sequences.append((prompt + trunk[:kept] + draw(OWN), mask))
    return sequences
