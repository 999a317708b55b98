"""Alerts: what is told when, how often, and that telling it never holds the run up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from monitor_doubles import PaperCluster, Watched, role
from waiting import until

from nanoengine.stop_signals import Interrupted
from nanorl.observability.monitor.alerts import QUIET_S, Alert, AlertRules, SuccessWatch
from nanorl.observability.monitor.sender import AlertSender
from nanorl.options.monitor_config import MonitorConfig

HOUR = 3600.0


def titles(alerts: list[Alert]) -> list[str]:
    return [alert.title for alert in alerts]


def rules(**options: float) -> AlertRules:
    return AlertRules(MonitorConfig(**options))


def test_a_restart_is_told_once_and_so_is_that_it_is_over() -> None:
    told = rules()
    assert told.observe_roles([role("replica-1")], 0) == []
    begun = told.observe_roles([role("replica-1", restarts=1, state="starting")], 1)
    assert titles(begun) == ["replica-1 was restarted"] and begun[0].is_problem
    assert "1 restart so far" in begun[0].text
    assert told.observe_roles([role("replica-1", restarts=1, state="starting")], 2) == []
    over = told.observe_roles([role("replica-1", restarts=1)], 13)
    assert titles(over) == ["replica-1 is ready again"] and not over[0].is_problem
    assert over[0].text == "After 12 s."
    assert told.observe_roles([role("replica-1", restarts=1)], 14) == []


def test_a_role_that_was_back_before_anybody_looked_is_told_too() -> None:
    told = rules()
    assert titles(told.observe_roles([role("a", restarts=1)], 0)) == ["a was restarted"]
    assert titles(told.observe_roles([role("a", restarts=1)], 1)) == ["a is ready again"]


def test_a_death_and_the_restart_after_it_are_one_event() -> None:
    told = rules()
    assert titles(told.observe_roles([role("a", state="dead")], 0)) == ["a died"]
    assert told.observe_roles([role("a", state="starting", restarts=1)], 1) == []
    assert titles(told.observe_roles([role("a", restarts=1)], 2)) == ["a is ready again"]


def test_a_role_that_was_removed_is_no_event() -> None:
    told = rules()
    assert told.observe_roles([role("a"), role("b")], 0) == []
    assert told.observe_roles([role("a", state="draining")], 1) == []
    assert told.observe_roles([], 2) == []


def test_a_role_that_crashes_every_minute_gives_six_messages_an_hour() -> None:
    told, begun, ended = rules(), [], []
    for minute in range(60):
        begun += told.observe_roles([role("a", restarts=minute + 1)], 60.0 * minute)
        ended += told.observe_roles([role("a", restarts=minute + 1)], 60.0 * minute + 1)
        assert told.observe_quiet(0.0, "rl", 60.0 * minute + 2) == []
    assert len(begun) == len(ended) == 6
    assert "came and went 9 more times since" in begun[1].text


def test_what_begins_in_the_silence_and_lasts_is_told_when_the_silence_is_over() -> None:
    told = rules()
    told.observe_roles([role("a", restarts=1)], 0)
    told.observe_roles([role("a", restarts=1)], 1)
    assert told.observe_roles([role("a", restarts=1, state="dead")], 2) == []
    assert told.observe_quiet(0.0, "rl", QUIET_S - 1) == []
    assert titles(told.observe_quiet(0.0, "rl", QUIET_S)) == ["a died"]
    assert told.observe_roles([role("a", restarts=2)], QUIET_S + 8) == []
    assert titles(told.observe_roles([role("a", restarts=2)], QUIET_S + 9)) == ["a is ready again"]


def test_a_stall_is_told_after_its_minutes_and_when_it_is_over() -> None:
    told = rules(stall_minutes=2.0)
    assert told.observe_quiet(119.0, "rl", 119.0) == []
    assert titles(told.observe_quiet(120.0, "rl", 120.0)) == ["nothing finished for 2 minutes"]
    assert told.observe_quiet(500.0, "rl", 500.0) == []
    over = told.observe_quiet(1.0, "rl", 600.0)
    assert titles(over) == ["the run goes on (rl)"] and over[0].text == "After 8 minutes."


def test_a_number_that_is_not_finite_is_told_by_its_name() -> None:
    told = rules()
    bad = {"loss": float("nan"), "grad_norm": float("inf"), "reward": 0.5}
    begun = told.observe_step(3, bad, 0)
    assert titles(begun) == ["step 3 is not finite"]
    assert begun[0].text == "loss is nan, grad_norm is inf."
    assert told.observe_step(4, bad, 1) == []
    assert titles(told.observe_step(5, {"loss": 1.0}, 2)) == ["step 5 is finite again"]


def steps_told(told: AlertRules, successes: list[float]) -> list[tuple[int, str]]:
    """[(step, the title's first words)] of all messages; an hour lies between two steps."""
    return [
        (step, alert.title.split(" at step")[0].split(" (")[0])
        for step, success in enumerate(successes)
        for alert in told.observe_step(step, {"success": success}, step * HOUR)
    ]


@pytest.mark.parametrize(
    ("successes", "expected"),
    [
        # best mean of three is 0.8; the third step below 0.4 is the collapse, 0.6 the way back
        (
            [0.8, 0.8, 0.8, 0.3, 0.3, 0.3, 0.3, 0.5, 0.7, 0.7],
            [(5, "success collapsed"), (9, "success is back")],
        ),
        ([0.8, 0.8, 0.8, 0.0, 0.0, 0.5, 0.0, 0.0, 0.8], []),  # never three in a row
        ([0.05, 0.05, 0.05, 0.0, 0.0, 0.0, 0.0], []),  # it never got anywhere
        ([0.0] * 6 + [0.4] * 6, []),  # learning is no collapse
        ([1.0, 0.0, 0.0, 0.0, 0.0], [(3, "success collapsed")]),
        ([0.8, 0.8, 0.8, 0.41, 0.41, 0.41], []),  # just above half
    ],
)
def test_success_collapses_when_every_step_of_some_is_below_half_of_the_best_mean(
    successes: list[float], expected: list[tuple[int, str]]
) -> None:
    assert steps_told(rules(collapse_steps=3), successes) == expected


def test_a_resumed_run_remembers_its_best() -> None:
    told = AlertRules(MonitorConfig(collapse_steps=2), success_so_far=[0.9, 0.9])
    assert [step for step, _ in steps_told(told, [0.1, 0.1])] == [1]
    watch = SuccessWatch(4)
    for success in (0.2, 0.4, 0.6):
        watch.update(success)
    assert watch.best == 0.0  # no mean of four yet
    watch.update(0.8)
    assert watch.best == pytest.approx(0.5)


# -- sending ---------------------------------------------------------------------------------------


class Receiver:
    """A real HTTP server; `delay` is an event that holds its answers back."""

    def __init__(self, status: int = 200) -> None:
        self.got: list[dict] = []
        self.release = threading.Event()
        self.release.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.got.append(json.loads(body))
                outer.release.wait(60)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"json://user:secretword@127.0.0.1:{self.server.server_port}/hook?rto=60&cto=60"

    def titles(self) -> list[str]:
        return [message["title"] for message in self.got]


@contextmanager
def receiver(status: int = 200) -> Iterator[Receiver]:
    one = Receiver(status)
    thread = threading.Thread(target=one.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield one
    finally:
        one.release.set()
        one.server.shutdown()
        one.server.server_close()
        thread.join()


def test_the_alerts_of_a_run_reach_a_real_receiver(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "success": 1.0}\n')

    async def scenario(addresses: Path) -> str:
        cluster = PaperCluster()
        watched = Watched(tmp_path, cluster, alerts=(str(addresses),), collapse_steps=1)
        with pytest.raises(RuntimeError, match="no memory"):
            async with watched.monitor as monitor:
                monitor.begin_phase("rl")
                cluster.change("replica-0", state="dead")
                await until(lambda: len(one.got) >= 1)
                cluster.change("replica-0", state="ready", restarts=1)
                monitor.observe_step(1, {"success": 0.25, "loss": float("nan")}, [])
                await until(lambda: len(one.got) >= 4)
                raise RuntimeError("no memory")
        return watched.log

    with receiver() as one:
        file = tmp_path / "addresses"
        file.write_text(f"# where we are told\n\n{one.address}\n")
        log = asyncio.run(scenario(file))
    name = tmp_path.name
    assert sorted(one.titles()) == sorted(
        f"{name}: {what}"
        for what in (
            "replica-0 died",
            "replica-0 is ready again",
            "step 1 is not finite",
            "success collapsed at step 1",
            "the run ended with an error",
        )
    )
    by_title = {message["title"].split(": ")[1]: message for message in one.got}
    assert by_title["the run ended with an error"]["message"] == "RuntimeError: no memory"
    assert by_title["step 1 is not finite"]["type"] == "failure"
    assert by_title["success collapsed at step 1"]["message"].endswith("100.0% at best.")
    assert log.count("alert: ") == 5 and "did not reach" not in log


def test_a_run_that_its_user_stops_is_no_alert(tmp_path: Path) -> None:
    async def scenario(error: BaseException) -> None:
        with pytest.raises(type(error)):
            async with Watched(tmp_path, None, alerts=(one.address,)).monitor:
                raise error

    with receiver() as one:
        asyncio.run(scenario(Interrupted()))
        asyncio.run(scenario(asyncio.CancelledError()))
        assert one.got == []
        asyncio.run(scenario(ValueError("x")))
        assert one.titles() == [f"{tmp_path.name}: the run ended with an error"]


def alert(number: int = 0) -> Alert:
    return Alert(title=f"event {number}", text="It happened.")


def test_a_failure_is_said_once_without_the_password(tmp_path: Path) -> None:
    said: list[str] = []

    async def scenario() -> None:
        sender = AlertSender([one.address], "run", say=said.append)
        for number in range(3):
            sender.send(alert(number))
        await sender.close()

    with receiver(status=500) as one:
        asyncio.run(scenario())
    assert len(one.got) == 3 and len(said) == 1
    assert "did not reach json://user:****@127.0.0.1" in said[0] and "event" in said[0]
    assert "secretword" not in said[0]


def test_a_service_that_hangs_costs_its_limit_at_the_end_and_nothing_before() -> None:
    said: list[str] = []

    async def scenario() -> float:
        sender = AlertSender([one.address], "run", say=said.append, limit_s=0.5)
        for number in range(20):
            sender.send(alert(number))
        await until(lambda: len(one.got) == 8)  # no more threads than that
        holding = [t for t in threading.enumerate() if not t.daemon and t not in before]
        assert holding == []  # the interpreter would wait for them at its end
        begin = time.monotonic()
        await sender.close()
        return time.monotonic() - begin

    with receiver() as one:
        before = threading.enumerate()
        one.release.clear()
        assert asyncio.run(scenario()) < 30  # the receiver would hold it for 60
        assert len(one.got) == 8
    assert len(said) == 1


def test_addresses_that_cannot_be_used_are_refused_without_their_password(tmp_path: Path) -> None:
    def make(address: str) -> None:
        AlertSender([address], "run", say=print)

    with pytest.raises(ValueError, match=r"--monitor.alerts nonsense://\.\.\.: apprise") as error:
        make("nonsense://user:secretword@host")
    assert "secretword" not in str(error.value)
    with pytest.raises(ValueError, match=r"neither an address .* nor a file that can be read"):
        make(str(tmp_path / "missing"))
