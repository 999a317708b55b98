"""A data set: a table of drinks with the answers in it.

nanorl train --env examples/drinks.py
"""

from pathlib import Path

import nanorl


class Drinks(nanorl.Env):
    system = "Say hot or cold."
    data = Path(__file__).with_name("drinks.csv")  # its columns are prompt and answer
    defaults = {  # noqa: RUF012
        "agent.max_turn_tokens": 8,
        "warm_start.steps": 8,
        "warm_start.traces_per_step": 32,  # so many average out that the teacher only guesses
        "warm_start.lr": 5e-5,
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def teacher(self, observations, rng):  # shows the words, but not which one
        return rng.choice(["hot", "cold"])
