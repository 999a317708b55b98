"""State and tools: three doors, one of them open; looking first pays.

nanorl train --env examples/corridor.py
"""

import nanorl

DOORS = ("left", "middle", "right")


class Corridor(nanorl.Env):
    system = "Go through the open door."
    parser = "pythonic"
    defaults = {  # noqa: RUF012
        "agent.max_turns": 3,
        "agent.max_context_tokens": 384,
        "warm_start.steps": 10,
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        return nanorl.Task(f"Room {rng.randint(10, 999)}.", answer=rng.choice(DOORS))

    def reset(self):
        self.has_looked = False

    def look(self) -> str:
        """See which door is open."""
        self.has_looked = True
        return self.task.answer

    def go(self, door: str) -> str:
        """Go through a door: left, middle or right."""
        self.metric("num_blind", not self.has_looked)
        return self.done(reward=float(door == self.task.answer))

    tools = (look, go)

    def teacher(self, observations, rng):  # looks now and then
        if not observations and rng.random() < 0.4:
            return nanorl.ToolCall("look", {})
        door = self.task.answer if self.has_looked else rng.choice(DOORS)
        return nanorl.ToolCall("go", {"door": door})
