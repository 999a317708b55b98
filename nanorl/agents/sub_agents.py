"""The loop `sub_agents`: the policy may hand parts of its task to agents of its own.

    --agent sub_agents --agent-args number=4 depth=1 turns=3 tools=true

The tool `delegate(task)` is told and called as the environment's tools are; where their form cannot
name it (a code block), as the model's chat template has calls, or else as Hermes does. Each call
plays a conversation of its own, in a context of its own, with the system message of the opening and
the environment's tools; its last text is the result. The calls of one turn run side by side and
are answered in order.

Limits: an agent may start `number` sub-agents, each takes `turns` turns (0: as many as the rollout
may) beside those of the rollout, and may itself delegate down to `depth`. All limits are those of
one agent, so what a rollout becomes never depends on which of its agents was faster. Each
conversation is a further sequence of the rollout, and shares its reward.
Left out: state of the environment is shared by all agents, in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanoengine.text.chat_template import Message
from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.call_ids import as_results
from nanoinfer.chat.chat import ToolChat, visible
from nanoinfer.chat.choose import tool_chat
from nanorl.agents.context import Context
from nanorl.agents.episode import Episode
from nanorl.agents.tokens import PromptTooLongError
from nanorl.bounds import check_number
from nanorl.envs.base import Opening
from nanorl.envs.images import with_text, without_pictures
from nanorl.envs.tools.base import Tool, ToolContext, ToolError
from nanorl.envs.tools.tool_calls import answer_calls

NAME = "delegate"
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Hand a part of the task to a helper, who knows nothing but what you write.",
        "parameters": {
            "type": "object",
            "properties": {
                "task": {"type": "string", "description": "all that the helper needs to know"}
            },
            "required": ["task"],
        },
    },
}
CUT_OFF = "the helper was cut off before it had an answer"


@dataclass(frozen=True, kw_only=True)
class SubAgents:
    """The loop with its options."""

    number: int = 4
    depth: int = 1
    turns: int = 0
    tools: bool = True
    """Whether sub-agents have the environment's tools."""

    def __post_init__(self) -> None:
        check_number("--agent-args number=", self.number, 1, 100)
        check_number("--agent-args depth=", self.depth, 1, 5, "each level multiplies the agents")
        check_number("--agent-args turns=", self.turns, 0, 1000)

    async def __call__(self, episode: Episode) -> None:
        opening = await episode.env.reset(episode.task)
        team = _Team(self, episode, opening, _chat(episode, opening))
        episode.opening = team.opening((), opening.messages)
        episode.context.begin(episode.opening.messages, episode.opening.tools)
        delegate = _Delegate(team=team)
        while (text := await episode.turn()) is not None:
            calls = team.calls(text)
            if any(is_delegation(call) for call in calls):
                reply, answer = await team.answer(episode.context, text, calls, delegate)
                episode.answer = answer
                if reply is None or not episode.context.observe(reply):
                    return
                continue
            step = await episode.step(text)
            if step.is_done or not episode.observe(step):
                return


def is_delegation(call: ToolCall | ToolCallError) -> bool:
    return isinstance(call, ToolCall) and call.name == NAME


@dataclass(frozen=True)
class _Team:
    """All agents of one rollout: what they have in common."""

    options: SubAgents
    episode: Episode
    env_opening: Opening
    chat: ToolChat

    @property
    def is_shared_form(self) -> bool:
        """True where the environment's tools are called in the same form."""
        return self.env_opening.parser is self.chat.parser

    def calls(self, text: str) -> list[ToolCall | ToolCallError]:
        """The calls of a turn; where the environment's have another form, delegations alone."""
        found = self.chat.parser.read(text)
        return found if self.is_shared_form else [one for one in found if is_delegation(one)]

    def opening(self, path: tuple[int, ...], messages: Sequence[Message]) -> Opening:
        """Make what an agent reads first: `messages`, and which tools there are."""
        has_tools = not path or self.options.tools
        schemas = list(self.env_opening.tools or []) if has_tools else []
        said = list(messages)
        if len(path) < self.options.depth:
            schemas += self.chat.schemas or []
            said = _with_system(said, self.chat.description)
        return Opening(messages=said, tools=schemas or None)

    async def answer(
        self,
        context: Context,
        text: str,
        calls: list[ToolCall | ToolCallError],
        delegate: _Delegate,
    ) -> tuple[list[Message] | None, str | None]:
        """The messages that answer the `calls` of one turn in their order; None, and the answer,
        where one of them ended the episode."""
        handed = [call for call in calls if is_delegation(call) or isinstance(call, ToolCallError)]
        others = [call for call in calls if call not in handed]
        theirs: list[Message] = []
        if part := self._part_of_env(text, others):
            step, theirs = await self.episode.step_in(context, part)
            if step.is_done:
                return None, step.answer
        tools: dict[str, Tool] = {NAME: delegate}
        results = await answer_calls(handed, tools, ToolContext(task=self.episode.task))
        context.builder.metrics["num_delegations"] += len(handed) - results.num_malformed
        ours = as_results(self.chat.parser.observation(results.texts), handed)
        if len(theirs) == len(others) and len(ours) == len(handed):
            parts = {True: iter(ours), False: iter(theirs)}
            return [next(parts[call in handed]) for call in calls], None
        return [*theirs, *ours], None

    def _part_of_env(self, text: str, others: list[ToolCall | ToolCallError]) -> str:
        """The environment's part of a turn with delegations: its calls, written anew, or the whole
        turn where it calls in another form, which does not see ours. Empty: nothing."""
        if self.is_shared_form:
            write = self.chat.parser.write
            return "\n".join(write(call) for call in others if isinstance(call, ToolCall))
        theirs = self.env_opening.parser
        return text if theirs is not None and theirs.read(text) else ""


@dataclass
class _Told:
    """The tool `delegate` as a model is told of it."""

    name: str = NAME
    schema: dict[str, Any] = field(default_factory=lambda: dict(SCHEMA))

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        raise AssertionError("each agent calls its own")


@dataclass(kw_only=True)
class _Delegate(_Told):
    """The tool `delegate` of one agent."""

    team: _Team
    path: tuple[int, ...] = ()
    num_started: int = 0

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        """Play the conversation of one more sub-agent. Its number is fixed before anything is
        awaited, by the order of the calls."""
        task, most = arguments.get("task"), self.team.options.number
        if not isinstance(task, str) or not task.strip():
            raise ToolError(f'write the whole task as a text: {NAME}(task="...")')
        if self.num_started >= most:
            raise ToolError(f"no more than {most} helpers are allowed; do the rest yourself")
        path = (*self.path, self.num_started)
        self.num_started += 1
        answer = await _play(self.team, path, task)
        if answer is None:
            raise ToolError(CUT_OFF)
        return answer


async def _play(team: _Team, path: tuple[int, ...], task: str) -> str | None:
    """A sub-agent's conversation: its last text; None where it was cut off."""
    episode, options = team.episode, team.options
    turns = int(options.turns) or episode.limits.max_turns
    context = episode.sub_context(path, replace(episode.limits, max_turns=turns))
    # Its task is all that it is given: no picture, unless its own calls bring one.
    first = map(without_pictures, team.env_opening.messages[:1])
    system = [one for one in first if one["role"] == "system"]
    if not options.tools:
        system = []
    opening = team.opening(path, [*system, {"role": "user", "content": task}])
    try:
        context.begin(opening.messages, opening.tools)
    except PromptTooLongError as error:
        raise ToolError("the task is too long for a helper") from error
    delegate = _Delegate(team=team, path=path)
    may_delegate = len(path) < options.depth
    theirs = team.env_opening.parser
    while (text := await context.turn()) is not None:
        calls = team.calls(text) if may_delegate else []
        if any(is_delegation(call) for call in calls):
            reply, answer = await team.answer(context, text, calls, delegate)
        elif options.tools and theirs is not None and theirs.read(text):
            step, messages = await episode.step_in(context, text)
            reply, answer = (None, step.answer) if step.is_done else (messages, None)
        else:
            return visible(text).strip()
        if reply is None:
            return answer or ""
        if not context.observe(reply):
            return None
    return None


def _chat(episode: Episode, opening: Opening) -> ToolChat:
    """The form in which a model is told of `delegate` and calls it: that of the environment's
    tools, if `delegate` can be called in it."""
    parser: Parser | None = opening.parser
    tool = _Told()
    if parser is not None and _can_name(parser):
        if opening.tools is not None:
            return ToolChat(parser=parser, schemas=[tool.schema])
        return ToolChat(parser=parser, description=parser.describe([tool]))
    return tool_chat(episode.tokenizer, [tool])


def _can_name(parser: Parser) -> bool:
    call = ToolCall(NAME, {"task": "a"})
    try:
        return parser.read(parser.write(call)) == [call]
    except (KeyError, ValueError):  # a form for programs alone
        return False


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if not text:
        return messages
    if messages and messages[0]["role"] == "system":
        return [with_text(messages[0], text), *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
