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
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

DEFAULT_PORTS = (80, 443)
_EMBEDDING = (IPv6Network("::/96"), IPv6Network("64:ff9b::/96"))
"""Whose last 32 bits are an IPv4 address (RFC 4291, 6052)."""
_OWN_NAT64 = IPv6Network("64:ff9b:1::/48")
"""Where they stand in it is each network's own affair (RFC 8215)."""
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9])?)*")


class AllowList:
    """The hosts of --http.allow."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """ValueError for what is no host."""
        self._hosts = [_parse(one) for one in patterns]

    def allows(self, host: str, port: int) -> bool:
        """Say whether the host may be asked at all, by its name."""
        return any(_matches(one, host) and port in ports for one, ports in self._hosts)

    def allows_address(self, address: str, host: str, port: int) -> bool:
        """Say whether `address`, which `host` has, may be connected to. Every public address
        may."""
        found = _meant(ip_address(address.partition("%")[0]))
        if found.is_global and not (found.is_multicast or found in _OWN_NAT64):
            return True
        is_named_local = found.is_loopback and host == "localhost"
        return is_named_local or any(
            one == str(found) and port in ports for one, ports in self._hosts
        )


def _meant(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address inside an IPv6 one that a gateway or the kernel takes for it: mapped,
    compatible, NAT64, 6to4, Teredo. It looks public, and leads to what may be private."""
    if isinstance(address, IPv4Address) or address.is_loopback:
        return address
    if address.ipv4_mapped or address.sixtofour:
        return address.ipv4_mapped or address.sixtofour or address
    if address.teredo:
        return address.teredo[1]
    is_embedded = any(address in network for network in _EMBEDDING)
    return IPv4Address(int(address) & 0xFFFF_FFFF) if is_embedded else address


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
