"""Server-sent events of an answer that is known already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from starlette.responses import Response, StreamingResponse

from nanoinfer.dialects.exchange import ServerEvent


def event_stream(events: Iterable[ServerEvent]) -> Response:
    """A response of these events."""

    def lines() -> Iterator[str]:
        for event in events:
            name = f"event: {event.name}\n" if event.name else ""
            data = event.data if isinstance(event.data, str) else json.dumps(event.data)
            yield f"{name}data: {data}\n\n"

    text = "".join(lines())  # one write: nothing can fail between the first byte and the last
    return StreamingResponse(
        iter([text]), media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )
