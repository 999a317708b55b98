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
        self._busy_s = 0.0
        self._busy_since: float | None = None  # while a call runs

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
        start = self._busy_since = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._busy_s += time.perf_counter() - start
            self._busy_since = None

    def counters(self) -> dict[str, float]:
        """Calls that run and wait, and the seconds of all, the running one's so far included."""
        since = self._busy_since
        running_s = 0.0 if since is None else time.perf_counter() - since
        num_running = min(self._num_open, 1)
        return {
            "num_running": float(num_running),
            "num_waiting": float(self._num_open - num_running),
            "busy_s": self._busy_s + running_s,
        }
