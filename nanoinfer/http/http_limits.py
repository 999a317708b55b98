"""The limits that every server holds its clients to."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """The most that one client may ask for."""

    max_body_bytes: int = 4 << 20
    """Longest request body."""
    max_picture_body_bytes: int = 64 << 20
    """The same where the model sees: clients send all pictures again with every request."""
    max_connections: int = 2048
    """Connections at a time; more are closed at once."""
    max_head_bytes: int = 16 << 10
    """Length of the head of a request: its address and its headers."""
    max_headers: int = 100
    """Lines of a head. As Apache's LimitRequestFields."""
    head_timeout_s: float = 10.0
    """The head of a request must have arrived within this time; the connection is closed
    otherwise."""
    body_timeout_s: float = 30.0
    """A body must have arrived within this time."""
    send_timeout_s: float = 60.0
    """A client must take some of its answer within this time; the connection is closed and the
    request aborted otherwise. As nginx's send_timeout."""
    request_timeout_s: float = 600.0
    """A request must be answered within this time; what it asked for is aborted otherwise."""

    def with_pictures(self) -> Self:
        """Those of a model that sees."""
        return replace(self, max_body_bytes=self.max_picture_body_bytes)

    @property
    def longest_body(self) -> str:
        """The length of the longest body, for people."""
        if self.max_body_bytes == self.max_picture_body_bytes:
            size = f"{self.max_body_bytes} bytes ({self.max_body_bytes / (1 << 20):g} MiB)"
            return f"{size}, pictures included; send fewer or smaller ones"
        return f"{self.max_body_bytes} bytes"

    def __post_init__(self) -> None:
        for one in fields(self):
            if not 0 < getattr(self, one.name) < math.inf:
                raise ValueError(
                    f"{one.name}={getattr(self, one.name)}: a limit of the server must be positive "
                    "and finite"
                )
