"""The agent loops that come with the project, by name. A loop is an `async def loop(episode)`.

tool          turns until the environment is done or a limit is hit; the usual one
single_turn   one turn, which is the answer
feedback      a wrong answer is told so, and the policy tries again, for less reward

`--agent NAME`, `Env.loop` and `Task.agent` choose one; `file.py:loop` is one of yours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from nanorl.agents.episode import Episode
from nanorl.plugins import load_object

AgentLoop = Callable[[Episode], Awaitable[None]]
NUM_TRIES, TRY_DISCOUNT = 3, 0.5
WRONG = "That is not right. Try again."


async def tool(episode: Episode) -> None:
    """Take turns until the environment is done, or a limit is hit."""
    await episode.start()
    while (text := await episode.turn()) is not None:
        step = await episode.step(text)
        if step.is_done or not episode.observe(step):
            return


async def single_turn(episode: Episode) -> None:
    """One turn. What the environment would say next is not read by anybody."""
    await episode.start()
    text = await episode.turn()
    if text is not None:
        await episode.step(text)


async def feedback(episode: Episode) -> None:
    """As `tool`, but a wrong answer is answered with "try again"; every try halves the reward."""
    await episode.start()
    for number in range(NUM_TRIES):
        is_done = False
        while not is_done:
            text = await episode.turn()
            if text is None:
                return
            step = await episode.step(text)
            is_done = step.is_done
            if not is_done and not episode.observe(step):
                return
        score = await episode.judge()
        episode.score = replace(score, total=score.total * TRY_DISCOUNT**number)
        is_last = number == NUM_TRIES - 1
        if score.total >= 1.0 or is_last or not episode.observe(WRONG):
            return


LOOPS: Mapping[str, str] = MappingProxyType(
    {
        "tool": "nanorl.agents.loops:tool",
        "single_turn": "nanorl.agents.loops:single_turn",
        "feedback": "nanorl.agents.loops:feedback",
    }
)


def load_loop(name: str) -> AgentLoop:
    """The loop of that name. ValueError says which there are."""
    return load_object(name, what="agent", known=LOOPS, fits=callable)
