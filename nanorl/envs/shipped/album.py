"""`album`: three pages with a number each, which a tool shows one by one; say their sum.

A turn calls `page(number)`, which answers with a picture, or says the sum: the right one pays 1.
So a policy needs pictures of three turns at once, and text after them. The order of the pages is
its own to choose; a page may be asked for again.

The teacher asks for the pages in their order.

    nanorl train --model FOLDER --env album --env-args pages=3 most=9

Left out: numbers of more than two digits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanoinfer.chat.base import ToolCall
from nanorl.envs.env import Env
from nanorl.envs.images import Image
from nanorl.envs.shipped.argument_checks import check_count
from nanorl.envs.shipped.segment_digits import number_picture
from nanorl.envs.tools.base import ToolError
from nanorl.task import Task

SIDE = 48  # pixels: those of the tiny model
_INK = (255, 255, 255)
_SCALE = 4


class Album(Env):
    """Pages that a tool shows. What is said without a call is the answer."""

    system = ""
    parser = "pythonic"
    defaults: Mapping[str, Any] = MappingProxyType(
        {"agent.max_turn_tokens": 24, "agent.max_context_tokens": 768, "rl.temperature": 1.0}
    )

    def __init__(self, pages: int = 3, most: int = 9) -> None:
        check_count("pages", pages, 1, 9)
        check_count("most", most, 1, 99)
        self.pages, self.most = pages, most
        self.defaults = {**self.defaults, "agent.max_turns": pages + 1}

    def tasks(self, rng: random.Random) -> Task:
        """A number for each page."""
        numbers = [rng.randint(1, self.most) for _ in range(self.pages)]
        prompt = f"What is the sum of pages 1 to {self.pages}?"
        return Task(prompt, answer=sum(numbers), kind="album", data={"numbers": numbers})

    def page(self, number: int) -> Any:
        """See a page of the album.

        Args:
            number: Which one, from 1 on.
        """
        numbers = self.task.data["numbers"]
        if not 1 <= number <= len(numbers):
            raise ToolError(f"there are the pages 1 to {len(numbers)}")
        pixels = number_picture(numbers[number - 1], SIDE, _INK, _SCALE)
        return Image(pixels)

    tools = (page,)

    def teacher(self, observations: Sequence[Any], rng: random.Random) -> str | ToolCall:
        """The next page, then the sum."""
        if len(observations) < self.pages:
            return ToolCall("page", {"number": len(observations) + 1})
        return str(self.task.answer)
