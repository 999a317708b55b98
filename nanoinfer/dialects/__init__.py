"""The APIs that clients speak: each a stateless translation into `ApiCall` and from `ApiAnswer`.

exchange.py      what a client asks and gets, in no dialect; the contract of a dialect
chat.py          OpenAI's chat completions
responses.py     OpenAI's Responses
messages.py      Anthropic's Messages
spoken_reply.py  what a model says, as reasoning, text and calls, while its tokens arrive
call_params.py   the sampling parameters of a call
sse.py           an answer as server-sent events
"""

from __future__ import annotations

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.dialects.chat import ChatDialect
from nanoinfer.dialects.exchange import Dialect, StreamingDialect
from nanoinfer.dialects.messages import MessagesDialect
from nanoinfer.dialects.responses import ResponsesDialect


def all_dialects(tokenizer: ChatTokenizer) -> list[Dialect]:
    """One of each; OpenAI's chat completions first, whose errors the other routes use."""
    return [ChatDialect(tokenizer), *agent_dialects(tokenizer)]


def agent_dialects(tokenizer: ChatTokenizer) -> list[StreamingDialect]:
    """Those of one reply, which the server streams through `SpokenReply`."""
    return [ResponsesDialect(tokenizer), MessagesDialect()]
