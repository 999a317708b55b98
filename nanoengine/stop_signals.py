"""Ctrl-C and SIGTERM in a training process: the first asks it to stop, the third ends it at once.

A step cut in two leaves weights, moments and records that disagree. So a signal only asks: whoever
trains looks between two steps, saves and leaves. The second is answered and changes nothing; the
third ends the process without saving, from inside the signal handler, whatever runs. The last
checkpoint is then what a resumed run goes on from, as after `kill -9`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_STATUS = 130  # what a shell reports of a program that Ctrl-C ended
ANSWERS = (
    "stopping after this step, then saving (Ctrl-C twice more ends at once, without saving)",
    "still finishing this step and saving (Ctrl-C once more ends at once, without saving)",
    "ended at once, without saving; --resume goes on from the last checkpoint",
)
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar may have hidden it


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The run was asked to stop, has saved, and can be resumed."""


def say_on_stderr(message: str) -> None:
    """Write past Python's buffers, which a signal handler may find in the middle of a write."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{message}\n".encode())


class StopSignals:
    """A context manager. `is_asked` turns true at the first signal. In another thread than the main
    one, which alone may handle signals, it does nothing: whoever waits there asks to stop."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(
        self,
        on_stop: Callable[[], object] | None = None,
        say: Callable[[str], object] = say_on_stderr,
        *,
        is_program: bool = False,
    ) -> None:
        """Both are called inside the signal handler: `on_stop` once, `say` with each answer. A
        program that was asked to stop answers until its end, which a later signal would else cut
        short; a library gives the signals back."""
        self._on_stop = on_stop
        self._say = say
        self._is_program = is_program
        self._num_signals = 0
        self._before: dict[int, Any] = {}

    @property
    def is_asked(self) -> bool:
        return self._num_signals > 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_program and self.is_asked:
            self._say = say_on_stderr  # whoever said it until now may be gone
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == len(ANSWERS):
            say_on_stderr(ANSWERS[-1])
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            os._exit(EXIT_STATUS)
        self._say(ANSWERS[self._num_signals - 1])
        if self._num_signals == 1 and self._on_stop is not None:
            self._on_stop()
