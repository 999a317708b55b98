"""A maze of nine junctions. The teacher walks at random; RL finds out what the walls are for.

nanorl train --env examples/maze.py
"""

import nanorl


class Maze(nanorl.Env):
    system = "Find the way out. Say left or right and nothing else."
    defaults = {  # options of its runs; flags win
        "agent.max_turns": 9,
        "agent.max_turn_tokens": 4,
        "warm_start.steps": 6,
        "rl.steps": 24,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        walls = rng.choices(["left", "right"], k=9)
        return nanorl.Task(f"wall on the {walls[0]}", data={"walls": walls})

    def reset(self):
        self.passed = 0

    def step(self, text):
        walls = self.task.data["walls"]
        if text not in ("left", "right") or text == walls[self.passed]:
            return self.done(reward=self.passed / 9)  # ran into a wall
        self.passed += 1
        return self.done(reward=1.0) if self.passed == 9 else f"wall on the {walls[self.passed]}"

    def teacher(self, observations, rng):
        return rng.choice(["left", "right"])
