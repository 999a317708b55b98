"""A loop that steers itself through two queues, in the shape that AReaL and its kin have.

    async def collect_trajectory(prompt, env, obs_queue, act_queue):
        await obs_queue.put(prompt)
        while (text := await act_queue.get()) is not None:
            step = await env.step(text)
            if step.is_done:
                return None                       # or a number: then it is the reward
            await obs_queue.put(step)

`--agent mine.py` finds such a function by the names of its parameters, or a class with such a
method, of which every rollout gets an object. `prompt` is the text that the environment opens with,
which names pictures, `[picture 9e1d2c3a]`: what is put first shows each where it is named. An
observation is a text, messages, or what `env.step` returned. Each one that is put is read by the
policy, and answered with its text: with None where a limit cut it off, which is the end. Whoever
asks for more than was said, or goes on after the end, is told so instead of waiting for ever.

A plain function runs in a thread of its own: its queues and `env.step` wait instead of being
awaited. What the function raises fails the rollout, which is played again. Left out: a plain
function that hangs outside of queues and `env` keeps its thread, while the rollout ends at its
deadline.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanoengine.text.chat_template import Message
from nanorl.agents.episode import Episode
from nanorl.envs.base import TimeStep
from nanorl.envs.images import said_anew
from nanorl.envs.rewards.base import as_score
from nanorl.envs.tools.function import in_thread
from nanorl.plugins import where_raised
from nanorl.task import words_of
from nanorl.types import InfrastructureError

METHOD = "collect_trajectory"
PARAMETERS = ("prompt", "env", "obs_queue", "act_queue")
TOO_MANY = "act_queue.get(): every observation was answered already; put another one into obs_queue"

Said = TimeStep | str | list[Message]


def is_collector(value: Any) -> bool:
    """A function of PARAMETERS, or a class with a method of them."""
    call = getattr(value, METHOD, None) if isinstance(value, type) else value
    if not (inspect.isfunction(call) or inspect.ismethod(call)):
        return False
    return set(PARAMETERS) <= set(inspect.signature(call).parameters)


@dataclass(frozen=True)
class QueueLoop:
    """The loop around a user's function. `make` gives each rollout the function, or an object of
    the user's class."""

    make: Callable[[], Any]

    async def __call__(self, episode: Episode) -> None:
        opening = await episode.env.reset(episode.task)
        episode.opening = opening
        exchange = _Exchange()
        collect = asyncio.ensure_future(self._collect(episode, exchange))
        try:
            await _serve(episode, exchange, collect)
            result = await collect
        finally:
            exchange.actions.close()
            collect.cancel()
            await asyncio.gather(collect, return_exceptions=True)
        if result is not None:
            episode.score = as_score(result, METHOD)

    async def _collect(self, episode: Episode, exchange: _Exchange) -> Any:
        """Run the user's code and return its result; None too where it went on after the end."""
        assert episode.opening is not None, "the environment was reset"
        try:
            made = self.make()
            function = getattr(made, METHOD, made)
            is_async = inspect.iscoroutinefunction(getattr(function, "func", function))
            shared: tuple[Any, ...] = (_Steps(episode), exchange.observations, exchange.actions)
            if not is_async:
                loop = asyncio.get_running_loop()
                shared = tuple(_Blocking(one, loop) for one in shared)
            prompt = words_of(episode.opening.messages[-1]["content"])
            given = dict(zip(PARAMETERS, (prompt, *shared), strict=True))
            if is_async:
                return await function(**given)
            return await in_thread(lambda: function(**given))
        except _EndedError:
            return None
        except InfrastructureError:
            raise
        except Exception as error:  # a plug-in boundary
            raise InfrastructureError(
                f"{METHOD} raised {type(error).__name__}: {error}{where_raised(error)}"
            ) from error


class _EndedError(BaseException):
    """Unwinds a user's function that asks for more after it was told the end."""


class _Observations:
    """The queue `obs_queue`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Said] = asyncio.Queue()
        self.num_put = 0

    async def put(self, said: Said) -> None:
        is_end = isinstance(said, TimeStep) and said.is_done
        if is_end or not isinstance(said, TimeStep | str | list):
            raise InfrastructureError(
                f"obs_queue.put({said!r:.200}): put a text, messages, or a step that goes on"
            )
        self.num_put += 1
        self._queue.put_nowait(said)

    async def next(self) -> Said:
        return await self._queue.get()


class _Actions:
    """The queue `act_queue`."""

    def __init__(self, observations: _Observations) -> None:
        self._queue: asyncio.Queue[str | type[_EndedError] | None] = asyncio.Queue()
        self._observations = observations
        self._num_taken = 0

    async def get(self) -> str | None:
        if self._queue.empty() and self._num_taken >= self._observations.num_put:
            raise InfrastructureError(TOO_MANY)
        self._num_taken += 1
        said = await self._queue.get()
        if said is None or said is _EndedError:
            self._queue.put_nowait(_EndedError)  # for whoever asks again
        if isinstance(said, type):
            raise said
        return said

    def put(self, said: str | None) -> None:
        """Hand a turn over; None: there will be no other."""
        self._queue.put_nowait(said)

    def close(self) -> None:
        """Wake up whoever waits."""
        self._queue.put_nowait(_EndedError)


class _Exchange:
    """Both queues of one rollout."""

    def __init__(self) -> None:
        self.observations = _Observations()
        self.actions = _Actions(self.observations)


class _Steps:
    """The part of the environment that the user's function sees."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.task = episode.task

    async def step(self, text: str) -> TimeStep:
        return await self._episode.step(text)


class _Blocking:
    """An object whose coroutine methods wait in the calling thread for the event loop."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loop = target, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return partial(self._wait, found) if inspect.iscoroutinefunction(found) else found

    def _wait(self, method: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        if self._loop.is_closed():  # the thread has outlived its rollout
            raise _EndedError
        return asyncio.run_coroutine_threadsafe(method(*arguments), self._loop).result()


async def _serve(episode: Episode, exchange: _Exchange, collect: asyncio.Future[Any]) -> None:
    """Answer observations until the user's function returns or the policy is cut off."""
    while not collect.done():
        asked = asyncio.ensure_future(exchange.observations.next())
        try:
            await asyncio.wait({collect, asked}, return_when=asyncio.FIRST_COMPLETED)
            if collect.done():  # nobody would read an answer
                return
            text = await _answer(episode, asked.result())
        finally:
            asked.cancel()
        exchange.actions.put(text)
        if text is None:
            return


async def _answer(episode: Episode, said: Said) -> str | None:
    """The policy's turn about an observation; None where it was cut off."""
    opening, context = episode.opening, episode.context
    assert opening is not None, "the environment was reset"
    if context.builder.num_tokens:
        return await episode.turn() if episode.observe(said) else None
    if isinstance(said, str):  # in the place of what the environment opens with
        messages = [*opening.messages[:-1], said_anew(opening.messages[-1], said)]
    else:
        messages = episode.messages_of(said)
    context.begin(messages, opening.tools)
    return await episode.turn()
