"""`KeptAnswers`: conversations that a later call may go on from by the id of their last answer.

A bounded number of bytes, for a bounded time, the oldest first out: a client whose answer is gone
is told to send the whole conversation, as one that asked for no keeping (`store: false`) does.
An id is random, so that nobody finds another's conversation by guessing.
Left out: answers that outlive the process, and reading one again by its id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanoengine.text.chat_template import Message
from nanoinfer.dialects.exchange import ApiCall, ApiReply, message_of
from nanoinfer.http.api_error import ApiError

MAX_BYTES = 32 << 20
MAX_AGE_S = 3600.0


@dataclass(frozen=True)
class _Kept:
    messages: list[Message]
    """Those that a call which goes on from here need not send."""
    size: int
    kept_at: float


class KeptAnswers:
    """For one event loop."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._kept: dict[str, _Kept] = {}  # the oldest first
        self._num_bytes = 0

    def keep(self, name: str, call: ApiCall, reply: ApiReply) -> None:
        """Keep the conversation of `call` with its reply, where the client wants that."""
        if not call.is_kept:
            return
        said = call.messages[1:] if call.has_instructions else call.messages
        messages = [*said, message_of(reply)]
        size = len(json.dumps(messages))
        self._kept[name] = _Kept(messages, size, self._clock())
        self._num_bytes += size
        self._let_go()

    def continued(self, call: ApiCall) -> ApiCall:
        """`call` with the whole conversation. ApiError where what it continues is not there."""
        if not call.continues:
            return call
        self._let_go()
        kept = self._kept.get(call.continues)
        if kept is None:
            raise ApiError(
                404,
                "previous_response_id: that answer is not kept (any more); send the whole "
                "conversation as input, without previous_response_id",
                "previous_response_id",
                code="previous_response_not_found",
            )
        place = 1 if call.has_instructions else 0
        own, new = call.messages[:place], call.messages[place:]
        return replace(call, messages=[*own, *kept.messages, *new])

    def _let_go(self) -> None:
        """Forget the oldest answers while they are too old, or too many bytes are kept."""
        now = self._clock()
        for name, kept in list(self._kept.items()):
            if self._num_bytes <= self._max_bytes and now - kept.kept_at <= self._max_age_s:
                return
            del self._kept[name]
            self._num_bytes -= kept.size
