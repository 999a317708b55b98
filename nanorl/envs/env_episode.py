"""`EnvEpisode`: one episode of a short-form environment, behind the full protocol.

A turn is read by the parser. Its calls run side by side and are answered in order; a call that
cannot be run is answered with the reason, so the policy can repair it. A turn without a call is
the environment's own `step`.
Left out: the tokens (agents/) and the processes in which somebody's code may run (envs/hosting/).
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

from nanoengine.text.chat_template import Message
from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.call_ids import as_results
from nanoinfer.chat.chat import ToolChat, visible
from nanorl.envs.base import Opening, Services, TeacherError, TimeStep
from nanorl.envs.env import Done, Env
from nanorl.envs.rewards.base import Score, Transcript, as_score
from nanorl.envs.tools.base import Tool, ToolContext
from nanorl.envs.tools.tool_calls import answer_calls
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

TOOL_UNAVAILABLE = "tool unavailable"
WITH_RESULTS = "nanorl.envs.images:with_results"
WITH_PICTURES = "nanorl.envs.images:with_pictures"
KEEP_PICTURES = "nanorl.envs.images:keep_pictures"
OBSERVED, AS_SHOWN = "nanorl.envs.images:observed", "nanorl.envs.images:as_shown"
WHERE_RAISED = "nanorl.plugins:where_raised"
"""Finds the line of somebody's own code, for a message."""


class EnvEpisode:
    """Runs the methods of an `Env`. `chat` says how tools are told to the model and called."""

    def __init__(
        self, env: Env, tools: Sequence[Tool], chat: ToolChat | None, services: Services
    ) -> None:
        self.env = env
        self._tools = {tool.name: tool for tool in tools}
        self._chat = chat
        self._services = services
        self._context: ToolContext | None = None
        self._outcome: float | None = None
        self._has_begun = False
        self._opened: list[Any] = []
        self._teacher_rng: random.Random | None = None

    async def reset(self, task: Task) -> Opening:
        env = self.env
        env.task = task
        self._has_begun = True
        self._context = ToolContext(
            task=task,
            sandbox=self._services.sandbox,
            timeout_s=self._services.timeout_s,
            open_session=self._open_session,
        )
        env.__dict__["_context"] = self._context
        if task.pictures:
            resolve_name(KEEP_PICTURES)(task, self._services.tokenizer)
        # May be a coroutine, as all methods of an environment may.
        opened = self._shown(await self._ask(env.reset))
        if opened is not None:
            self._opened = [resolve_name(OBSERVED)(_messages(opened))]
        messages = _messages(task.prompt if opened is None else opened)
        if self._chat is None:
            return Opening(messages=_with_system(messages, env.system))
        system = self._chat.system(env.system)
        return Opening(
            messages=_with_system(messages, system),
            tools=self._chat.schemas,
            parser=self._chat.parser,
        )

    async def step(self, text: str) -> TimeStep:
        self._outcome = None  # a loop may go on after an end, which then was none
        calls = self._parser.read(text) if self._parser is not None else []
        # A call wins over text beside it, which was written before the output was seen.
        if calls:
            return await self._answer_calls(calls)
        said = self._shown(await self._ask(self.env.step, visible(text)))
        ended = self.env._take_done()
        if ended is not None and not isinstance(said, Done | TimeStep):
            raise self._not_returned("step")
        return self._time_step(said)

    async def show(self, observations: Sequence[Any], rng: random.Random) -> str:
        """The next turn of the environment's teacher, in the written form of the calls. It is given
        what `reset` returned and all replies, which come as `observed` has them, and draws from the
        first call's `rng` (worker processes are sent a copy with every one). TeacherError where it
        raises or says no turn."""
        if self._teacher_rng is None:
            self._teacher_rng = rng
        teacher: Any = self.env.teacher  # type: ignore[attr-defined]
        shown, tokenizer = resolve_name(AS_SHOWN), self._services.tokenizer
        seen = [shown(one, tokenizer) for one in (*self._opened, *observations)]
        try:
            said = await self._ask(teacher, seen, self._teacher_rng)
        except InfrastructureError as error:
            raise TeacherError(f"the teacher failed: {error}") from error
        if isinstance(said, str):
            return said
        calls = said if isinstance(said, list | tuple) else [said]
        if self._parser is None or not all(isinstance(call, ToolCall) for call in calls):
            name = type(self.env).__name__
            raise TeacherError(
                f"{name}.teacher returned {said!r}; it must return a text, or calls of tools that "
                f"{name} has, as nanorl.ToolCall('look', {{'word': 'x'}})"
            )
        return "\n".join(self._parser.write(call) for call in calls)

    @property
    def subject(self) -> Any:
        return self.env.subject

    def format_observation(self, observation: str | list[Message]) -> list[Message]:
        return _messages(observation)

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        """The reward that ended the episode, or else the environment's score of it."""
        # An environment that ended the episode with a reward is not asked for another score.
        if self._outcome is not None:
            return Score(self._outcome)
        self.env.rollout = rollout
        return as_score(await self._ask(self.env.score, transcript), type(self.env).__name__)

    async def close(self) -> None:
        try:
            if self._has_begun:
                await self._ask(self.env.close)
        finally:
            if self._context is not None:
                await self._context.close()

    def _shown(self, said: Any) -> Any:
        """Return what the environment said, with its pictures where they belong."""
        if said is None or isinstance(said, str | Done | TimeStep):
            return said
        name = type(self.env).__name__
        return resolve_name(WITH_PICTURES)(said, self._services.tokenizer, name)

    async def _open_session(self) -> Any:
        sandbox = self._services.sandbox
        if not isinstance(sandbox, WorkspaceSandbox):
            raise InfrastructureError(
                "a workspace needs a sandbox, and this run has none: list a tool of "
                "nanorl/envs/tools/workspace.py, or set needs_sandbox"
            )
        return await self._ask(self.env.open_session, sandbox)

    @property
    def _parser(self) -> Parser | None:
        return None if self._chat is None else self._chat.parser

    async def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Ask a method of the environment. Whatever it raises is not the policy's doing: the
        rollout FAILED, is played again, and ends the run if that never helps."""
        try:
            said = method(*arguments)
            return await said if inspect.isawaitable(said) else said
        except InfrastructureError:
            raise
        except Exception as error:  # a plug-in boundary
            raise InfrastructureError(
                f"{type(self.env).__name__}.{method.__name__} raised {type(error).__name__}: "
                f"{error}{resolve_name(WHERE_RAISED)(error)}"
            ) from error

    async def _answer_calls(self, calls: Sequence[ToolCall | ToolCallError]) -> TimeStep:
        assert self._parser is not None and self._context is not None, "reset comes first"
        if not self._services.is_tool_enabled:
            self._context.metrics["num_refused_calls"] += len(calls)
            return self._time_step(self._brought([TOOL_UNAVAILABLE] * len(calls), calls))
        # Other rollouts decode meanwhile: this is where an episode waits.
        results = await answer_calls(calls, self._tools, self._context)
        ended = self.env._take_done()
        # A tool that says `done` has to return it, or the call would be answered and go on.
        if ended is not None and results.submitted is None:
            raise self._not_returned("a tool")
        counts = {
            "num_executions": len(calls) - results.num_malformed,
            "num_malformed_calls": results.num_malformed,
            "num_tool_errors": results.num_errors,
        }
        self._context.metrics.update({name: n for name, n in counts.items() if n})
        if (end := results.submitted) is not None:
            return self._time_step(Done(reward=end.reward, answer=end.answer))
        brought = self._brought(results.texts, calls)
        if results.pictures:
            brought = self._shown(resolve_name(WITH_RESULTS)(brought, results.pictures))
        return self._time_step(brought)

    def _brought(
        self, results: Sequence[str], calls: Sequence[ToolCall | ToolCallError]
    ) -> list[Message]:
        assert self._parser is not None, "it read the calls"
        return as_results(self._parser.observation(results), calls)

    def _not_returned(self, method: str) -> InfrastructureError:
        name = type(self.env).__name__
        return InfrastructureError(
            f"{method} of {name} called self.done(...) and did not return it; write "
            "`return self.done(...)`"
        )

    def _time_step(self, said: Any) -> TimeStep:
        assert self._context is not None
        # Of this turn alone: metrics of turns are added up later, per turn and per rollout.
        counted, self._context.metrics = self._context.metrics, Counter()
        reward, metrics = self.env._take()
        metrics |= {name: float(value) for name, value in counted.items()}
        if isinstance(said, TimeStep):
            return said
        if isinstance(said, Done):
            if said.reward is not None:
                self._outcome = said.reward
            return TimeStep(is_done=True, answer=said.answer, reward=reward, metrics=metrics)
        if not isinstance(said, str | list):
            raise ValueError(
                f"{type(self.env).__name__}.step returned {said!r}; it must return a text or "
                "messages for the policy, or self.done(...)"
            )
        return TimeStep(observation=said, reward=reward, metrics=metrics)


def _messages(said: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


def _with_system(messages: list[Message], system: str) -> list[Message]:
    return [{"role": "system", "content": system}, *messages] if system else messages
