"""`PromptBound`: the size that a prompt can have at all, found without encoding all of it.

    bound = PromptBound(tokenizer, 4096)                            # tokens
    ids = await bound.encoded([messages, tools], lambda: tokenizer.encode_chat(...))

To encode a text takes time in proportion to it, and nobody else should wait for one that cannot fit
the context. No token stands for more bytes than the longest of the vocabulary, so a text of more
bytes than the context has room for is refused unread. One that could fit if it were made of the
longest tokens is encoded in pieces, until they are more than it may have. What is left, and large,
is encoded in a thread, where the tokenizer lets go of the interpreter (special_guard.py). There are
few such threads, and a short prompt waits for none.
Left out: the exact length, which the caller finds in the ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanoengine.text.tokenizer import ChatTokenizer, all_text
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import LARGE_BYTES, in_proportion

T = TypeVar("T")
TOO_LONG = "context_length_exceeded"
"""OpenAI's name for the error."""
SLACK = 2
"""A template may leave some of the text out, and cuts between pieces make tokens of their own."""
ESCAPE_BYTES = 6
"""JSON may write a byte of text as six."""
FIELD_BYTES = 1 << 16
"""Of a body, beside its texts."""
MOST_BYTES_PER_TOKEN = 8
"""Text with fewer, and there is hardly any with more, is encoded at once and as a whole."""
PIECE_CHARS = 1 << 14


class PromptBound:
    """The bound on a prompt for a context of `max_tokens`. It belongs to one event loop."""

    def __init__(self, tokenizer: ChatTokenizer, max_tokens: int, most_at_once: int = 1) -> None:
        """So many large prompts are encoded at once; the threads are there for others, too."""
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self._turns = asyncio.Semaphore(most_at_once)

    @property
    def max_text_bytes(self) -> int:
        """Longer text is longer than the context, whatever it says."""
        return SLACK * self.max_tokens * self.tokenizer.longest_token_bytes

    @property
    def max_body_bytes(self) -> int:
        """The same of a request's body."""
        return ESCAPE_BYTES * self.max_text_bytes + FIELD_BYTES

    async def encoded(
        self, parts: Sequence[Any], encode: Callable[[], T], *, is_seeing: bool = False
    ) -> T:
        """Return what `encode` makes of the texts in `parts`: tokens. Large texts keep nobody else
        waiting, nor do those of a model that sees, whose pictures may have to be read again.
        ApiError where they cannot fit. Names of fields count: so there are never more messages than
        tokens, of which a template may look at all for each."""
        text = all_text(*parts)

        def checked() -> T:
            if self.is_exceeded(text):
                raise self.error()
            return encode()

        if len(text) < LARGE_BYTES and not is_seeing:
            return checked()
        async with self._turns:
            return await in_proportion(max(len(text), LARGE_BYTES), checked)

    def is_exceeded(self, text: str) -> bool:
        """True where `text` is certainly too long; False says nothing."""
        size = len(text.encode(errors="surrogatepass"))
        if size > self.max_text_bytes:
            return True
        if size <= MOST_BYTES_PER_TOKEN * self.max_tokens:
            return False
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            count += len(self.tokenizer.encode(text[start : start + PIECE_CHARS]))
            if count > SLACK * self.max_tokens:
                return True
        return False

    def error(self) -> ApiError:
        """The error that the client gets for a prompt that is too long."""
        return ApiError(
            400,
            f"the prompt is too long: the context length is {self.max_tokens} tokens; shorten it",
            "messages",
            code=TOO_LONG,
        )
