"""A thread for the heavy calls of an actor, which answers heartbeats meanwhile.

    self._work = WorkThread("policy", device, threads)
    await self._work.run(function, *args)     # one after another
    {**vitals(), **self._work.counters()}     # a heartbeat in the words of monitor_control.py

Left out: the calls' limits (whoever calls has them).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch

from nanoengine.parallel.device import enter_process, worker_thread


class WorkThread:
    """Runs an actor's heavy calls beside its event loop, and counts them."""

    def __init__(self, name: str, device: torch.device, threads: int) -> None:
        """With so many CPU threads for each call."""
        enter_process(device, threads)
        self._thread = worker_thread(name, device, threads)
        self._num_open = 0
        # Of the calls that have ended, and since when one runs: one value, for the loop reads what
        # the thread writes. A call that ends meanwhile would count twice, and then once.
        self._busy: tuple[float, float | None] = (0.0, None)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the function in the thread; returns what it returns, raises what it raises."""
        loop = asyncio.get_running_loop()
        self._num_open += 1
        try:
            return await loop.run_in_executor(self._thread, self._timed, function, args, kwargs)
        finally:
            self._num_open -= 1

    def _timed(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ended_s, start = self._busy[0], time.perf_counter()
        self._busy = ended_s, start
        try:
            return function(*args, **kwargs)
        finally:
            self._busy = ended_s + time.perf_counter() - start, None

    def counters(self) -> dict[str, float]:
        """Calls that run and wait, and the seconds of all, the running one's so far included."""
        now = time.perf_counter()  # first, so that the seconds never become fewer
        ended_s, since = self._busy
        running_s = 0.0 if since is None else max(0.0, now - since)
        num_running = min(self._num_open, 1)
        return {
            "num_running": float(num_running),
            "num_waiting": float(self._num_open - num_running),
            "busy_s": ended_s + running_s,
        }
