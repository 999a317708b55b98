"""`Episode`: what an agent loop is given of one rollout.

    async def loop(episode):                       # the whole of the loop "tool"
        await episode.start()
        while (text := await episode.turn()) is not None:
            step = await episode.step(text)
            if step.is_done or not episode.observe(step):
                return

A loop decides when the policy speaks, and what it reads; it never touches a token. When it returns,
the episode has ended: with an answer, or cut off. An episode has one main context at a time, in
which turns are counted on (`begin_anew`), and those of sub-agents beside it (`sub_context`).
Next: loops.py (the loops that come with the project), loop.py (`Agent`, who plays a loop).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.context import Context, Generator, TurnTimes
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import PromptTooLongError, TurnBuilder
from nanorl.envs.base import Environment, Opening, TimeStep
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.task import Task, derive_seed
from nanorl.types import Rollout, Status

OpenSession = Callable[[Any], AbstractAsyncContextManager[Any]]
"""Lets a client into a recording (nanorl/agents/endpoint)."""
RECORD = "nanorl.agents.endpoint.recording:record"
"""Has somebody else call the policy through an API."""


class Recorded(Protocol):
    """Knows what was sampled where somebody else called the policy (nanorl/agents/endpoint)."""

    def transcript(self, answer: str | None) -> Transcript: ...

    def rollout(self, rollout: Rollout) -> Rollout:
        """`rollout` with what was sampled."""
        ...


class Names(NamedTuple):
    """The names of a rollout and of its group."""

    group_id: str
    rollout_id: str


class Episode:
    """One rollout in the making: a task, its environment, and one context or several."""

    def __init__(
        self,
        task: Task,
        env: Environment,
        *,
        generator: Generator,
        tokenizer: ChatTokenizer,
        limits: Limits,
        sampling: SamplingParams,
        names: Names,
    ) -> None:
        self.task = task
        self.env = env
        self.tokenizer = tokenizer
        self.limits = limits
        self.opening: Opening | None = None
        self.answer: str | None = None
        self.score: Score | None = None
        """Set by a loop that scores by itself; None: the environment's score of the episode."""
        self.trouble = ""
        """Why an agent of the user's broke down, where it did."""
        self.generator = generator
        self.sampling = sampling
        self._names = names
        self.open_session: OpenSession | None = None
        """Lets an agent in that calls the policy through an API; None: there is no such way."""
        self.http: Any = None
        """The way to the run's recording proxy, where it has one."""
        self.recording: Recorded | None = None
        """What somebody else had the policy say; None: the contexts have all of it."""
        self._histories: list[Context] = []
        self._beside: dict[tuple[int, ...], Context] = {}
        self._lock = asyncio.Lock()  # calls of an environment come one after the other
        self.context = self._new_context(limits, sampling.seed)

    # -- what a loop calls -----------------------------------------------------------------------

    async def start(self) -> None:
        """Reset the environment and encode its opening."""
        self.opening = await self.env.reset(self.task)
        # Here alone is a chat encoded as a whole: all that follows is appended to its tokens.
        self.context.begin(self.opening.messages, self.opening.tools)

    def record(self) -> AbstractAsyncContextManager[Any]:
        """Reset the environment, and let somebody else call the policy through an API until the end
        of the block: what was sampled there is the rollout. Yields an `ApiSession`."""
        session: AbstractAsyncContextManager[Any] = resolve_name(RECORD)(self)
        return session

    async def turn(self) -> str | None:
        """The policy's next turn; None where it was cut off, and the episode should end."""
        return await self.context.turn()

    async def step(self, text: str) -> TimeStep:
        """The environment's reply to a turn. One that ends the episode sets `answer`."""
        step, _ = await self.step_in(self.context, text)
        # A loop may go on after an end (feedback.py); then the answer was none.
        self.answer = step.answer if step.is_done else None
        return step

    async def step_in(self, context: Context, text: str) -> tuple[TimeStep, list[Message]]:
        """The environment's reply to a turn that was taken in `context`, and the messages that
        bring its observation. What the turn earned is noted there."""
        async with self._lock:  # sub-agents may ask at the same time
            start_ns = time.time_ns()
            step = await self.env.step(text)
            said = step.observation
            messages = [] if said is None else self.env.format_observation(said)
            if context.times:
                times = context.times[-1]
                times.step_start_ns, times.step_end_ns = start_ns, time.time_ns()
        context.builder.note(step.reward, step.metrics)
        return step, messages

    def observe(self, reply: TimeStep | str | list[Message]) -> bool:
        """Have the policy read a reply; False where it does not fit, and the episode should end."""
        return self.context.observe(self.messages_of(reply))

    def messages_of(self, reply: TimeStep | str | list[Message]) -> list[Message]:
        """The messages that carry a reply to the policy."""
        said = reply.observation if isinstance(reply, TimeStep) else reply
        assert said is not None, "an episode that has ended says nothing more"
        return self.env.format_observation(said)

    async def judge(self) -> Score:
        """The environment's score of what was said so far."""
        # The rollout has to be there for a reward to look at it, so it is made twice: here with no
        # reward, and with one when the score is known.
        return await self.env.score(self.rollout(Score(0.0)), self.transcript())

    def begin_anew(self, messages: Sequence[Message]) -> bool:
        """Go on in a new context that opens with these messages and the tools of the opening; the
        one so far stays as a history of the rollout. Turns and sampled tokens are counted on.

        False, and the episode should end, where the messages do not fit or no turn is left.
        """
        assert self.opening is not None, "an episode begins with start()"
        before = self.context
        limits = before.limits_left()
        if limits is not None:
            number = len(self._histories) + 1
            context = self._new_context(limits, derive_seed(self.sampling.seed, "context", number))
            try:
                context.begin(messages, self.opening.tools)
            except PromptTooLongError:
                limits = None
        if limits is None:
            before.builder.truncation = "context"
            return False
        self._histories.append(before)
        self.context = context
        return True

    def sub_context(self, path: tuple[int, ...], limits: Limits | None = None) -> Context:
        """The empty context of a sub-agent. `path` says whose: (2,) is the third that the main
        agent started, (2, 0) the first that this one did. Seeds and the order of sequences follow
        from it and not from who was faster."""
        assert path not in self._beside, f"there is a sub-agent {path} already"
        seed = derive_seed(self.sampling.seed, "sub-agent", *path)
        context = self._new_context(limits or self.limits, seed)
        self._beside[path] = context
        return context

    def _new_context(self, limits: Limits, seed: int) -> Context:
        builder = TurnBuilder(
            self.tokenizer,
            limits,
            task_id=self.task.task_id,
            group_id=self._names.group_id,
            rollout_id=self._names.rollout_id,
        )
        return Context(builder, self.generator, replace(self.sampling, seed=seed))

    def times(self) -> list[list[TurnTimes]]:
        """The turns of each sequence, in the order of the rollout's sequences."""
        beside = [self._beside[path] for path in sorted(self._beside)]
        spoke = [one for one in beside if one.builder.num_turns]
        return [one.times for one in (self.context, *self._histories, *spoke)]

    # -- what is made of it ----------------------------------------------------------------------

    @property
    def rollout_id(self) -> str:
        return self._names.rollout_id

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the rollout, by name."""
        return self.context.builder.metrics

    def transcript(self) -> Transcript:
        """The main context as text."""
        if self.recording is not None:
            return self.recording.transcript(self.answer)
        said = [m["content"] for m in self.context.messages if m["role"] == "assistant"]
        return Transcript(
            messages=list(self.context.messages),
            text=said[-1] if said else "",
            answer=self.answer,
            is_truncated=self.context.builder.truncation is not None,
        )

    def rollout(self, score: Score | None, error: str = "") -> Rollout:
        """Everything that was sampled; without a score it FAILED, for the reason `error`."""
        rollout = self.context.builder.close(0.0, Status.FAILED if score is None else None)
        if self.recording is not None:
            rollout = self.recording.rollout(rollout)
        # In the order of paths: sub-agents end in any order, and a rollout is stored in one.
        beside = [self._beside[path] for path in sorted(self._beside)]
        rollout.branches += [one.builder.branch(is_history=True) for one in self._histories]
        rollout.branches += [one.builder.branch() for one in beside if one.builder.num_turns]
        for context in (*self._histories, *beside):
            for name, value in context.builder.metrics.items():
                rollout.metrics[name] = rollout.metrics.get(name, 0.0) + value
        rollout.metrics["num_turns"] = float(rollout.num_turns)
        # Both may be there: then what failed matters more than what an agent broke down of.
        rollout.error = error or self.trouble
        if score is not None:
            rollout.reward = score.total
            turns = list(score.turns)
            if turns and score is self.score:  # turns that came after it earned nothing
                turns += [0.0] * (len(rollout.turn_spans) - len(turns))
            rollout.turn_rewards = turns or rollout.turn_rewards
            rollout.metrics |= {f"reward/{name}": value for name, value in score.parts.items()}
        return rollout
