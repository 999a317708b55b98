"""`panel`: press the k-th smallest of sixteen numbers, on one panel after the other.

The first picture says k, a green digit; the second is a panel of 4 x 4 buttons, each a number of
two digits, and every press brings another one. A turn is the letter of a button, A to P by row. The
last of `num_panels` right presses pays 1, a wrong one ends the episode with nothing. So every turn
reads small digits, and needs the first picture as much as the newest: hidden, success is at most
that of guessing k, one in `orders`; with no picture it is 16 ** -num_panels.

The teacher presses the right button.

    nanorl train --model FOLDER --env panel --env-args num_panels=3 orders=4

Left out: panels of other sizes, which would need larger pictures.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from nanorl.envs.env import Done, Env
from nanorl.envs.images import Image
from nanorl.envs.shipped.argument_checks import check_count
from nanorl.envs.shipped.segment_digits import draw_number, number_picture
from nanorl.task import Task

SIDE = 4  # buttons in a row
BUTTON = 12  # pixels of one; the picture is that of the tiny model, 48 x 48
LETTERS = "ABCDEFGHIJKLMNOP"
_SMALLEST, _LARGEST = 10, 99
_MARGINS = 2, 1  # above and left of a button's number
_FACE, _DIGITS, _ORDER = (0, 0, 96), (255, 255, 255), (0, 255, 0)
_LETTER = re.compile(r"[A-Z]")


class Panel(Env):
    """An order that is shown once, and panels of buttons."""

    system = ""
    defaults: Mapping[str, Any] = MappingProxyType(
        {"agent.max_turn_tokens": 4, "agent.max_context_tokens": 256, "rl.temperature": 1.0}
    )

    def __init__(self, num_panels: int = 3, orders: int = 4) -> None:
        check_count("num_panels", num_panels, 1, 16)
        check_count("orders", orders, 1, 9)
        self.num_panels, self.orders = num_panels, orders
        self.defaults = {**self.defaults, "agent.max_turns": num_panels}
        self._num_pressed = 0

    def tasks(self, rng: random.Random) -> Task:
        """An order and as many panels as there are presses."""
        numbers = range(_SMALLEST, _LARGEST + 1)
        panels = [rng.sample(numbers, SIDE * SIDE) for _ in range(self.num_panels)]
        data = {"order": rng.randint(1, self.orders), "panels": panels}
        return Task("Press the buttons.", kind="panel", data=data)

    def reset(self) -> list[Any]:
        order = number_picture(self.task.data["order"], SIDE * BUTTON, _ORDER, scale=6)
        return [Image(order), self._panel()]

    def step(self, text: str) -> Done | list[Any]:
        found = _LETTER.findall(text)
        if found != [self._right]:
            return self.done(reward=0.0)
        self._num_pressed += 1
        if self._num_pressed == self.num_panels:
            return self.done(reward=1.0)
        return [self._panel()]

    def score(self, transcript: object) -> float:
        """An episode that a limit cut off has not pressed all of them."""
        return 0.0

    def teacher(self, observations: Sequence[Any], rng: random.Random) -> str:
        """The right button."""
        return self._right

    @property
    def _numbers(self) -> list[int]:
        numbers: list[int] = self.task.data["panels"][self._num_pressed]
        return numbers

    @property
    def _right(self) -> str:
        number = sorted(self._numbers)[self.task.data["order"] - 1]
        return LETTERS[self._numbers.index(number)]

    def _panel(self) -> Any:
        return Image(drawn(self._numbers))


def drawn(numbers: Sequence[int]) -> np.ndarray:
    """Sixteen buttons as uint8 pixels [48, 48, 3]: faces of 11 x 11, each with its number."""
    pixels = np.zeros((SIDE * BUTTON, SIDE * BUTTON, 3), np.uint8)
    for place, number in enumerate(numbers):
        top, left = (BUTTON * at for at in divmod(place, SIDE))
        pixels[top : top + BUTTON - 1, left : left + BUTTON - 1] = _FACE
        draw_number(pixels, number, (top + _MARGINS[0], left + _MARGINS[1]), _DIGITS)
    return pixels
