"""The APIs that clients speak, each a stateless translation (`nanorl/endpoint/exchange.py`)."""

from __future__ import annotations

from nanoengine.model.tokenizer import ChatTokenizer
from nanorl.endpoint.dialects.chat import ChatDialect
from nanorl.endpoint.dialects.messages import MessagesDialect
from nanorl.endpoint.dialects.responses import ResponsesDialect
from nanorl.endpoint.exchange import Dialect


def all_dialects(tokenizer: ChatTokenizer) -> list[Dialect]:
    """One of each; OpenAI's chat completions first, whose errors the other routes use."""
    return [ChatDialect(tokenizer), ResponsesDialect(tokenizer), MessagesDialect()]
