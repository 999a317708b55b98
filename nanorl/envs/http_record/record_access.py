"""`HttpAccess`: how code of a run reaches its recording proxy, and nothing else.

    access.environment()     variables for a program: HTTP_PROXY and those like it, certificates
    access.enter()           the same for this process, whose sockets then lead nowhere else

`enter` is a rail and no wall: the code in a process of environments is the user's own. It catches
the client that reads no HTTP_PROXY, whose answers would be neither recorded nor replayed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorl.envs.http_record.record_server import USER

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_CERTIFICATES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "PIP_CERT"),
)
_INTERNET = ("AF_INET", "AF_INET6")


@dataclass(frozen=True, kw_only=True)
class HttpAccess:
    """The proxy of a run, as another process of this machine is told of it."""

    port: int
    token: str
    ca_file: Path

    @property
    def url(self) -> str:
        """The proxy's address with the token in it."""
        return f"http://{USER}:{self.token}@127.0.0.1:{self.port}"

    def environment(self, no_proxy: str = "") -> Mapping[str, str]:
        """Environment variables; hosts of `no_proxy` are not asked through it."""
        both = [name for one in _PROXIES for name in (one, one.lower())]
        return {
            **dict.fromkeys(both, self.url),
            **dict.fromkeys(_CERTIFICATES, str(self.ca_file)),
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }

    def enter(self) -> None:
        """Lead this process's HTTP, and that of its children, to the proxy, for good. Connections
        to anywhere else raise PermissionError, which names the place and the option."""
        os.environ.update(self.environment())
        sys.addaudithook(self._check)

    def _check(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "socket.connect":
            return
        socket, address = arguments
        if socket.family.name in _INTERNET and address[1] != self.port:
            raise PermissionError(
                f"a connection to {address[0]}, port {address[1]}, past the recording proxy: with "
                "--http.mode a client has to use HTTP_PROXY (httpx, requests and urllib do, "
                "aiohttp with trust_env=True), and the host to be on --http.allow"
            )
