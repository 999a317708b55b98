"""Watches Ray's own processes: without them nothing of ours can start, and Ray says so late.

Ray ends a driver whose head (`gcs_server`) is gone after a minute, with a line of its own, and goes
on without a raylet until something has to be started. So a thread waits here for the end of those
of a private Ray, and asks a cluster's head every few seconds whether it is there.
Left out: raylets of a cluster; Ray tells of their actors' deaths.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import ray
from ray._private import worker

ASK_S, MOST_SILENT = 5.0, 4
"""How often a cluster's head is asked, and how often it may not answer."""


class RayGuard:
    """Calls `tell`, in its own thread and once, with the name of what has ended."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._stop, self._told_to_stop = os.pipe()
        self._watched: dict[int, str] = {}
        for name in ("gcs_server", "raylet"):
            for started in getattr(worker.global_worker.node, "all_processes", {}).get(name, ()):
                with suppress(ProcessLookupError):
                    self._watched[os.pidfd_open(started.process.pid)] = name
        self._head = ray.get_runtime_context().gcs_address
        self._num_silent = 0
        self._thread = threading.Thread(target=self._watch, name="ray guard", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        for fd in (self._stop, *self._watched):
            poll.register(fd, select.POLLIN)
        while True:
            ended = [fd for fd, _ in poll.poll(None if self._watched else ASK_S * 1000)]
            if self._stop in ended:
                return
            name = self._watched[ended[0]] if ended else self._silent_head()
            if name is not None:
                self._tell(name)
                return

    def _silent_head(self) -> str | None:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ASK_S).close()
            self._num_silent = 0
        except OSError:
            self._num_silent += 1
        return f"head at {self._head}" if self._num_silent >= MOST_SILENT else None

    def close(self) -> None:
        os.close(self._told_to_stop)
        self._thread.join()
        for fd in (self._stop, *self._watched):
            os.close(fd)
