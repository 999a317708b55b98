"""Doubles for dialects of the recording endpoint: a server that says what it is told to."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from agent_doubles import EOS, output_of, tiny_tokenizer
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from nanoengine.text.chat_template import Message
from nanoinfer.dialects import all_dialects
from nanoinfer.dialects.exchange import ApiAnswer, ApiCall, ApiReply, ApiToolCall
from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
from nanorl.agents.endpoint.recording import Recording, Sampled

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def reply_of(text: str = "", *calls: ApiToolCall, finish: str = "stop", **fields: Any) -> ApiReply:
    """A reply whose tokens are of no account: five, the first two "a" and "b"."""
    output = output_of([64, 65, 3, 4, EOS], finish)
    return ApiReply(text=text, calls=calls, output=output, **fields)


def answer_of(reply: ApiReply) -> ApiAnswer:
    return ApiAnswer(
        id="0a1b", model="tiny", created=1700000000, num_prompt_tokens=len(PROMPT), replies=[reply]
    )


CONVERSATIONS = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],  # shrinking would start hundreds of servers
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps) | st.sampled_from(
    ['{"a": NaN}', "[1, 2]", '"text"', "no JSON", '{"a": "\\ud800"}', '{"a": 1, "a": 2}', "{}"]
)
REPLIES = st.builds(
    lambda text, reasoning, arguments: reply_of(
        text,
        *(ApiToolCall(id=f"call_{i}", name="add", arguments=a) for i, a in enumerate(arguments)),
        reasoning=reasoning,
    ),
    TEXTS, TEXTS, st.lists(ARGUMENTS, max_size=3),
)  # fmt: skip


@dataclass
class Script:
    """Answers calls with what it was given, and keeps them."""

    said: list[ApiReply | Exception]
    calls: list[ApiCall] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    max_body_bytes: int = 1 << 20

    @asynccontextmanager
    async def answering(self, call: ApiCall, name: str) -> AsyncIterator[Sampled]:
        said = self.said[len(self.calls)]
        self.calls.append(call)
        self.names.append(name)
        if isinstance(said, Exception):
            raise said
        yield Sampled(PROMPT, [said])

    async def prompt_ids(self, call: ApiCall) -> list[int]:
        self.calls.append(call)
        return PROMPT

    @property
    def messages(self) -> list[Message]:
        """Those of the last call."""
        return self.calls[-1].messages


@asynccontextmanager
async def serving(recording: Any) -> AsyncIterator[ApiSession]:
    """A server of all dialects, whose one episode `recording` answers."""
    server = RecordingServer(all_dialects(tiny_tokenizer()), model="tiny", max_model_len=512)
    try:
        async with server.episode(cast("Recording", recording)) as session:
            yield session
    finally:
        await server.close()
