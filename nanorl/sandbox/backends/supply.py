"""Boxes started ahead: whoever needs one takes one that is up, and nobody gets a used one.

The supply grows by one each time somebody had to wait, up to `most_warm`, and shrinks to a single
box when nobody has asked for `_IDLE_S`. A box that waits is looked at before it is handed out: one
that died or spoke is thrown away. A box that has run its number of programs is thrown away, too;
that number is one except where a back end makes all that programs see anew by itself: there a box
in use counts as one of those that are up, since it comes back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from nanorl.sandbox.backends.box import BoxBrokenError, Launch, SandboxBox
from nanorl.sandbox.base import SandboxFailure, SandboxUnavailable

_IDLE_S = 30.0


class BoxBackend(Protocol):
    """A way to start boxes."""

    tier: str
    runs_per_box: int
    start_limit_s: float
    question: str
    """The canary, a program that looks for ways out (canary.py)."""
    promises: Mapping[str, Any]
    """What the canary must see, by name."""
    refused_jobs: Mapping[int, str]
    """Jobs (protocol.py) that it cannot do, and why."""
    details: dict[str, str]
    memory: str
    """Who bounds the memory of all processes together; empty: nobody."""

    def launch(self, index: int) -> Launch:
        """Say how to start the box number `index`, of those that are up. May raise OSError."""
        ...

    def explain(self, messages: str) -> SandboxUnavailable:
        """The refusal, from what was seen."""
        ...

    def close(self) -> None:
        """Removes what was made for all boxes together."""
        ...


class BoxSupply:
    """Starts, hands out and ends boxes. All methods may be called from any thread."""

    def __init__(self, backend: BoxBackend, most_warm: int) -> None:
        self.backend = backend
        self._most_warm = most_warm
        self._wanted = 1
        self._come_back = backend.runs_per_box > 1  # those in use are those of the next programs
        self._num_starting = 0
        self._taken: dict[SandboxBox, int] = {}  # every box that is up, and its index
        self._indices: set[int] = set()
        self._ready: deque[SandboxBox] = deque()
        self._problem = ""
        self._last_taken = time.monotonic()
        self._is_closing = False
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(2 * most_warm + 2, "sandbox-box")
        with self._changed:
            self._fill()

    def take(self) -> SandboxBox:
        """A box that is up. SandboxFailure where none can be started."""
        with self._changed:
            now = time.monotonic()
            if now - self._last_taken > _IDLE_S:
                self._wanted = 1
                while len(self._ready) > 1:
                    self._threads.submit(self._end, self._ready.popleft())
            self._last_taken = now
            if not self._ready:
                self._wanted = min(self._wanted + 1, self._most_warm)
            self._problem = ""
            while True:
                self._check_open()
                while self._ready:
                    box = self._ready.popleft()
                    if box.is_well:
                        self._fill()
                        return box
                    self._threads.submit(self._end, box)
                if self._problem:
                    raise SandboxFailure(f"the sandbox does not start: {self._problem}")
                self._fill(at_least=1)
                self._changed.wait(1.0)

    def give_back(self, box: SandboxBox) -> None:
        """A box whose program has ended well: kept where it may run more, else ended."""
        with self._changed:
            is_kept = box.num_runs < self.backend.runs_per_box and box.is_well
            if is_kept and not self._is_closing and len(self._ready) < self._most_warm:
                self._ready.append(box)
                self._changed.notify_all()
                return
        self.discard(box)

    def discard(self, box: SandboxBox) -> None:
        """Ends the box, in a thread of its own: that may take a while."""
        with contextlib.suppress(RuntimeError):  # closed: `close` ends it
            self._threads.submit(self._end, box)

    def end(self, box: SandboxBox) -> None:
        """Ends the box, and returns when nothing of it is left."""
        self._end(box)

    def close(self) -> None:
        """Ends every box, those in use as well. May be called again."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
            boxes = list(self._taken)
        for box in boxes:
            box.kill()
        self._threads.shutdown(wait=True)
        for box in list(self._taken):
            self._end(box)
        self.backend.close()

    def _check_open(self) -> None:
        if self._is_closing:
            raise SandboxFailure("the sandbox is closed")

    def _fill(self, at_least: int = 0) -> None:
        """Starts what is missing; the lock is held."""
        num_coming = len(self._ready) + self._num_starting
        num_up = max(len(self._taken), self._num_starting) if self._come_back else num_coming
        missing = max(self._wanted - num_up, at_least - num_coming)
        for _ in range(0 if self._is_closing else missing):
            self._num_starting += 1
            self._threads.submit(self._start)

    def _start(self) -> None:
        box, problem = None, ""
        try:
            box = self._launch()
            box.wait_until_ready(self.backend.start_limit_s)
        except (BoxBrokenError, SandboxFailure, OSError) as error:
            problem = str(error) or type(error).__name__
        with self._changed:
            self._num_starting -= 1
            if box is not None and not problem and not self._is_closing:
                self._ready.append(box)
            else:
                self._problem = problem
            self._changed.notify_all()
        if box is not None and (problem or self._is_closing):
            self._end(box)

    def _launch(self) -> SandboxBox:
        with self._changed:
            self._check_open()
            index = next(n for n in range(len(self._indices) + 1) if n not in self._indices)
            self._indices.add(index)
        try:
            box = SandboxBox(self.backend.launch(index))
        except BaseException:  # Ctrl-C too: the number is free again
            self._indices.discard(index)
            raise
        with self._changed:
            self._taken[box] = index
        return box

    def _end(self, box: SandboxBox) -> None:
        box.close()
        with self._changed:
            index = self._taken.pop(box, None)
            if index is not None:
                self._indices.discard(index)
