"""An environment in which every step costs something: a fifth of what arriving earns.

It was written before the doctor's checks of learning were, and is not to be changed for their sake:
test_learning_doctor.py asks what the doctor says of a run of it.
"""

import nanorl


class Walk(nanorl.Env):
    system = "Walk to the door: say left or right."
    defaults = {  # noqa: RUF012
        **{"agent.max_turns": 8, "agent.max_turn_tokens": 6, "agent.max_context_tokens": 256},
        **{"warm_start.steps": 60, "warm_start.traces_per_step": 8},
        **{"rl.steps": 20, "rl.tasks_per_step": 8, "rl.group_size": 4, "rl.lr": 5e-4},
    }

    def tasks(self, rng):
        here = rng.randint(0, 9)
        door = rng.choice([place for place in range(10) if place != here])
        return nanorl.Task(f"you {here} door {door}", data={"here": here, "door": door})

    def reset(self):
        self.here, self.door = self.task.data["here"], self.task.data["door"]

    def step(self, text):
        self.here += {"left": -1, "right": 1}.get(text.strip(), 0)
        self.reward(-0.2)
        if self.here == self.door:
            return self.done(reward=1.0)
        return f"you {self.here} door {self.door}"

    def teacher(self, observations, rng):
        right_way = "right" if self.here < self.door else "left"
        other = "left" if right_way == "right" else "right"
        return right_way if rng.random() < 0.7 else other
