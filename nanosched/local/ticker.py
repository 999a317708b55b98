"""A file that becomes readable at regular times, so that one epoll waits for time as for all else.

Ticks that nobody read are one: a process that was stopped for an hour finds a single tick, and does
not take the hour for others' silence.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

CLOCK_MONOTONIC = 1


class Ticker:
    """Stands still until `start`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._is_ticking = False

    def fileno(self) -> int:
        return self._fd

    def start(self) -> None:
        """From now on; nothing where it ticks already."""
        if not self._is_ticking:
            self._set(self._every_s)

    def stop(self) -> None:
        if self._is_ticking:
            self._set(0.0)

    def take(self) -> None:
        """The tick has been seen."""
        with suppress(BlockingIOError):  # it was stopped meanwhile
            os.read(self._fd, 8)

    def close(self) -> None:
        os.close(self._fd)

    def _set(self, every_s: float) -> None:
        seconds, nanoseconds = int(every_s), int(every_s % 1 * 1e9)
        times = (ctypes.c_long * 4)(seconds, nanoseconds, seconds, nanoseconds)
        if self._libc.timerfd_settime(self._fd, 0, times, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._is_ticking = every_s > 0
