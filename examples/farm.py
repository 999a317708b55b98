"""Turn rewards: three animals come by, and each right answer earns a third.

nanorl train --env examples/farm.py
"""

import nanorl

ANIMALS = {"cat": "feed", "hen": "feed", "dog": "feed", "bear": "flee", "wolf": "flee"}


class Farm(nanorl.Env):
    system = "Say feed or flee."
    defaults = {  # noqa: RUF012
        "agent.max_turns": 3,
        "agent.max_turn_tokens": 8,
        "warm_start.steps": 10,
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        comers = rng.choices(list(ANIMALS), k=3)
        return nanorl.Task(comers[0], answer=ANIMALS[comers[-1]], data={"next": comers[1:]})

    def reset(self):
        self.comer, self.left = self.task.prompt, list(self.task.data["next"])

    def step(self, text):
        if text.strip().lower() == ANIMALS[self.comer]:
            self.reward(1 / 3)
        if not self.left:
            return self.done(reward=0.0)  # beside what the turns earned
        self.comer = self.left.pop(0)
        return self.comer

    def teacher(self, observations, rng):  # shows the words, but not which one
        return rng.choice(["feed", "flee"])
