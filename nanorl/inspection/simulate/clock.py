"""A virtual clock: an event loop in which waiting costs no time.

    result = run_virtually(main())          # `asyncio.run`, on a clock that starts at 0

Code that runs on the loop sees nothing of it: `asyncio.sleep(3600)` returns when nothing earlier is
left to happen, and `asyncio.get_running_loop().time()` is then 3600 s later. So the real trainer,
router and collector run unchanged and in the order in which they would run.
Left out: threads. What they do takes real time, in which the clock stands still.
Next: simulation.py (what runs on it).
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for `timeout` it moves the clock by it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("the simulation is stuck: everybody waits, and for nobody")
        if not events and timeout is not None:
            self.now_s += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own, which starts at 0 s."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end as `asyncio.run` does. `RuntimeError` where nothing can happen any
    more and it has not ended."""
    was_collecting = gc.isenabled()
    gc.disable()  # a million live objects, none of them garbage, would be walked again and again
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        if was_collecting:
            gc.enable()
