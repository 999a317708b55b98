"""The view of a run while it goes on: its phases with the time left, the numbers that matter, and
its roles where they are in more than one process.

On a terminal a `rich` display that redraws itself; anywhere else (a file, a pipe, CI) plain lines,
as many for each phase as it asks for. Left out: history beyond the sparkline of success (see
metrics.jsonl, report.html).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from nanorl.observability.monitor.monitor_control import RoleStatus, is_spread
from nanorl.observability.report.charts import duration, number
from nanorl.observability.report.observer import PhaseBegun, RunObserver

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult

SHOWN = (
    *("success", "reward", "groups_with_signal", "grad_norm", "clip_fraction"),
    *("logp_gap_max", "step_s"),
)
"""The metrics of a step of RL that are shown beside its bar."""
_BARS = "▁▂▃▄▅▆▇█"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would obey them
_MOST_ROLES = 16  # a terminal has some 50 rows
_STATE_STYLES = {"ready": "green", "dead": "bold red"}
_FRACTIONS = re.compile(r"(heldout_)?success(_.*)?|.*_fraction")


@dataclass(kw_only=True)
class Phase:
    """A bar: `num_done` units of `total` are done, all but `num_before` of them since `start_s`."""

    name: str
    total: int
    start_s: float
    num_lines: int
    num_before: int
    num_done: int
    task_id: TaskID | None = None

    def left_s(self, now_s: float) -> float | None:
        num_new = self.num_done - self.num_before
        if not num_new:
            return None
        return (now_s - self.start_s) / num_new * (self.total - self.num_done)


class LiveView(RunObserver):
    """A context manager around a run. Phases begin in any order and may overlap.

    `is_live` None asks the console; `clock` is for tests.
    """

    def __init__(
        self,
        title: str,
        *,
        console: Console | None = None,
        is_live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(file=sys.stdout, highlight=False)
        self.is_live = self._console.is_terminal if is_live is None else is_live
        self._title = title
        self._clock = clock
        self._start_s = clock()
        self._phases: dict[str, Phase] = {}
        self._now = ""  # the run's phase
        self._metrics: dict[str, float | None] = {}
        self._successes: list[float] = []
        self._roles: Sequence[RoleStatus] = ()
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=36),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
            speed_estimate_period=3600.0,  # an RL step takes half a minute
        )
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self.is_live:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=2
            )
            self._live.start()
        else:
            self.say(self._title)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    async def on_phase(self, phase: PhaseBegun) -> None:
        self._now = phase.title
        if phase.total:
            self.start_phase(
                phase.title, phase.total, num_done=phase.num_done, num_lines=phase.num_lines
            )

    def on_progress(self, title: str, metrics: Mapping[str, float]) -> None:
        if title in self._phases:  # what RL does between its steps has no bar
            self.advance(title, metrics=metrics)

    async def on_step_kept(self, step: StepResult) -> None:
        shown = {name: step.metrics[name] for name in SHOWN if name in step.metrics}
        self.advance(self._now, metrics=shown)

    def start_phase(self, name: str, total: int, *, num_done: int = 0, num_lines: int = 10) -> None:
        """`total` units of work, of which `num_done` were done before; starting a phase again
        starts it over. A log gets `num_lines` lines about it."""
        if total < 1:
            raise ValueError(
                f"phase {name!r} of total={total}: must have at least one unit of work"
            )
        phase = Phase(
            name=name,
            total=total,
            start_s=self._clock(),
            num_lines=num_lines,
            num_before=num_done,
            num_done=num_done,
        )
        if self.is_live:
            phase.task_id = self._progress.add_task(name, total=total, completed=num_done)
        self._phases[name] = phase

    def advance(
        self, name: str, num: int = 1, metrics: Mapping[str, float | None] | None = None
    ) -> None:
        """`num` units more are done. `metrics` are the current numbers of the phase; `success`
        among them also feeds the sparkline."""
        phase, metrics = self._phases[name], metrics or {}
        self._metrics.update(metrics)
        success = metrics.get("success")
        if success is not None:
            self._successes.append(success)
        line_before = phase.num_lines * phase.num_done // phase.total
        phase.num_done = min(phase.total, phase.num_done + num)
        if phase.task_id is not None:
            self._progress.update(phase.task_id, completed=phase.num_done)
        elif phase.num_lines * phase.num_done // phase.total > line_before:
            self._tell(phase, metrics)

    def say(self, message: str) -> None:
        """Print a line above the bars, or in the log."""
        clean = _CONTROL.sub("?", message)
        if self.is_live:
            self._console.print(Text(clean))
        else:
            print(f"[{duration(self._clock() - self._start_s)}] {clean}", file=self._console.file)
            self._console.file.flush()

    def show_roles(self, roles: Sequence[RoleStatus]) -> None:
        """Take in how the roles are now. Only a display shows them; a log has a line where a role
        changes."""
        self._roles = roles if is_spread(roles) else ()

    def _tell(self, phase: Phase, metrics: Mapping[str, float | None]) -> None:
        left_s = phase.left_s(self._clock())
        left = f", {duration(left_s)} left" if left_s else ""
        numbers = ", ".join(f"{_label(name)} {_format(name, metrics[name])}" for name in metrics)
        tail = f": {numbers}" if numbers else ""
        self.say(f"{phase.name} {phase.num_done}/{phase.total}{left}{tail}")

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 3))
        cells = [
            Text.assemble((f"{_label(name)} ", "dim"), (_format(name, value), "bold"))
            for name, value in self._metrics.items()
        ]
        for i in range(0, len(cells), 4):
            table.add_row(*cells[i : i + 4])
        parts: list[RenderableType] = [
            Text(self._title, style="bold cyan"),
            self._progress,
        ]
        if self._successes:
            spark = sparkline(self._successes, width=60)
            parts.append(Text.assemble(("success ", "dim"), (spark, "green")))
        parts.append(table)
        if self._roles:
            parts.append(roles_table(self._roles[:_MOST_ROLES]))
        if num_hidden := len(self._roles[_MOST_ROLES:]):
            parts.append(Text(f"and {num_hidden} more roles: nanorl status", style="dim"))
        return Group(*parts)


def roles_table(roles: Sequence[RoleStatus]) -> Table:
    """A row for each role; – for a number that it does not report."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("role", "state"):
        table.add_column(name)
    for name in ("version", "queue", "tokens/s", "restarts"):
        table.add_column(name, justify="right")
    for role in roles:
        numbers = (role.metrics.get(name) for name in ("version", "num_waiting", "tokens_per_s"))
        table.add_row(
            Text(_CONTROL.sub("?", role.name)),
            Text(role.state, style=_STATE_STYLES.get(role.state, "yellow")),
            *(number(value) for value in numbers),
            str(role.restarts),
        )
    return table


def sparkline(fractions: list[float], width: int) -> str:
    """Values from 0 to 1 as bars; if there are more than `width`, means of equal stretches."""
    if len(fractions) > width:
        edges = [i * len(fractions) // width for i in range(width + 1)]
        parts = [fractions[a:b] for a, b in pairwise(edges)]
        fractions = [sum(part) / len(part) for part in parts]
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * min(1.0, max(0.0, value)))] for value in fractions)


def _label(name: str) -> str:
    return name.replace("_", " ")


def _format(name: str, value: float | None) -> str:
    return number(value, is_fraction=bool(_FRACTIONS.fullmatch(name)))
