"""Why a request gets no answer of the world: an error that a client reads as an HTTP answer."""

from __future__ import annotations

import json

from nanorl.envs.http_record.http_exchange import WebAnswer, redacted


class NoAnswerError(Exception):
    """`status` and `kind` are the client's; `why` follows the URL in what it reads."""

    def __init__(self, status: int, kind: str, why: str) -> None:
        super().__init__(why)
        self.status, self.kind, self.why = status, kind, why

    def answer(self, url: str) -> WebAnswer:
        """The answer that tells the client of the refusal."""
        message = f"{redacted(url)} {self.why}"
        error = {"type": self.kind, "message": message, "url": redacted(url)}
        return WebAnswer(
            status=self.status,
            reason="nanorl: " + self.kind.replace("_", " "),
            headers=(("content-type", "application/json"), ("x-nanorl-error", self.kind)),
            body=json.dumps({"error": error}).encode(),
        )


def not_allowed(host: str, port: int, why: str, name: str) -> NoAnswerError:
    """The host, or the address that it has, is not on the list; `name` is what would have to be."""
    bare = f"[{name}]" if ":" in name else name
    wanted = bare if port in (80, 443) else f"{bare}:{port}"
    return NoAnswerError(
        403,
        "host_not_allowed",
        f"was not asked: {host} {why}; to allow it, add --http.allow {wanted}",
    )
