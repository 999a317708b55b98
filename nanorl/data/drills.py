"""Copy drills: random tokens followed by themselves, to grow induction heads before the traces.

A model that starts from random weights learns the manners of tool use quickly and copying the
arguments of the question slowly, since few tokens of a trace show it. A drill is nothing else.
Uniform tokens, not lists of numbers: text with a shape of its own offers shortcuts (which number
is frequent, what follows a comma), and the model learns those instead.
Left out: any task; drills have no answer and no reward.
"""

from __future__ import annotations

import random

from nanorl.data.tiny_tokenizer import CHAT_MARKERS

SHORTEST, LONGEST = 6, 20


def copy_drill(
    rng: random.Random, vocab_size: int, num_tokens: int = 64
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask: a random period, then the same one as often as fits.

    The first period cannot be foreseen and carries no loss. Chat markers do not occur.
    """
    if num_tokens < 2 * LONGEST:
        raise ValueError(
            f"num_tokens={num_tokens} is too short to repeat {LONGEST} tokens; "
            f"use {2 * LONGEST} or more"
        )
    length = rng.randint(SHORTEST, LONGEST)
    period = [rng.randrange(len(CHAT_MARKERS), vocab_size) for _ in range(length)]
    times = num_tokens // length
    return period * times, [0] * length + [1] * (length * (times - 1))
