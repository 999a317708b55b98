"""The agent loops that come with the project by their names, and how any loop is found.

tool          turns until the environment is done or a limit is hit; the usual one
single_turn   one turn, which is the answer
feedback      a wrong answer is told so, and the policy tries again, for less reward
compact       a history that fills the context is summarised, and the policy goes on anew
sub_agents    the policy may hand parts of its task to agents of its own
command       a program that calls the policy through an API
verifiers     plays the environment of that name, by its own code

`--agent NAME`, `Env.loop` and `Task.agent` choose one; `file.py:loop` is one of yours. A loop is

    async def loop(episode, *, patience=3): ...       options by `--agent-args patience=5`
    class Loop: async def __call__(self, episode)     the options are those of the class

or has the shape of queue_agent.py, or of api_agent.py: `async def agent(task, client)`.
`tool` and `single_turn` are in loop.py. Next: feedback.py, compact.py, sub_agents.py, command.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from nanorl.agents.api_agent import ApiLoop, is_api_agent
from nanorl.agents.loop import AgentLoop
from nanorl.agents.queue_agent import QueueLoop, is_collector
from nanorl.plugins import LOOPS, load_object


def load_loop(name: str, arguments: Mapping[str, Any] | None = None) -> AgentLoop:
    """The loop of that name, with its options. ValueError says which there are, or which options
    it takes."""
    found = load_object(name, what="agent", known=LOOPS, fits=is_loop)
    given = dict(arguments or {})
    if is_api_agent(found):
        _check_arguments(name, found, given)
        return ApiLoop(partial(found, **given) if given else found)
    if is_collector(found):
        make = found if isinstance(found, type) else partial(partial, found)
        _check_arguments(name, found, given)
        return QueueLoop(partial(make, **given))
    _check_arguments(name, found, given)
    return found(**given) if isinstance(found, type) else partial(found, **given)


def is_loop(value: Any) -> bool:
    """A coroutine function of an episode, a class whose objects are one, or what queue_agent.py or
    api_agent.py reads."""
    if is_collector(value) or is_api_agent(value):
        return True
    call = value.__call__ if isinstance(value, type) else value
    if not inspect.iscoroutinefunction(call):
        return False
    needed = [
        one
        for one in inspect.signature(call).parameters.values()
        if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    return len(needed) == 1 + isinstance(value, type)


def _check_arguments(name: str, found: Any, given: Mapping[str, Any]) -> None:
    options = {
        one.name: one.default
        for one in inspect.signature(found).parameters.values()
        if isinstance(found, type) or one.default is not one.empty
    }
    for key, value in given.items():
        if key not in options:
            known = ", ".join(options) or "none"
            raise ValueError(f"--agent-args {key}={value}: the options of {name} are: {known}")
        default = options[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if type(default) in (int, float) and not is_number:
            raise ValueError(f"--agent-args {key}={value}: must be a number, as {default}")
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"--agent-args {key}={value}: must be true or false")
