"""Turn rewards: three animals come by, and each right answer earns something.

nanorl train --env examples/farm.py
"""

import nanorl

ANIMALS = {"cat": "feed", "hen": "feed", "bear": "flee", "wolf": "flee"}


class Farm(nanorl.Env):
    system = "Say feed or flee."
    defaults = {  # noqa: RUF012
        "agent.max_turns": 3,
        "agent.max_turn_tokens": 8,
        "warm_start.steps": 10,
        "warm_start.traces_per_step": 32,  # they are short
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        comers = rng.choices(list(ANIMALS), k=3)
        return nanorl.Task(comers[0], answer=ANIMALS[comers[-1]], data={"next": comers[1:]})

    def reset(self):
        self.comer, self.left, self.num_right = self.task.prompt, self.task.data["next"], 0

    def step(self, text):
        if text.strip().lower() == ANIMALS[self.comer]:
            self.num_right += 1
            self.reward(0.3)
        if not self.left:
            return self.done(reward=float(self.num_right == 3))  # beside what the turns earned
        self.comer, *self.left = self.left
        return self.comer

    def teacher(self, observations, rng):  # often wrong, so that RL finds something to do
        return ANIMALS[self.comer] if rng.random() < 0.4 else rng.choice(["feed", "flee"])
