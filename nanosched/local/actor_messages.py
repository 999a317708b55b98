"""What processes say to each other. Objects (arguments, results) ride along as payloads.

Every message is a NamedTuple of plain values; a channel sends its place in `MESSAGES` and its
fields. Files (a socket, a process) ride along too and are named where they do.
"""

from __future__ import annotations

from typing import NamedTuple


class Fork(NamedTuple):
    """Driver to fork server, with the worker's socket: start a process."""

    actor_id: int
    environment: dict[str, str]


class Forked(NamedTuple):
    """The answer, with a pidfd of the new process."""

    actor_id: int
    pid: int


class Ready(NamedTuple):
    """Fork server to driver, once: all is imported, and what is asked is answered at once."""


class Exited(NamedTuple):
    """Fork server to driver: `status` is the exit code, negative for a signal."""

    pid: int
    status: int


class Start(NamedTuple):
    """Driver to worker, once, with (class, args, kwargs): construct the actor.

    `main` tells how to import the program's main module, for classes that are defined there.
    """

    label: str
    main: dict[str, str]


class Invoke(NamedTuple):
    """With (args, kwargs), and with one more payload for each `FutureSlot` among them."""

    call_id: int
    method: str


class Result(NamedTuple):
    """With the result."""

    call_id: int


class Failure(NamedTuple):
    """With the exception, if it can be pickled; `text` shows it, `traceback` where it was."""

    call_id: int
    text: str
    traceback: str


class Exiting(NamedTuple):
    """The actor ends by its own will, as the outcome of that call (-1: of none of this caller).

    Where its constructor chose that, it is not restarted, because it would choose so again.
    """

    call_id: int
    reason: str
    is_constructing: bool


class Release(NamedTuple):
    """Receiver to lender: nothing refers to these segments any more, one entry per loan."""

    segments: tuple[int, ...]


class Forget(NamedTuple):
    """Lender to receiver: these segments are gone and will not be named again."""

    segments: tuple[int, ...]


class Link(NamedTuple):
    """Driver to an actor that gets a handle, with a socket to that other actor."""

    actor_id: int


class Unlink(NamedTuple):
    """Driver to an actor that has a handle: that other actor is dead for good."""

    actor_id: int
    reason: str


class Accept(NamedTuple):
    """Driver to an actor, with a socket from which another one calls it."""


class HandleGone(NamedTuple):
    """An actor to the driver: it has dropped one handle of that other actor."""

    actor_id: int


class FutureSlot(NamedTuple):
    """Stands among the arguments for a future's value, which is payload `number` of the call."""

    number: int


Message = (
    Fork
    | Forked
    | Ready
    | Exited
    | Start
    | Invoke
    | Result
    | Failure
    | Exiting
    | Release
    | Forget
    | Link
    | Unlink
    | Accept
    | HandleGone
)

MESSAGES: tuple[type[Message], ...] = (
    Fork,
    Forked,
    Ready,
    Exited,
    Start,
    Invoke,
    Result,
    Failure,
    Exiting,
    Release,
    Forget,
    Link,
    Unlink,
    Accept,
    HandleGone,
)
