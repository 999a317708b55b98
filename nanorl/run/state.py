"""`RunState`: what the loop of a run, its phases and its checkpoints share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from nanorl.distributed.roles.base import Roles
from nanorl.observability.report.live import LiveView
from nanorl.observability.report.observer import PhaseBegun
from nanorl.observability.report.summary import peak_rss_bytes
from nanorl.options.parts import Parts
from nanorl.run.continuation import computes
from nanorl.run.cursor import Cursor
from nanorl.run.history import RunHistory
from nanorl.run.observers import Observers, make_observers

T = TypeVar("T")


class RunState:
    """One run directory, where the run stands, and who is told of it."""

    def __init__(
        self,
        parts: Parts,
        roles: Roles,
        live: LiveView,
        goes_on: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        """`goes_on` says whether a run that ends with an error begins again by itself."""
        self.config = config = parts.config
        self.parts, self.roles, self.live = parts, roles, live
        self.dir = config.run_dir
        self.observers = Observers(make_observers(parts, roles, live, goes_on))
        self.cursor = Cursor(tasks=parts.tasks.fingerprint)
        self.history = RunHistory(self.dir)
        self.num_losses = 0  # of the trainer, since the run got any further
        self.has_published = False  # other weights than the model's own
        self._started = time.perf_counter()

    @property
    def is_changed(self) -> bool:
        """Say whether this process goes on with other options than the one before."""
        events = self.history.chosen()
        return bool(events) and any(computes(name) for name in events[-1]["changes"])

    async def train(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the training engine in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.roles.optimizer_thread, partial(function, *args, **kwargs)
        )

    def note_time(self) -> None:
        """Add the seconds since the last call to the run's, and look how large it has become."""
        now = time.perf_counter()
        self.cursor.add("wall_s", now - self._started)
        self._started = now
        self.cursor.keep_max("peak_rss_bytes", float(peak_rss_bytes()))

    @asynccontextmanager
    async def timed(self, phase: PhaseBegun) -> AsyncIterator[None]:
        """Tell the observers of a phase and count its seconds."""
        start, is_whole = time.perf_counter(), False
        try:
            await self.observers.on_phase(phase)
            yield
            is_whole = True
        finally:
            await self.observers.on_phase_end(phase.title, is_whole=is_whole)
            self.cursor.add(f"phase_s.{phase.title}", time.perf_counter() - start)
