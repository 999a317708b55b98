"""Screenshots: a bar that is drawn anew after each press; stop it at the red mark.

nanorl train --model FOLDER --env examples/screenshots.py          # FOLDER: a model that sees
"""

import numpy as np

import nanorl


class Bar(nanorl.Env):
    defaults = {"agent.max_turns": 8, "agent.max_turn_tokens": 4}  # noqa: RUF012

    def tasks(self, rng):
        return nanorl.Task("Say + or -, then stop.", data={"mark": rng.randrange(1, 6)})

    def reset(self):
        self.end = 3
        return [self.task.prompt, self.screenshot()]

    def step(self, text):
        if "stop" in text:
            return self.done(reward=float(self.end == self.task.data["mark"]))
        self.end += ("+" in text) - ("-" in text)
        return self.screenshot()

    def screenshot(self):
        pixels = np.zeros((48, 48, 3), np.uint8)
        pixels[16:32, : 8 * max(self.end, 0)] = 255
        pixels[:, 8 * self.task.data["mark"]] = (255, 0, 0)
        return nanorl.Image(pixels)

    def teacher(self, observations, rng):
        missing = self.task.data["mark"] - self.end
        return "stop" if missing == 0 else "+" if missing > 0 else "-"
