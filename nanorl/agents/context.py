"""`Context`: one token sequence of an episode, and the turns that a policy takes in it.

Most episodes have one. A loop that compacts its history goes on in a second one, a sub-agent has
one of its own: the policy sees one context at a time, and what it sampled is trained on in the
context in which it was sampled.
Left out: what a turn means, which is the environment's (episode.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from nanoengine.model.chat_template import Message
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.tokens import TurnBuilder
from nanorl.types import derive_turn_seed


class Generator(Protocol):
    """An inference engine, as far as an agent needs it."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output: ...


class Context:
    """A token sequence that grows by turns. `messages` is the same as text."""

    def __init__(
        self, builder: TurnBuilder, generator: Generator, sampling: SamplingParams
    ) -> None:
        """`sampling.seed` is the context's seed; every turn derives its own."""
        self.builder = builder
        self.messages: list[Message] = []
        self._generator = generator
        self._sampling = sampling

    def begin(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> None:
        """Encode the opening chat. `ValueError` where it leaves no room for a single token."""
        self.builder.start(messages, tools)
        self.messages += messages

    async def turn(self) -> str | None:
        """Sample one turn of as many tokens as the limits leave. Its text without the end-of-turn
        token; None where it was cut off, since cut-off text is never parsed.

        An output that was aborted for a weight update is continued by re-prefill.
        """
        builder = self.builder
        turn = builder.num_turns
        while True:
            room, kind = builder.room()
            if room == 0:
                builder.truncation = kind
                return None
            # The same seed for the pieces of an aborted turn: sampling depends on (seed, position).
            seed = derive_turn_seed(self._sampling.seed, turn)
            params = replace(self._sampling, max_tokens=room, seed=seed)
            output = await self._generator.generate(builder.prompt_ids, params)
            builder.append_action(output)
            if output.finish_reason != "abort":
                break
        text = builder.action_text()
        self.messages.append({"role": "assistant", "content": text})
        return text if builder.is_parseable else None

    def observe(self, messages: Sequence[Message]) -> bool:
        """Append what answers the last turn; False, and nothing appended, where it does not fit or
        no turn is left to read it."""
        builder = self.builder
        if builder.num_turns >= builder.limits.max_turns:
            builder.truncation = "context"  # nobody would read the observation
            return False
        if not builder.append_observation(messages):
            return False
        self.messages += messages
        return True
