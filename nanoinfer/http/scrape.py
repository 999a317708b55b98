"""Metrics as whoever scrapes them reads them. It needs the package prometheus_client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response


def scraped(request: Request, registry: CollectorRegistry) -> Response:
    """The metrics in the format that the request asks for."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})
