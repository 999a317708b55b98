"""The live view: plain lines where nobody can watch, a redrawn display where somebody can."""

import io
import re

import pytest
from rich.console import Console

from nanorl.observability.monitor.monitor_control import RoleStatus
from nanorl.observability.report.live import LiveView, sparkline


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_plain_lines_tell_progress_time_left_and_metrics():
    out, clock = io.StringIO(), Clock()
    with LiveView("nanorl smollm2", console=Console(file=out), clock=clock) as view:
        assert not view.is_live
        view.start_phase("evaluation", 200)
        for _ in range(200):
            view.advance("evaluation")
        view.start_phase("RL steps", 15, num_lines=15)
        for step in range(3):
            clock.now_s += 20
            metrics = {"success": 0.5 + step / 8, "logp_gap_max": 1.25e-5, "loss": float("nan")}
            view.advance("RL steps", metrics=metrics)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[0:00] nanorl smollm2"
    assert sum("evaluation" in line for line in lines) == 10
    assert sum("RL steps" in line for line in lines) == 3  # each step once
    assert lines[-1] == (
        "[1:00] RL steps 3/15, 4:00 left: success 75.0%, logp gap max 1.25e-5, loss –"
    )
    assert "\x1b" not in out.getvalue()


def test_the_live_display_shows_phases_metrics_and_sparkline():
    out = io.StringIO()
    terminal = {"TERM": "xterm"}  # not of whoever runs the tests
    console = Console(file=out, force_terminal=True, width=110, _environ=terminal)
    with LiveView("nanorl tiny", console=console) as view:
        view.start_phase("warm start", 4)
        view.advance("warm start", 4)
        view.start_phase("RL steps", 2)
        for success in (0.0, 1.0):
            metrics = {"success": success, "tokens_per_s_rollout": 1234.0}
            view.advance("RL steps", metrics=metrics)
        view.say("[red]saved[/red]\x1b[2J")
    shown = out.getvalue()
    for part in ("nanorl tiny", "warm start", "4/4", "2/2", "▁█", "1,234", "[red]saved[/red]?[2J"):
        assert part in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def roles(*pids: int) -> list[RoleStatus]:
    return [
        RoleStatus(
            name=f"replica-{i}",
            kind="replica",
            state="dead" if i == 1 else "ready",
            restarts=i,
            pid=pid,
            host="here",
            metrics={"version": 7.0, "num_waiting": 12.0, "tokens_per_s": 3456.0} if i else {},
        )
        for i, pid in enumerate(pids)
    ]


def shown_roles(given: list[RoleStatus], *, is_terminal: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=110)
    with LiveView("nanorl tiny", console=console) as view:
        view.show_roles(given)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())


def test_the_display_shows_the_roles_of_several_processes():
    rows = [line.split() for line in shown_roles(roles(4, 5)).splitlines()]
    assert ["role", "state", "version", "queue", "tokens/s", "restarts"] in rows
    assert ["replica-0", "ready", "–", "–", "–", "0"] in rows
    assert ["replica-1", "dead", "7", "12", "3,456", "1"] in rows


def test_roles_are_not_shown_inline_nor_in_a_log():
    assert "replica" not in shown_roles(roles(4, 4))
    assert shown_roles(roles(4, 5), is_terminal=False) == shown_roles([], is_terminal=False)


def test_many_roles_do_not_fill_the_terminal():
    shown = shown_roles(roles(*range(100)))
    assert "replica-15" in shown and "replica-16" not in shown and "and 84 more roles" in shown


def test_a_resumed_phase_counts_the_time_of_its_own_steps():
    out, clock = io.StringIO(), Clock()
    with LiveView("x", console=Console(file=out), clock=clock) as view:
        view.start_phase("RL steps", 20, num_done=18, num_lines=20)
        clock.now_s += 30
        view.advance("RL steps")
    assert out.getvalue().splitlines()[1:] == ["[0:30] RL steps 19/20, 0:30 left"]


def test_sparkline_scales_and_averages():
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0], width=10) == "▁▅██▁"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_an_empty_phase_is_refused():
    with pytest.raises(ValueError, match="'RL steps' of total=0"):
        LiveView("x", console=Console(file=io.StringIO())).start_phase("RL steps", 0)
