"""Text of a completion while its tokens arrive, and the search for stop texts in it.

A token is bytes, not characters: one character may take several tokens, and a stop text may begin
inside one token and end inside another. So text is held back until its characters are complete,
and the search looks at text, never at tokens.
"""

from __future__ import annotations

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams

_INCOMPLETE = "\ufffd"  # what bytes that are no character yet decode to
_MAX_WINDOW = 8  # tokens decoded again with each new one; a longer window begins anew
_MAX_BEGUN = 3  # bytes of a character that is not complete
_MAX_HELD = 8  # tokens without a complete character before broken bytes are given as they are


class TextStream:
    """The text of one completion. Control tokens are left out of it if they are to be skipped, and
    stop texts that begin among the first `min_tokens` are none."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        keeps_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens, self._num_free_chars = min_tokens, 0
        self._keeps_stop, self._skip_special = keeps_stop, skip_special
        self._longest = max(map(len, stop), default=1)
        self._ids: list[int] = []
        # Some decoders treat the first token of a text differently, so new tokens are decoded
        # after the ones before them: `_start` .. `_read` are shown already, as `_shown`, the rest
        # is held.
        self._start = self._read = 0
        self._shown = ""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, params: SamplingParams) -> TextStream:
        """The text that a request asks for."""
        return cls(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            keeps_stop=params.include_stop,
            skip_special=params.skip_special,
        )

    def push(self, token: int) -> str | None:
        """Take a token. Returns the stop text it completed; `text` then ends before that,
        or with it."""
        self._ids.append(token)
        window, end = self._decoded(self._start), len(self._ids)
        if window.endswith(_INCOMPLETE):
            if end - self._read < _MAX_HELD:
                return None
            # Broken bytes are given as they are, but for the last ones: they may begin a character.
            for place in range(end - _MAX_BEGUN, end + 1):
                known = self._decoded(self._start, place)
                if window.startswith(known):
                    return self._take(known, place)
        return self._take(window, end)

    def finish(self) -> str | None:
        """No token follows: show what was held back."""
        return self._take(self._decoded(self._start), len(self._ids))

    def settled(self) -> str:
        """The part of `text` that cannot become part of a stop text any more."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return self.text[:-size]
        return self.text

    def _decoded(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special=self._skip_special)

    def _take(self, window: str, end: int) -> str | None:
        new = window[len(self._shown) :]
        if not new:
            return None
        before, self._read, self._shown = self._read, end, window
        if self._read - self._start > _MAX_WINDOW:
            self._start, self._shown = before, self._decoded(before, end)
        search_from = max(self._num_free_chars, len(self.text) - self._longest + 1)
        self.text += new
        if len(self._ids) <= self._min_tokens:
            self._num_free_chars = len(self.text)
            return None
        found = [(self.text.find(stop, search_from), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[: at + len(stop) if self._keeps_stop else at]
        return stop
