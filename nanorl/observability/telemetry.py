"""What all OpenTelemetry spans share, whoever makes them: names, ids, times, where they go.

The spans of a rollout are trajectories/otel.py's, those of a run trackers/run_spans.py's, which
names them without the SDK; so it is imported here where it is used, an extra that few install.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Status

MS = 1_000_000  # nanoseconds, in which OpenTelemetry counts
TRACE_BYTES, SPAN_BYTES = 16, 8  # of an id
SERVICE = "nanorl"


def nanoseconds(seconds: float) -> int:
    return int(seconds * (1000 * MS))


def own(name: str) -> str:
    """The attribute of that name which no convention has."""
    return f"{SERVICE}.{name}"


def id_of(name: str, num_bytes: int) -> int:
    """An id that follows from a name: what is sent twice is the same span."""
    digest = hashlib.sha256(name.encode(errors="replace")).digest()
    return int.from_bytes(digest[:num_bytes], "big")


def new_span_id() -> int:
    return secrets.randbits(8 * SPAN_BYTES - 1) | 1  # 0 is no id


def resource(version: str) -> Resource:
    """Who sends the spans."""
    from opentelemetry.sdk.resources import Resource  # here: the extra

    return Resource({"service.name": SERVICE, "service.version": version})


def failed(why: str | None) -> Status:
    """The status of a span whose work went wrong."""
    from opentelemetry.trace import Status, StatusCode  # here: the extra

    return Status(StatusCode.ERROR, why)


def export(exporter: SpanExporter, spans: Sequence[ReadableSpan], refused: str) -> None:
    """Hand the spans over. ConnectionError, which says `refused`, where they are not taken."""
    from opentelemetry.sdk.trace.export import SpanExportResult  # here: the extra

    if exporter.export(spans) is not SpanExportResult.SUCCESS:
        raise ConnectionError(refused)
