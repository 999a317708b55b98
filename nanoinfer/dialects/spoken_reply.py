"""`SpokenReply`: what a model says, as reasoning, text and calls, while its tokens arrive.

    spoken = SpokenReply(form, tokenizer, call, prompt)
    spoken.push([15, 7])     ("Two num", "")    new reasoning and text, as far as they are certain
    spoken.reply(output)     the whole, which begins with what was told

What may be the mark of a call, or of the end of the reasoning, is held back until it is known; of
a model whose calls have no mark, or where tools make the whole answer JSON, the text is told at its
end. A prompt that ends inside of `<think>` has opened the reasoning.
Left out: calls before they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.chat.form import ChatForm
from nanoinfer.dialects.exchange import ApiCall, ApiReply
from nanoinfer.params import Output
from nanoinfer.server.tool_calls import OPEN
from nanoinfer.text import TextStream

THINK, THOUGHT = "<think>", "</think>"
TAIL = 8
"""Tokens at a prompt's end in which the reasoning may be opened."""


class SpokenReply:
    """One reply. Push its tokens in their order, then take the whole."""

    def __init__(
        self, form: ChatForm, tokenizer: ChatTokenizer, call: ApiCall, prompt: Sequence[int]
    ) -> None:
        self._form, self._call = form, call
        self._eos_ids = tokenizer.eos_ids
        self._text = TextStream(tokenizer, call.stop, skip_special=False)
        self._stop_text: str | None = None
        self._is_opened = tokenizer.decode(list(prompt[-TAIL:])).rstrip().endswith(THINK)
        self._thought = self._said = ""

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Reasoning and text that the next tokens make certain."""
        for token in ids:
            if token not in self._eos_ids:
                self._stop_text = self._text.push(token) or self._stop_text
        thought, said = self._certain(self._text.settled())
        news = thought[len(self._thought) :], said[len(self._said) :]
        self._thought += news[0]
        self._said += news[1]
        return news

    def reply(self, output: Output) -> ApiReply:
        """The whole, when all tokens of `output` were pushed. What was told of it stands."""
        self._stop_text = self._text.finish() or self._stop_text
        text = self._text.text
        reply = self._form.reply(text, output, self._call, self._stop_text)
        if self._is_opened and THOUGHT not in text:
            reply = replace(reply, reasoning=text.strip(), text="", calls=())
        if not reply.reasoning.startswith(self._thought):
            reply = replace(reply, reasoning=self._thought)
        if not reply.text.startswith(self._said):
            reply = replace(reply, text=self._said)
        return reply

    def _certain(self, text: str) -> tuple[str, str]:
        start = text.lstrip()
        if not start or (start != THINK and THINK.startswith(start)):
            return "", ""
        if not (self._is_opened or start.startswith(THINK)):
            return "", self._certain_text(text)
        body, closed, rest = start.removeprefix(THINK).partition(THOUGHT)
        if not closed:
            return _before_mark(body, THOUGHT).strip(), ""
        return body.strip(), self._certain_text(rest.lstrip())

    def _certain_text(self, text: str) -> str:
        if self._call.has_bare_calls:
            return ""
        if not self._call.tools:
            return text
        if self._form.parser.name != "hermes":
            return ""
        return _before_mark(text.partition(OPEN)[0], OPEN).rstrip()


def _before_mark(text: str, mark: str) -> str:
    """`text` without an end that may become `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return text[:-size]
    return text
