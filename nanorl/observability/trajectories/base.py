"""`Trajectory`: a rollout as messages, turns, calls of tools and their results, in no format.

    reader = TrajectoryReader(tokenizer, [parser])
    trajectory = reader.read(rollout, step=3, phase="rl")
    for turn in trajectory.main.turns:
        print(turn.text, [call.name for call in turn.calls])

Everything is read out of the rollout's own tokens: what the policy read and said, not what somebody
meant to tell it. Text of a turn that was cut off is never read for calls, as in the run itself.
Next: frames.py (how messages are found in tokens), jsonl.py (the simplest format).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.chat import visible
from nanorl.observability.trajectories.frames import (
    PICTURE,
    ChatFrames,
    Content,
    Json,
    ReadChat,
    joined,
    parted,
)
from nanorl.shown_pictures import (
    Items,
    RunPictures,
    ShownPicture,
    items,
    shown_pictures,
)
from nanorl.types import Branch, Rollout, Status, TurnSpan

MAIN = "main"
RESPONSE, END_OF_RESPONSE = "<tool_response>\n", "\n</tool_response>"
"""Around each result where several share a message (nanoinfer/chat/reading.py)."""


@dataclass(frozen=True, kw_only=True)
class CallOfTurn:
    """A call of a tool, and what it was answered; None where nobody read the answer, or where it
    stands in one message with those of other calls."""

    id: str
    """Unique in its sequence."""
    name: str
    arguments: Json
    result: Content | None = None


@dataclass(frozen=True, kw_only=True)
class TrajectoryTurn:
    """A turn: the text that the policy said at once, and the messages that it read then."""

    span: TurnSpan
    text: str
    """All that it said, without the end-of-turn token."""
    reasoning: str = ""
    content: str
    """What stands beside reasoning and calls. Where a call is malformed: with the calls."""
    calls: tuple[CallOfTurn, ...] = ()
    num_malformed: int = 0
    """Calls that the parser could not read."""
    reply: tuple[Message, ...] = ()
    """The messages that answered it, as the policy read them."""
    further: tuple[Message, ...] = ()
    """Those of them that are not the result of one of `calls`."""
    finish_reason: str
    """stop, tool_calls, or length where it was cut off."""
    reward: float | None = None
    is_copied: bool = False
    """No token of it is trained here: it stands, and is trained, in another sequence."""
    version: int
    """The policy version of its first sampled token; -1 where it is copied."""


@dataclass(frozen=True, kw_only=True)
class TrajectorySequence:
    """One token sequence of a rollout."""

    name: str
    """main, history-1, history-2, ..., branch-1, ..."""
    branch: Branch
    """The tokens."""
    chat: ReadChat
    """What the policy read first; what an assistant says there was said in another sequence, or
    never by this policy."""
    turns: tuple[TrajectoryTurn, ...]
    pictures: tuple[ShownPicture, ...] = ()
    """Its pictures, in order. A part of a message that is one has its `number`, from 1."""
    caller: tuple[str, str] | None = None
    """Of a sub-agent's: the name of the sequence that called it, and the id of the call."""

    @property
    def is_history(self) -> bool:
        return self.branch.is_history

    def text_of(self, content: Content) -> str:
        """A content as a text, with a line for each picture."""
        text, pictures = joined(content)
        first, *rest = text.split(PICTURE)
        lines = [self.pictures[part["number"] - 1].line for part in pictures]
        return first + "".join(line + after for line, after in zip(lines, rest, strict=True))

    def messages(self) -> list[Message]:
        """The whole sequence as a chat. Calls are `tool_calls` where the chat template lists the
        tools, and so writes the calls, too; otherwise they are text, as the policy wrote them."""
        found = list(self.chat.messages)
        for turn in self.turns:
            replies = [dict(message) for message in turn.reply]
            if self.are_calls_listed(turn):
                said = assistant_message(turn.content, turn.reasoning, turn.calls)
                tools = (reply for reply in replies if reply["role"] != "user")
                for reply, call in zip(tools, turn.calls, strict=False):
                    reply["tool_call_id"] = call.id
            else:
                text = visible(turn.text) if turn.calls else turn.content
                said = assistant_message(text, turn.reasoning, ())
            found += [said, *replies]
        return found

    def are_calls_listed(self, turn: TrajectoryTurn) -> bool:
        return bool(turn.calls) and self.chat.are_tools_listed and not turn.num_malformed


def assistant_message(content: str, reasoning: str, calls: Sequence[CallOfTurn]) -> Message:
    """A turn of the assistant as chat templates read it."""
    said: Json = {"role": "assistant", "content": content}
    if reasoning:
        said["reasoning_content"] = reasoning
    if calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return said


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One rollout, read."""

    rollout: Rollout
    step: int
    """The training step; 0 in evaluations."""
    phase: str
    """rl, or the evaluation: untrained, before, after, no_tool, blind, first_hidden."""
    sequences: tuple[TrajectorySequence, ...]
    """The main one first, then the branches, in the rollout's order."""

    @property
    def main(self) -> TrajectorySequence:
        """The one that the rollout ended with."""
        return self.sequences[0]

    @property
    def segments(self) -> list[TrajectorySequence]:
        """The histories in their order, and the main sequence, in which they go on."""
        return [*(one for one in self.sequences if one.is_history), self.main]

    @property
    def beside(self) -> list[TrajectorySequence]:
        """The branches that are no histories: of sub-agents, or of calls that went another way."""
        return [one for one in self.sequences[1:] if not one.is_history]

    def outcome(self) -> Json:
        """The outcome of the rollout, as JSON: numbers that are not finite are null."""
        rollout = self.rollout
        return {
            "step": self.step,
            "phase": self.phase,
            "status": rollout.status.value,
            "reward": number(rollout.reward),
            "total_reward": number(rollout.total_reward),
            "is_success": rollout.is_success,
            "version": rollout.version,
            "metrics": plain({name: number(one) for name, one in rollout.metrics.items()}),
        }


class TrajectoryReader:
    """Reads rollouts of one run: `parsers` are tried in turn, until one finds a call."""

    def __init__(self, tokenizer: ChatTokenizer, parsers: Sequence[Parser]) -> None:
        self._tokenizer = tokenizer
        self._frames = ChatFrames(tokenizer)
        self._parsers = parsers
        self._pictures = RunPictures.of(tokenizer)

    def read(self, rollout: Rollout, *, step: int, phase: str) -> Trajectory:
        """The trajectory. Nothing that a policy or a tool wrote makes it fail."""
        own, *branches = rollout.sequences
        names = [MAIN]
        for branch in branches:
            kind = "history" if branch.is_history else "branch"
            names.append(f"{kind}-{sum(name.startswith(kind) for name in names) + 1}")
        is_finished = rollout.status is Status.FINISHED
        found = [self._sequence(MAIN, own, is_finished=is_finished)]
        for name, branch in zip(names[1:], branches, strict=True):
            found.append(self._sequence(name, branch, is_finished=branch.is_history))
        return Trajectory(
            rollout=rollout, step=step, phase=phase, sequences=tuple(_with_callers(found))
        )

    def _sequence(self, name: str, branch: Branch, *, is_finished: bool) -> TrajectorySequence:
        spans = branch.turn_spans
        start = spans[0].action_start if spans else len(branch.tokens)
        chat = self._with_calls(self._frames.read(self._items(branch, 0, start)))
        last = len(spans) - 1
        turns = tuple(
            self._turn(branch, number, chat, may_be_cut=number == last and not is_finished)
            for number in range(len(spans))
        )
        shown = tuple(shown_pictures(branch.images, self._pictures))
        return TrajectorySequence(name=name, branch=branch, chat=chat, turns=turns, pictures=shown)

    def _items(self, branch: Branch, start: int, end: int) -> Items:
        """The tokens `start` to `end`, with one item for each picture."""
        return items(branch, start, end, self._pictures)

    def _with_calls(self, chat: ReadChat) -> ReadChat:
        """The chat with the calls that an assistant wrote in it, as turns have theirs."""
        if not chat.are_tools_listed:
            return chat
        messages: list[Message] = []
        open_ids: list[str] = []
        for place, message in enumerate(chat.messages):
            if message["role"] == "assistant" and isinstance(message["content"], str):
                said = visible(message["content"])
                parser, calls = self._calls(said)
                found = _named(calls, f"call_0_{place}")
                open_ids = [call.id for call in found]
                if found and len(found) == len(calls):
                    before = message["content"].removesuffix(said)
                    message = assistant_message(_beside(parser, said), _reasoning(before), found)
            elif message["role"] != "user" and open_ids:
                message = {**message, "tool_call_id": open_ids.pop(0)}
            messages.append(message)
        return replace(chat, messages=messages)

    def _turn(
        self, branch: Branch, number: int, chat: ReadChat, *, may_be_cut: bool
    ) -> TrajectoryTurn:
        span = branch.turn_spans[number]
        ids = branch.tokens[span.action_start : span.action_end]
        is_ended = bool(ids) and ids[-1] in self._tokenizer.eos_ids
        text = self._tokenizer.decode(ids[:-1] if is_ended else ids)
        after = self._items(branch, span.action_end, span.observation_end)
        is_cut = may_be_cut and not is_ended and not after
        reply = self._frames.read_reply(after, chat, is_ended=is_ended)
        said = visible(text)
        parser, calls = (None, []) if is_cut else self._calls(said)
        results, further = _results(len(calls), reply)
        answered = _named(calls, f"call_{number + 1}", results)
        refused = [
            {"role": "tool", "content": result}
            for call, result in zip(calls, results, strict=True)
            if isinstance(call, ToolCallError) and result is not None
        ]
        is_split = len(answered) == len(calls)
        rewards = branch.turn_rewards
        return TrajectoryTurn(
            span=span,
            text=text,
            reasoning=_reasoning(text[: len(text) - len(said)]),
            content=_beside(parser, said) if is_split else said,
            calls=tuple(answered),
            num_malformed=len(calls) - len(answered),
            reply=tuple(reply),
            further=(*refused, *further),
            finish_reason="length" if is_cut else "tool_calls" if answered else "stop",
            reward=rewards[number] if number < len(rewards) else None,
            is_copied=not any(branch.loss_mask[span.action_start : span.action_end]),
            version=max(branch.versions[span.action_start : span.action_start + 1], default=-1),
        )

    def _calls(self, said: str) -> tuple[Parser | None, list[ToolCall | ToolCallError]]:
        for parser in self._parsers:
            if calls := parser.read(said):
                return parser, calls
        return None, []


def _named(
    calls: Sequence[ToolCall | ToolCallError], name: str, results: Sequence[Content | None] = ()
) -> list[CallOfTurn]:
    """The well-formed ones of some calls, with their ids and results."""
    return [
        CallOfTurn(
            id=f"{name}_{place}",
            name=plain(call.name),
            arguments=plain(dict(call.arguments)),
            result=result,
        )
        for place, (call, result) in enumerate(zip_longest(calls, results), 1)
        if isinstance(call, ToolCall)
    ]


def _beside(parser: Parser | None, said: str) -> str:
    """The text beside the calls. A parser of the user's own may not know it; then all the text."""
    beside = getattr(parser, "beside", None)
    return beside(said) if callable(beside) else said


def _reasoning(text: str) -> str:
    return text.replace("<think>", "").replace("</think>", "").strip()


def _results(
    num_calls: int, reply: Sequence[Message]
) -> tuple[list[Content | None], Sequence[Message]]:
    """The answer to each call, and the other messages of a reply."""
    nothing: list[Content | None] = [None] * num_calls
    if not num_calls or not reply:
        return nothing, reply
    if reply[0]["role"] == "user":  # all results in one message
        whole, pictures = joined(reply[0]["content"])
        said = whole.rstrip(PICTURE)  # those of all calls stand behind, and count to the last one
        parts = said.removeprefix(RESPONSE).removesuffix(END_OF_RESPONSE)
        results = parts.split(f"{END_OF_RESPONSE}\n{RESPONSE}") if parts != said else [said]
        results[-1] += whole[len(said) :]
        found: list[Content | None] = [parted(one, pictures) for one in results]
        return (found, reply[1:]) if len(found) == num_calls else (nothing, reply)
    own: list[Content | None] = [
        message["content"] for message in reply[:num_calls] if message["role"] != "user"
    ]
    return (own, reply[num_calls:]) if len(own) == num_calls else (nothing, reply)


def _with_callers(sequences: list[TrajectorySequence]) -> Iterator[TrajectorySequence]:
    """The sequences; those of sub-agents with their callers: a sub-agent is asked what an argument
    of a call says."""
    calls = [
        (one.name, call.id, {text for text in call.arguments.values() if isinstance(text, str)})
        for one in sequences
        for turn in one.turns
        if not turn.is_copied
        for call in turn.calls
    ]
    for sequence in sequences:
        asked = [joined(m["content"])[0] for m in sequence.chat.messages if m["role"] == "user"]
        found = None
        if sequence.name != MAIN and not sequence.is_history and asked:
            for place, (name, call_id, texts) in enumerate(calls):
                if asked[-1] in texts and name != sequence.name:
                    found = name, call_id
                    calls.pop(place)
                    break
        yield replace(sequence, caller=found)


def number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity: null."""
    return value if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """The value as JSON that every reader takes: no half of a character, no number that is none,
    and what JSON does not know as text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {plain(str(name)): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return plain(str(value))
