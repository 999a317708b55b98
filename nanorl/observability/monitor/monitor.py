"""One run, watched: puts board, HTTP server, alerts and the live view's roles around it.

    async with RunMonitor(config.monitor, config.run_dir, live, control) as monitor:
        monitor.begin_phase("rl")
        ...
        monitor.observe_step(result.step, result.metrics, rollouts)

With every option off and one process there is nothing to watch: no task, no socket, and none of
prometheus_client, starlette and apprise is imported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.extras import missing
from nanoengine.stop_signals import Interrupted
from nanorl.observability.monitor.alerts import Alert, AlertRules
from nanorl.observability.monitor.board import RunBoard
from nanorl.observability.monitor.monitor_control import ClusterControl
from nanorl.observability.monitor.readings import RoleReadings
from nanorl.observability.monitor.sender import AlertSender
from nanorl.observability.report.live import LiveView
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.observer import PhaseBegun, RunObserver
from nanorl.options.monitor_config import MonitorConfig
from nanorl.types import Rollout

if TYPE_CHECKING:  # the server needs the extra `monitor`
    from nanorl.observability.monitor.monitor_server import MonitorServer
    from nanorl.observability.results import StepResult

_POLL_S = 1.0
_ASKED_TO_STOP = (Interrupted, asyncio.CancelledError, KeyboardInterrupt, SystemExit)


class RunMonitor(RunObserver):
    """An async context manager around a run. `ValueError` for addresses that cannot be used or
    extras that are missing; later on, nothing that goes wrong here reaches the run."""

    def __init__(
        self,
        config: MonitorConfig,
        run_dir: Path,
        live: LiveView,
        control: ClusterControl | None = None,
        clock: Callable[[], float] = time.monotonic,
        goes_on: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        """`goes_on` says whether a run that ends with an error begins again by itself."""
        self._config = config
        self._run_dir = run_dir
        self._live = live
        self._readings = None if control is None else RoleReadings(control, clock)
        self._clock = clock
        self._board = RunBoard(clock)
        self._sender: AlertSender | None = None
        self._rules: AlertRules | None = None
        self._server: MonitorServer | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._said: set[str] = set()
        self._goes_on = goes_on

    async def __aenter__(self) -> RunMonitor:
        if self._config.alerts:
            # First, because it may refuse, and a server would have to be closed again.
            self._sender = AlertSender(self._config.alerts, self._run_dir.name, say=self._live.say)
            self._rules = AlertRules(self._config, self._success_so_far())
        if self._config.port is not None:
            self._server = _import_server()(
                self._config, self._run_dir, self._board, self._readings
            )
            access = await self._server.start()
            self._live.say(f"monitor: {access.url}/metrics and /status")
        if self._sender is not None or self._readings is not None:
            self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._rules is not None and error is not None and not isinstance(error, _ASKED_TO_STOP):
            self._send(self._rules.end_with(error, goes_on=self._goes_on(error)))
        if self._server is not None:
            await self._server.close()
        if self._sender is not None:
            await self._sender.close()

    async def on_phase(self, phase: PhaseBegun) -> None:
        self.begin_phase(phase.title)

    def on_progress(self, title: str, metrics: Mapping[str, float]) -> None:
        self.progress()

    async def on_step_kept(self, step: StepResult) -> None:
        rollouts = (one for group in (*step.groups, *step.replayed) for one in group)
        self.observe_step(step.step, step.metrics, rollouts)

    def begin_phase(self, name: str) -> None:
        """The run does something else from now on."""
        self._board.begin_phase(name)

    def progress(self) -> None:
        """Something other than a step was finished: a task of an evaluation, a supervised step."""
        self._board.progress()

    def observe_step(
        self, step: int, metrics: Mapping[str, Any], rollouts: Iterable[Rollout]
    ) -> None:
        """RL step `step` is finished; `rollouts` are those that it trained on."""
        self._guarded(partial(self._take_step, step, metrics, rollouts))

    def _take_step(
        self, step: int, metrics: Mapping[str, Any], rollouts: Iterable[Rollout]
    ) -> None:
        self._board.observe_step(step, metrics, rollouts)
        if self._rules is not None:
            self._send(self._rules.observe_step(step, self._board.metrics, self._clock()))
        if self._readings is not None:
            self._board.observe_roles(self._readings.roles())

    def _success_so_far(self) -> list[float]:
        rows = read_metrics(self._run_dir / "metrics.jsonl")
        return [row["success"] for row in rows if row.get("success") is not None]

    async def _watch(self) -> None:
        """Look at the roles once a second."""
        while True:
            self._guarded(self._look)
            await asyncio.sleep(_POLL_S)

    def _guarded(self, look: Callable[[], None]) -> None:
        """The boundary between the run and whoever watches it: a defect of ours, or of what we look
        at, is said once and does not end the run."""
        try:
            look()
        except Exception as error:  # watching must not end what is watched
            failure = f"{type(error).__name__}: {error}"
            if failure not in self._said:
                self._said.add(failure)
                self._live.say(f"the monitor cannot see all of the run ({failure})")

    def _look(self) -> None:
        if self._rules is not None:
            board = self._board
            self._send(self._rules.observe_quiet(board.quiet_s, board.phase, self._clock()))
        if self._readings is None:
            return
        roles = self._readings.roles()
        self._live.show_roles(roles)
        if self._rules is not None:
            self._send(self._rules.observe_roles(roles, self._clock()))

    def _send(self, alerts: list[Alert]) -> None:
        assert self._sender is not None, "there are rules only where there are addresses"
        for alert in alerts:
            self._live.say(f"alert: {alert.title}. {alert.text}")
            self._sender.send(alert)


def _import_server() -> type[MonitorServer]:
    try:
        # Here: it imports an extra.
        from nanorl.observability.monitor.monitor_server import MonitorServer
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise missing("--monitor.port", package, extra="monitor") from None
    return MonitorServer
