"""The game that taught silence: a wrong guess costs 0.05, a turn that is cut off nothing.

It was the first example once. test_doctor.py asks the doctor about it.
"""

import nanorl


class Guess(nanorl.Env):
    system = "Guess the number from 1 to 20. Say a number and nothing else."
    defaults = {"agent.max_turns": 6, "agent.max_turn_tokens": 8, "rl.lr": 6e-5}  # noqa: RUF012

    def tasks(self, rng):
        return nanorl.Task("First guess?", answer=rng.randint(1, 20))

    def reset(self):
        self.low, self.high = 1, 20

    def step(self, text):
        guess = nanorl.last_number(text, default=0)
        if guess == self.task.answer:
            return self.done(reward=1.0)
        self.reward(-0.05)
        return "higher" if guess < self.task.answer else "lower"
