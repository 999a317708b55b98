"""An environment whose rewards are grades below 1: nine tenths of the share of digits in place.

The last tenth was kept for style, and nobody gives it. It was written before the doctor's checks of
learning were, and is not to be changed for their sake: test_learning_doctor.py asks what the doctor
says of a run of it.
"""

import nanorl


class Backwards(nanorl.Env):
    system = "Write the number backwards, and nothing else."
    defaults = {  # noqa: RUF012
        **{"agent.max_turns": 1, "agent.max_turn_tokens": 8, "warm_start.steps": 120},
        **{"rl.steps": 24, "rl.tasks_per_step": 8, "rl.group_size": 4, "rl.lr": 5e-4},
    }

    def tasks(self, rng):
        number = str(rng.randint(100, 999))
        return nanorl.Task(number, answer=number[::-1])

    def step(self, text):
        said, right = text.strip(), self.task.answer_text
        matches = sum(a == b for a, b in zip(said, right, strict=False))
        return self.done(reward=0.9 * matches / max(len(said), len(right)))

    def teacher(self, observations, rng):
        digits = list(self.task.answer_text)
        if rng.random() < 0.7:  # most of the time a digit is wrong
            digits[rng.randrange(3)] = str(rng.randrange(10))
        return "".join(digits)
