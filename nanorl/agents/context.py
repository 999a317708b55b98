"""`Context`: one token sequence of an episode, and the turns that a policy takes in it.

Most episodes have one. A loop that compacts its history goes on in a second one, a sub-agent has
one of its own: the policy sees one context at a time, and what it sampled is trained on in the
context in which it was sampled.
Left out: what a turn means, which is the environment's (episode.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nanoengine.text.chat_template import Message
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.task import derive_turn_seed


class Generator(Protocol):
    """An inference engine, as far as an agent needs it."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output: ...


@dataclass(kw_only=True)
class TurnTimes:
    """When the policy sampled one turn, and the environment answered it, where it did: nanoseconds
    since the epoch."""

    start_ns: int
    end_ns: int
    step_start_ns: int = 0
    step_end_ns: int = 0

    @property
    def step_ns(self) -> tuple[int, int]:
        """Begin and end of the step; where it was not measured, the end of the turn twice."""
        if self.step_end_ns:
            return self.step_start_ns, self.step_end_ns
        return self.end_ns, self.end_ns


class Context:
    """A token sequence that grows by turns. `messages` is the same as text."""

    def __init__(
        self, builder: TurnBuilder, generator: Generator, sampling: SamplingParams
    ) -> None:
        """`sampling.seed` is the context's seed; every turn derives its own."""
        self.builder = builder
        self.messages: list[Message] = []
        self.times: list[TurnTimes] = []
        self._generator = generator
        self._sampling = sampling

    def begin(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> None:
        """Encode the opening chat. `PromptTooLongError` where no room for a token is left."""
        self.builder.start(messages, tools)
        self.messages += messages

    async def turn(self) -> str | None:
        """Sample one turn of as many tokens as the limits leave. Its text without the end-of-turn
        token; None where it was cut off, since cut-off text is never parsed.

        An output that was aborted for a weight update is continued by re-prefill.
        """
        builder = self.builder
        turn, start_ns = builder.num_turns, time.time_ns()
        while True:
            room, kind = builder.room()
            # No token is asked for that would be cut off at once.
            if room == 0:
                builder.truncation = kind
                return None
            # The same seed for the pieces of an aborted turn: sampling depends on (seed, position).
            seed = derive_turn_seed(self._sampling.seed, turn)
            images = tuple(builder.images)
            params = replace(self._sampling, max_tokens=room, seed=seed, images=images)
            # The whole sequence each time: the engine's prefix cache knows all but the newest part.
            output = await self._generator.generate(builder.prompt_ids, params)
            builder.append_action(output)
            if output.finish_reason != "abort":
                break
        self.times.append(TurnTimes(start_ns=start_ns, end_ns=time.time_ns()))
        text = builder.action_text()
        self.messages.append({"role": "assistant", "content": text})
        # Half a call would be read as another one than was meant.
        return text if builder.is_parseable else None

    @property
    def turns_left(self) -> int:
        return self.builder.limits.max_turns - self.builder.num_turns

    @property
    def last_text(self) -> str:
        """The text that the policy said last, cut off or not; empty where it has said nothing."""
        said = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return said[-1] if self.builder.num_turns else ""

    def observe(self, messages: Sequence[Message], request: Sequence[Message] = ()) -> bool:
        """Append what answers the last turn; False, and nothing appended, where it does not fit or
        no turn is left to read it. `request` is what the loop itself says after it, which is never
        shortened."""
        builder = self.builder
        if self.turns_left < 1:
            builder.truncation = "context"  # nobody would read the observation
            return False
        if not builder.append_observation(messages, request):
            return False
        self.messages += [*messages, *request]
        return True

    def limits_left(self) -> Limits | None:
        """Those of a context in which the same agent goes on; None where none is left."""
        limits, spent = self.builder.limits, self.builder.num_action_tokens
        most = limits.max_response_tokens
        if self.turns_left < 1 or (most is not None and most <= spent):
            return None
        response = None if most is None else most - spent
        return replace(limits, max_turns=self.turns_left, max_response_tokens=response)
