"""`SpokenReply`: what a model says, as reasoning, text and calls, while its tokens arrive.

    spoken = SpokenReply(form, tokenizer, call, prompt)
    spoken.push([15, 7])     ("Two num", "")    new reasoning and text, as far as they are certain
    spoken.reply(output)     the whole, which begins with what was told

Where a schema rules the whole answer, its text is told at its end: it may be a call.
Left out: calls before they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.chat.form import ChatForm
from nanoinfer.chat.reasoning import opened_reasoning
from nanoinfer.chat.reply import ReplyStream
from nanoinfer.dialects.exchange import ApiCall, ApiReply
from nanoinfer.params import Output
from nanoinfer.text import TextStream


class SpokenReply:
    """One reply. Push its tokens in their order, then take the whole."""

    def __init__(
        self, form: ChatForm, tokenizer: ChatTokenizer, call: ApiCall, prompt: Sequence[int]
    ) -> None:
        self._form, self._call = form, call
        self._hidden = (tokenizer.special_ids - form.marks.keys()) | tokenizer.eos_ids
        self._hidden |= frozenset(call.stop_token_ids)
        self._text = TextStream(
            tokenizer, call.stop, min_tokens=call.min_tokens, skip_special=False
        )
        self._stop_text: str | None = None
        self._num_told = 0
        is_ruled = call.has_bare_calls or call.grammar is not None
        self._opened = "" if is_ruled else opened_reasoning(tokenizer, prompt)
        has_tools = bool(call.tools) and not call.has_bare_calls
        self._stream = ReplyStream(form.reader(has_tools=has_tools, opened=self._opened))

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Reasoning and text that the next tokens make certain."""
        for token in ids:
            if token not in self._hidden:
                self._stop_text = self._text.push(token) or self._stop_text
        if self._call.has_bare_calls:
            return "", ""
        settled = self._text.settled()
        new = self._stream.push(settled[self._num_told :])
        self._num_told = max(self._num_told, len(settled))
        return new.reasoning, new.content

    def reply(self, output: Output) -> ApiReply:
        """The whole, when all tokens of `output` were pushed. What was told of it stands."""
        self._stop_text = self._text.finish() or self._stop_text
        return self._form.reply(self._text.text, output, self._call, self._stop_text, self._opened)
