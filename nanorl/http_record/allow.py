"""`AllowList`: which hosts may be asked, by name and by the address that the name has.

    api.example.org         this host, on ports 80 and 443
    *.wikipedia.org         every host below it, not wikipedia.org itself
    127.0.0.1:8080          an address and its port; [::1]:8080 likewise

A name may point anywhere, and somewhere else a second later (DNS rebinding). So the address that is
connected to is checked too: one that is not public has to be on the list itself, or `localhost`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

DEFAULT_PORTS = (80, 443)
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*")


class AllowList:
    """The hosts of --http.allow."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """ValueError for what is no host."""
        self._hosts = [_parse(one) for one in patterns]

    def allows(self, host: str, port: int) -> bool:
        """Whether the host may be asked at all, by its name."""
        return any(_matches(one, host) and port in ports for one, ports in self._hosts)

    def allows_address(self, address: str, host: str, port: int) -> bool:
        """Whether `address`, which `host` has, may be connected to. A public one may."""
        found = ip_address(address.partition("%")[0])
        if isinstance(found, IPv6Address) and found.ipv4_mapped:
            found = found.ipv4_mapped
        if found.is_global and not found.is_multicast:
            return True
        is_named_local = found.is_loopback and host == "localhost"
        return is_named_local or any(
            one == str(found) and port in ports for one, ports in self._hosts
        )


def split_host(text: str) -> tuple[str, int | None]:
    """Host and port of "host", "host:port" or "[::1]:port". ValueError for anything else."""
    bare = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
    parts = urlsplit(f"//{bare}")
    if parts.hostname is None or parts.netloc != bare or "@" in bare:
        raise ValueError("not a host")
    return parts.hostname.rstrip("."), parts.port


def _parse(pattern: str) -> tuple[str, tuple[int, ...]]:
    try:
        host, port = split_host(pattern)
        if not _NAME.fullmatch(host):
            host = str(ip_address(host))
    except ValueError:
        raise ValueError(
            f"--http.allow {pattern}: must be a host such as api.example.org, *.example.org or "
            "127.0.0.1:8080, without scheme and path"
        ) from None
    return host, DEFAULT_PORTS if port is None else (port,)


def _matches(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) >= len(pattern)
    return host == pattern
