"""The socket of a server and its address. By hand, because uvicorn ends the process where it cannot
listen."""

from __future__ import annotations

import ipaddress
import socket

MOST_PORTS = 65535
BACKLOG = 1024
WILDCARDS = ("0.0.0.0", "::")
"""Addresses that stand for all of a machine's."""


def listen(host: str, port: int, *, flags: str = "--") -> socket.socket:
    """A listening socket. ValueError, by the names of the options, where it cannot be had; `flags`
    is what stands before `host` and `port` there."""
    bound = bind(host, port, flags=flags)
    bound.listen(BACKLOG)
    return bound


def bind(host: str, port: int, *, flags: str = "--") -> socket.socket:
    """The same before it listens: the port is ours, and nobody waits while a model is loaded."""
    if not 0 <= port <= MOST_PORTS:
        raise ValueError(
            f"{flags}port {port}: must be 0 to {MOST_PORTS}; {flags}port 0 takes any free one"
        )
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{flags}host {host}: is no address of this machine ({_reason(error)}); "
            f"{flags}host 127.0.0.1 is this machine alone"
        ) from None
    try:
        return _bound(family, (str(address[0]), port))
    except OSError as error:
        raise ValueError(
            f"{flags}port {port}: cannot listen on {flags}host {host} ({_reason(error)}); choose "
            f"another, {flags}port 0 takes any free one"
        ) from None


def _bound(family: int, address: tuple[str, int]) -> socket.socket:
    # Named, for asyncio turns Nagle's algorithm off only where a socket says that it is TCP; with
    # it the body of an answer waits 40 ms for the client to acknowledge the head.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as create_server
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error


def url_at(host: str, port: int) -> str:
    """The URL of a host's name or address and a port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def url_of(listener: socket.socket, host: str, name: str = "") -> str:
    """The URL at which a client reaches `listener`, which was bound to `host`. Where that stands
    for all addresses it is the machine's `name`; by default the one that it calls itself."""
    shown = (name or socket.gethostname()) if host in WILDCARDS else host
    return url_at(shown, listener.getsockname()[1])


def require_key(host: str, *, has_key: bool) -> None:
    """`ValueError` where a network would be listened to without asking for a key."""
    if not has_key and not is_loopback(host):
        raise ValueError(
            f"--host {host}: is open to the network; give --api-key-file, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """True for a name or address by which this machine calls itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
