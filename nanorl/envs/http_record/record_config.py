"""The options of the recording proxy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanorl.bounds import Bound, check_record
from nanorl.envs.http_record.allow import AllowList

HttpMode = Literal["off", "record", "replay", "live"]


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """HTTP of environments and agent programs (docs/network.md)."""

    mode: HttpMode = "off"
    """off: nothing is done about it. record: what was asked before is answered from the store, the
    rest from the network and stored. replay: from the store alone. live: from the network alone."""
    allow: tuple[str, ...] = ()
    """Hosts that may be asked: api.example.org "*.wikipedia.org" 127.0.0.1:8080; ports 80 and 443
    where none is given. A private address has to be named itself."""
    store: Path | None = None
    """The file of the recorded answers; default http.sqlite in the run's folder."""
    key_headers: tuple[str, ...] = (
        *("accept", "accept-language", "content-type", "range"),
        *("if-none-match", "if-modified-since"),
    )
    """Headers that make two requests different, beside method, URL and body."""
    ca_file: Path | None = None
    """Certificates (PEM) that are trusted beside the system's, for servers of your own."""
    timeout_s: float = 30.0
    """Wall-clock limit of one answer."""
    max_body_mb: float = 16.0
    """Size of one answer, and of one request."""

    def __post_init__(self) -> None:
        check_record(
            self,
            "http.",
            timeout_s=Bound(0.01, 3600, "a rollout waits so long"),
            max_body_mb=Bound(0, 1024, "it is held in memory", is_open=True),
        )
        AllowList(self.allow)
        if self.mode == "off" and self.allow:
            raise ValueError(
                f"--http.allow {self.allow[0]}: nothing reads it with --http.mode off; add "
                "--http.mode record, replay or live"
            )
        if self.mode in ("record", "live") and not self.allow:
            raise ValueError(
                f"--http.mode {self.mode}: no host may be asked; name some with --http.allow"
            )
        if self.mode == "replay" and self.store is not None and not self.store.is_file():
            raise ValueError(f"--http.store {self.store}: there is no such file to replay")
        if self.ca_file is not None and not self.ca_file.is_file():
            raise ValueError(f"--http.ca-file {self.ca_file}: there is no such file")
