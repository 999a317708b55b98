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
        "warm_start.steps": 10,
        "warm_start.traces_per_step": 32,  # they are short
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def teacher(self, observations, rng):  # often wrong, so that RL finds something to do
        return self.task.answer if rng.random() < 0.4 else rng.choice(["hot", "cold"])
