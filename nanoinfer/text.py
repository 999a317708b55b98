"""Text of a completion while its tokens arrive, and the search for stop texts in it.

A token is bytes, not characters: one character may take several tokens, and a stop text may begin
inside one token and end inside another. So text is held back until its characters are complete,
and the search looks at text, never at tokens.
"""

from __future__ import annotations

from nanoengine.model.tokenizer import ChatTokenizer

_INCOMPLETE = "\ufffd"  # what bytes that are no character yet decode to
_MAX_HELD = 8  # tokens without a complete character before broken bytes are given as they are


class TextStream:
    """The text of one completion; control tokens are left out of it."""

    def __init__(self, tokenizer: ChatTokenizer, stop: tuple[str, ...] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max(map(len, stop), default=1)
        self._ids: list[int] = []
        # Some decoders treat the first token of a text differently, so new tokens are decoded
        # after the ones before them: `_start` .. `_read` are shown already, the rest is held.
        self._start = self._read = 0

    def push(self, token: int) -> str | None:
        """Take a token. Returns the stop text it completed; `text` then ends before that."""
        self._ids.append(token)
        new = self._decoded()
        if new.endswith(_INCOMPLETE) and len(self._ids) - self._read < _MAX_HELD:
            return None
        return self._take(new)

    def finish(self) -> str | None:
        """No token follows: show what was held back."""
        return self._take(self._decoded())

    def settled(self) -> str:
        """The part of `text` that cannot become part of a stop text any more."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return self.text[:-size]
        return self.text

    def _decoded(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._start : self._read], skip_special=True)
        window = self._tokenizer.decode(self._ids[self._start :], skip_special=True)
        return window[len(shown) :]

    def _take(self, new: str) -> str | None:
        if not new:
            return None
        self._start, self._read = self._read, len(self._ids)
        search_from = max(0, len(self.text) - self._longest + 1)
        self.text += new
        found = [(self.text.find(stop, search_from), stop) for stop in self._stop]
        hits = [(at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[:at]
        return stop
