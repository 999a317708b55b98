"""A conversation with an agent: a person writes, the agent takes turns with its tools, and so on.

Each message of the person opens an episode of the agent's environment with that text as its prompt;
the agent takes turns until the environment ends the episode, a limit is hit or somebody stops it.
All of it is one sequence of tokens: what the model said is never encoded again, so the model reads
what it would have read in training.

What happened is kept as a list of events, from which the tokens can be built up to any message: so
another model can be asked the same question in the same place (`ask_again`). A message may have
pictures, by the hash under which the tokenizer's store keeps them.
Left out: scores (run/heldout_success.py); what a program leaves from one message to the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.picture_limits import num_pictures
from nanorl.agents.tokens import TurnBuilder, shorten
from nanorl.envs.base import Environment, Opening
from nanorl.task import Task, derive_turn_seed
from nanorl.types import InfrastructureError

End = Literal["done", "turns", "turn", "response", "context", "stopped", "failed"]
"""How an agent's reply ended: by itself, at a limit (of turns, or of tokens in a turn, in all
turns, in the conversation), stopped by the person, or because the infrastructure failed."""


@dataclass(frozen=True)
class Said:
    """The chat messages that were appended: the person's, or a tool's output."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    """The tools that the chat template lists, where the conversation begins."""


Event = Said | Output


@dataclass(kw_only=True)
class Reply:
    """The turns in which an agent dealt with one message of the person, and what came of them."""

    model: str
    prompt: str
    turns: list[dict[str, str]] = field(default_factory=list)
    """`{"role": "agent" | "tool", "text": ...}`, in order."""
    end: End = "done"
    answer: str | None = None
    num_tokens: int = 0
    """Sampled tokens of all turns."""
    generation_s: float = 0.0
    note: str = ""
    """What went wrong, where the infrastructure failed."""

    @property
    def text(self) -> str:
        """All that the model said in its last turn."""
        return next((turn["text"] for turn in reversed(self.turns) if turn["role"] == "agent"), "")


@dataclass(kw_only=True)
class Listener:
    """Is told what happens while it happens; by default it does nothing."""

    on_text: Callable[[str], None] = lambda _: None
    """A piece of what the model says."""
    on_observation: Callable[[str], None] = lambda _: None
    """The whole of what a tool, or the environment, answered."""


class Conversation:
    """One conversation, in which any of several engines may answer; they share the tokenizer."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        limits: Limits,
        sampling: SamplingParams,
        open_environment: Callable[[], Environment] | None,
    ) -> None:
        """`open_environment` makes the environment of one episode; without one the agent has no
        tools and says one turn a message. Of `limits` those of turns and responses hold for each
        message of the person, that of the context for the whole conversation."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.sampling = sampling
        self.replies: list[Reply] = []
        self._open_environment = open_environment
        self._events: list[Event] = []
        # Events before the last message, it, and its pictures.
        self._last: tuple[int, Task, Sequence[str]] | None = None

    async def say(
        self,
        task: Task,
        engine: AsyncEngine,
        model: str,
        listener: Listener | None = None,
        pictures: Sequence[str] = (),
    ) -> Reply:
        """Append the person's message, `task.prompt` with its pictures before it, and the agent's
        reply. `ValueError`, and nothing has changed, where the message does not fit into the
        context."""
        place = len(self._events)
        reply, events = await self._exchange(
            self._events, task, engine, model, listener or Listener(), pictures
        )
        self._last = (place, task, pictures)
        self._events = events
        self.replies.append(reply)
        return reply

    async def ask_again(
        self, engine: AsyncEngine, model: str, listener: Listener | None = None
    ) -> Reply:
        """The reply of that engine to the last message of the person, from the tokens before it.
        The conversation itself stays as it is."""
        if self._last is None:
            raise ValueError("nothing has been said yet: write a message first")
        place, task, pictures = self._last
        reply, _ = await self._exchange(
            self._events[:place], task, engine, model, listener or Listener(), pictures
        )
        return reply

    def clear(self) -> None:
        """Forget everything that was said."""
        self.replies, self._events, self._last = [], [], None

    def to_json(self) -> dict[str, Any]:
        """The replies as they were read, and the token ids as the model read them, with the
        pictures among them."""
        replies = [vars(reply) for reply in self.replies]
        if not self._events:
            return {"replies": replies, "tokens": []}
        builder = self._builder(self._events)
        images = [asdict(span) for span in builder.images]
        return {"replies": replies, "tokens": builder.prompt_ids, "images": images}

    async def _exchange(
        self,
        before: list[Event],
        task: Task,
        engine: AsyncEngine,
        model: str,
        listener: Listener,
        pictures: Sequence[str],
    ) -> tuple[Reply, list[Event]]:
        """The reply to `task`, and all events with it."""
        env = None if self._open_environment is None else self._open_environment()
        try:
            opening = Opening(messages=task.messages())
            if env is not None:
                opening = await env.reset(task)
            messages = opening.messages
            if before:  # the environment's system message stands at the conversation's head
                messages = [message for message in messages if message["role"] != "system"]
            if pictures:
                messages = _with_pictures(messages, pictures)
            events: list[Event] = [*before, Said(messages, opening.tools)]
            builder = self._builder(events)
            reply = Reply(model=model, prompt=task.prompt_text)
            episode = _Exchange(self, builder, env, events, reply, listener)
            await episode.play(engine)
        finally:
            if env is not None:
                await env.close()
        return reply, events

    def _builder(self, events: list[Event]) -> TurnBuilder:
        """The tokens of these events. `ValueError` where they do not fit into the context."""
        room = replace(self.limits, max_observation_tokens=self.limits.max_context_tokens)
        builder = TurnBuilder(
            self.tokenizer, room, task_id="conversation", group_id="", rollout_id=""
        )
        is_open = False
        for event in events:
            if isinstance(event, Output):
                builder.append_action(event)
            elif not is_open:
                builder.start(event.messages, event.tools)
                is_open = True
            elif not builder.append_observation(event.messages):
                raise ValueError(
                    f"the conversation has reached its {self.limits.max_context_tokens} tokens: "
                    "/reset begins a new one"
                )
        return builder


@dataclass
class _Exchange:
    """The agent's turns about one message."""

    conversation: Conversation
    builder: TurnBuilder
    env: Environment | None
    events: list[Event]
    reply: Reply
    listener: Listener

    async def play(self, engine: AsyncEngine) -> None:
        limits = self.conversation.limits
        for turn in range(limits.max_turns):
            room, kind = self._room()
            if room == 0:
                self.reply.end = kind
                return
            output = await self._generate(engine, room)
            if output.finish_reason != "stop":
                is_stopped = output.finish_reason == "abort"
                self.reply.end = "stopped" if is_stopped else kind
                return
            if self.env is None:
                self.reply.answer = self.reply.text
                return
            if not await self._step(is_last=turn + 1 == limits.max_turns):
                return

    def _room(self) -> tuple[int, End]:
        """Tokens that the next turn may have. The builder's own count would take in the replies to
        all earlier messages."""
        limits = self.conversation.limits
        rooms: list[tuple[int, End]] = [(limits.max_turn_tokens, "turn")]
        if limits.max_response_tokens is not None:
            rooms.append((limits.max_response_tokens - self.reply.num_tokens, "response"))
        rooms.append((limits.max_context_tokens - len(self.builder.prompt_ids), "context"))
        size, kind = min(rooms, key=lambda room: room[0])
        return max(size, 0), kind

    async def _generate(self, engine: AsyncEngine, room: int) -> Output:
        """One turn, handed on as it comes. Cancelling the task ends it with what there is."""
        sampling = self.conversation.sampling
        seed = derive_turn_seed(sampling.seed, self.builder.num_turns)
        images = tuple(self.builder.images)
        params = replace(sampling, max_tokens=room, seed=seed, detokenize=True, images=images)
        so_far = Output(finish_reason="abort", text="")
        output: Output | None = None
        start = time.perf_counter()
        try:
            async with aclosing(engine.stream(self.builder.prompt_ids, params)) as chunks:
                async for chunk in chunks:
                    so_far.ids += chunk.ids
                    so_far.logps += chunk.logps
                    so_far.versions += chunk.versions
                    so_far.text = (so_far.text or "") + chunk.text
                    self.listener.on_text(chunk.text)
                    output = chunk.output
        except asyncio.CancelledError:
            _forget_cancellation()
        self.reply.generation_s += time.perf_counter() - start
        made = so_far if output is None else output
        self.reply.num_tokens += len(made.ids)
        # For the builder a stopped turn is over: nothing will go on with it after an abort.
        kept = replace(made, finish_reason="length") if output is None else made
        self.builder.append_action(kept)
        self.events.append(kept)
        self.reply.turns.append({"role": "agent", "text": made.text or ""})
        return made

    async def _step(self, *, is_last: bool) -> bool:
        """Hand the turn to the environment; False where the reply ends with it."""
        assert self.env is not None, "an agent without an environment takes one turn"
        try:
            step = await self.env.step(self.builder.action_text())
        except asyncio.CancelledError:
            _forget_cancellation()
            self.reply.end = "stopped"
            return False
        except InfrastructureError as error:
            self.reply.end, self.reply.note = "failed", str(error)
            return False
        if step.observation is None:
            self.reply.answer = step.answer
            return False
        messages = [
            {**said, "content": self._shortened(said["content"])}
            for said in self.env.format_observation(step.observation)
        ]
        text = "\n".join(self._lines(messages))
        self.reply.turns.append({"role": "tool", "text": text})
        self.listener.on_observation(text)
        if is_last:
            self.reply.end = "turns"  # nobody would read the observation
            return False
        if not self.builder.append_observation(messages):
            self.reply.end = "context"
            return False
        self.events.append(Said(messages))
        return True

    def _shortened(self, content: Any) -> Any:
        """A content of which each text is as short as an observation has to be."""
        if isinstance(content, list):
            return [
                {**part, "text": self._shortened(part["text"])} if "text" in part else part
                for part in content
            ]
        most = self.conversation.limits.max_observation_tokens
        return shorten(self.conversation.tokenizer, content, most)

    def _lines(self, messages: Sequence[Message]) -> Iterator[str]:
        """Tell people what was shown: texts, and a line for each picture."""
        number = num_pictures(self.builder.images)
        for message in messages:
            content = message["content"]
            for part in content if isinstance(content, list) else [{"text": content}]:
                if "text" in part:
                    yield part["text"]
                    continue
                number += 1
                yield picture_line(self.conversation.tokenizer, part["sha256"], number)


def picture_line(tokenizer: Any, sha256: str, number: int) -> str:
    """A picture of the tokenizer's store as a line for people."""
    # here: few conversations have pictures
    from nanorl.shown_pictures import RunPictures, shown_pictures

    store = tokenizer.store
    num_tokens = store.ready(sha256).num_tokens
    first, *tiles = store.spans(sha256, range(num_tokens))
    (shown,) = shown_pictures([replace(first, length=num_tokens)], RunPictures.of(tokenizer))
    # A tile's size says nothing of a picture that has several.
    return replace(shown, number=number, size=None if tiles else shown.size).line


def _with_pictures(messages: Sequence[Message], pictures: Sequence[str]) -> list[Message]:
    """The messages of an opening with pictures at the head of what the person says last."""
    told = list(messages)
    parts: list[dict[str, Any]] = [{"type": "image", "sha256": sha256} for sha256 in pictures]
    last = max((i for i, one in enumerate(told) if one["role"] == "user"), default=None)
    if last is None:
        return [*told, {"role": "user", "content": parts}]
    said = told[last]["content"]
    said = said if isinstance(said, list) else [{"type": "text", "text": said}]
    told[last] = {**told[last], "content": [*parts, *said]}
    return told


def _forget_cancellation() -> None:
    """The person stopped what was going on, not the program."""
    task = asyncio.current_task()
    assert task is not None, "cancelled, so there is a task"
    task.uncancel()
