"""Files: a number lies in one of two files; reading the right one pays.

nanorl train --env examples/drawers.py
"""

import nanorl


class Drawers(nanorl.Env):
    system = "Say the number in the file."
    tools = (nanorl.read,)
    parser = "pythonic"
    defaults = {  # noqa: RUF012
        "agent.max_turns": 3,
        "agent.max_context_tokens": 512,
        "warm_start.steps": 10,
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        files = {name: str(rng.randint(10, 99)) for name in ("a.txt", "b.txt")}
        asked = rng.choice(list(files))
        return nanorl.Task(asked, answer=files[asked], files=files)

    def step(self, text):  # a turn that calls no tool
        return self.done(answer=nanorl.last_number(text))

    def teacher(self, observations, rng):  # reads either file, or none
        if not observations and rng.random() < 0.7:
            return nanorl.ToolCall("read", {"path": rng.choice(list(self.task.files))})
        return str(nanorl.last_number(observations[0]) if observations else rng.randint(10, 99))
