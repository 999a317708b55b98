"""The endpoint of a run: what Prometheus reads, what the control verbs do and refuse."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from monitor_doubles import PaperCluster, Watched, ask, role
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from nanorl.observability.monitor.board import RunBoard
from nanorl.observability.monitor.monitor_access import MonitorAccess
from nanorl.observability.monitor.readings import RoleReadings
from nanorl.options.monitor_config import MonitorConfig
from nanorl.types import Rollout

METRICS = {
    **{"success": 0.25, "reward": 0.5, "grad_norm": float("nan"), "logp_gap_max": 1e-6},
    **{"train_s": 2.0, "rollout_s": 3.0, "sync_s": 0.5, "wait_s": 3.5, "tokens_per_s": 70.0},
}


def rollout(versions: list[int]) -> Rollout:
    count = len(versions)
    return Rollout(
        task_id="t",
        group_id="g",
        rollout_id="r",
        tokens=[1] * count,
        loss_mask=[int(version >= 0) for version in versions],
        logps=[0.0] * count,
        versions=versions,
    )


def samples(text: str, parse=parse_text) -> dict[tuple[str, tuple], float]:
    """{(name, labels): value} of a whole page; a series that occurs twice fails."""
    found: dict[tuple[str, tuple], float] = {}
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "all series of a name must stand together"
    for family in parse(text):
        assert family.documentation, family.name
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def labels(name: str, kind: str, **more: str) -> tuple:
    return tuple(sorted({"role": name, "kind": kind, "host": "here", **more}.items()))


def test_prometheus_reads_run_and_roles_from_one_page(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = PaperCluster()
        cluster.change("replica-0", metrics={"num_waiting": 1.0, "busy_s": 3.0})
        cluster.listed += [
            role(
                *("replica-1", "replica"),
                state="starting",
                restarts=2,
                metrics={
                    **{"num_waiting": 4.0, "tokens_per_s": 812.5, "version": 3.0, "rss_bytes": 9e8},
                    **{"busy_s": 12.0, "tokens_total": 5e4, "cache_use": 0.5, "step_s": 0.125},
                },
            )
        ]
        watched = Watched(tmp_path, cluster, port=0)
        async with watched.monitor as monitor:
            monitor.begin_phase("rl")
            monitor.observe_step(6, METRICS, [rollout([-1, -1, 4, 4, -1, 6]), rollout([6])])
            monitor.observe_step(7, METRICS, [rollout([-1, 7])])
            access = MonitorAccess.read(tmp_path)
            plain = await ask(f"{access.url}/metrics", token=access.token)
            accept = "application/openmetrics-text; version=1.0.0"
            modern = await ask(f"{access.url}/metrics", token=access.token, accept=accept)
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        for found in (
            samples(plain.body.decode()),
            samples(modern.body.decode(), parse_openmetrics),
        ):
            assert found["nanorl_step", ()] == 7
            assert found["nanorl_steps_total", ()] == 2
            assert found["nanorl_policy_version", ()] == 8
            assert found["nanorl_phase", (("phase", "rl"),)] == 1
            assert found["nanorl_train_success", ()] == 0.25
            assert found["nanorl_train_logp_gap_max", ()] == 1e-6
            assert found["nanorl_train_tokens_per_second", ()] == 70
            grad_norm = found["nanorl_train_grad_norm", ()]
            assert grad_norm != grad_norm  # NaN stays NaN
            assert found["nanorl_seconds_total", (("part", "train"),)] == 4
            assert found["nanorl_seconds_total", (("part", "wait"),)] == 7
            # two tokens of age 2, three of age 0
            assert found["nanorl_token_staleness_bucket", (("le", "0.0"),)] == 3
            assert found["nanorl_token_staleness_bucket", (("le", "1.0"),)] == 3
            assert found["nanorl_token_staleness_bucket", (("le", "2.0"),)] == 5
            assert found["nanorl_token_staleness_bucket", (("le", "+Inf"),)] == 5
            assert found["nanorl_token_staleness_count", ()] == 5
            assert found["nanorl_token_staleness_sum", ()] == 4
            assert found["nanorl_role_num_waiting", labels("replica-0", "replica")] == 1
            late = labels("replica-1", "replica")
            assert found["nanorl_role_num_waiting", late] == 4
            assert found["nanorl_role_tokens_per_second", late] == 812.5
            assert found["nanorl_role_version", late] == 3
            assert found["nanorl_role_rss_bytes", late] == 9e8
            assert found["nanorl_role_busy_seconds_total", late] == 12
            assert found["nanorl_role_step_seconds_total", late] == 0.125
            assert found["nanorl_role_tokens_total", late] == 5e4
            assert found["nanorl_role_restarts_total", late] == 2
            assert found["nanorl_role_idle_ratio", late] == 1
            assert found["nanorl_role_restarts_total", labels("policy-0", "policy")] == 0
            by_state = {
                state: found["nanorl_role_state", labels("replica-1", "replica", state=state)]
                for state in ("starting", "ready", "draining", "dead")
            }
            assert by_state == {"starting": 1, "ready": 0, "draining": 0, "dead": 0}
            assert found["process_resident_memory_bytes", ()] > 1e6

    asyncio.run(scenario())


def test_the_idle_share_is_what_a_role_did_not_work_between_two_steps() -> None:
    now_s = 0.0
    board = RunBoard(clock=lambda: now_s)
    board.observe_roles([role("a", metrics={"busy_s": 5.0}), role("b")])
    assert board.idle == {}
    now_s = 10.0
    board.observe_roles([role("a", metrics={"busy_s": 12.5}), role("c", metrics={"busy_s": 1.0})])
    assert board.idle == {"a": pytest.approx(0.25)}
    now_s = 20.0
    board.observe_roles([role("a", metrics={"busy_s": 0.5}), role("c", metrics={"busy_s": 99.0})])
    assert board.idle == {"c": 0.0}  # a was restarted; c says more than there is


def test_readings_add_what_the_answers_of_a_role_imply() -> None:
    now_s = 0.0
    cluster = PaperCluster()
    readings = RoleReadings(cluster, lambda: now_s)
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    cluster.listed = [role("replica-0", **here), role("b", pid=os.getpid(), host="elsewhere")]

    def answer(at_s: float, **metrics: float) -> dict[str, float]:
        nonlocal now_s
        now_s = at_s
        cluster.change("replica-0", metrics=metrics)
        return dict(readings.roles()[0].metrics)

    first = answer(0.0, sampled_tokens=100.0, step_s=4.0)
    assert first.pop("rss_bytes") > 1e6
    assert first == {"sampled_tokens": 100.0, "step_s": 4.0, "busy_s": 4.0}
    assert answer(5.0, sampled_tokens=600.0)["tokens_per_s"] == 100
    assert answer(6.0, sampled_tokens=600.0)["tokens_per_s"] == 100  # the same answer as before
    assert answer(15.0, sampled_tokens=1600.0)["tokens_per_s"] == 100
    assert answer(31.0, sampled_tokens=1600.0)["tokens_per_s"] == 0
    assert "tokens_per_s" not in answer(40.0, sampled_tokens=10.0)  # restarted
    assert answer(41.0, sampled_tokens=20.0, tokens_per_s=7.0, rss_bytes=5.0) == {
        **{"sampled_tokens": 20.0, "tokens_per_s": 7.0, "rss_bytes": 5.0}  # its own word stands
    }
    assert readings.roles()[1].metrics == {}  # a process of that number on another machine


def test_the_verbs_change_the_cluster_and_answer_with_the_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = PaperCluster()
        async with Watched(tmp_path, cluster, port=0).monitor as monitor:
            url, token = (access := MonitorAccess.read(tmp_path)).url, access.token
            names = lambda answer: [r["name"] for r in answer.json["roles"]]  # noqa: E731
            three = await ask(f"{url}/scale", "POST", {"replicas": 3}, token)
            assert (three.status, len(names(three))) == (200, 4)
            added = await ask(f"{url}/replicas", "POST", {"address": "http://gpu3:8000"}, token)
            assert added.json["name"] == "external-4" and "external-4" in names(added)
            gone = await ask(f"{url}/replicas/replica-1", "DELETE", token=token)
            assert names(gone) == ["policy-0", "replica-0", "replica-2", "external-4"]
            monitor.observe_step(0, METRICS, [])
            state = (await ask(f"{url}/status", token=token)).json
            assert state["step"] == 0 and state["phase"] == "starting"
            assert state["metrics"]["success"] == 0.25
            assert state["metrics"]["grad_norm"] is None  # JSON has no NaN
            assert state["roles"][0]["kind"] == "policy"

    asyncio.run(scenario())


REFUSED = [
    ("POST", "/scale", {"replicas": -1}, 400, "replicas: Input should be greater than or equal"),
    ("POST", "/scale", {"replicas": 9}, 400, "replicas=9: must be 1 to 3"),
    ("POST", "/scale", {"replicas": 0}, 400, "replicas=0: must be 1 to 3"),
    ("POST", "/scale", {"replicas": True}, 400, "replicas: Input should be a valid integer"),
    ("POST", "/scale", {"replicas": 2.5}, 400, "replicas: Input should be a valid integer"),
    ("POST", "/scale", {"replicas": 10**30}, 400, "replicas: "),
    ("POST", "/scale", {"replicas": 2, "now": 1}, 400, "now: unknown field"),
    ("POST", "/scale", {}, 400, "replicas: Field required"),
    ("POST", "/scale", [3], 400, "the body must be a JSON object, not list"),
    ("POST", "/scale", b'{"replicas": ', 400, "the body is not valid JSON"),
    ("POST", "/scale", b'{"replicas": NaN}', 400, "NaN is no JSON"),
    ("POST", "/scale", b"\xff", 400, "the body is not valid JSON"),
    ("POST", "/scale", b"[" * (1 << 17), 413, "longer than the limit"),
    ("POST", "/replicas", {"address": "gpu3:8000"}, 400, "address: 'gpu3:8000' must be http://"),
    ("POST", "/replicas", {"address": "http://[x"}, 400, "Invalid IPv6 URL"),
    ("POST", "/replicas", {"address": "file:///etc/passwd"}, 400, "must be http://HOST:PORT"),
    ("POST", "/replicas", {"address": "http://nobody:1"}, 502, "no answer from there"),
    ("DELETE", "/replicas/replica-9", None, 404, "there is: replica-0"),
    ("DELETE", "/replicas/policy-0", None, 404, "no replica is called 'policy-0'"),
    ("DELETE", "/replicas/", None, 404, "no replica is called ''"),
    ("GET", "/scale", None, 405, "GET /scale: Method Not Allowed"),
    ("POST", "/metrics", {}, 405, "POST /metrics: Method Not Allowed"),
    ("PUT", "/replicas/replica-0", {}, 405, "Method Not Allowed"),
    ("GET", "/nothing", None, 404, "GET /nothing: Not Found"),
]


def test_what_cannot_be_is_refused_with_one_message_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = PaperCluster()
        before = cluster.roles()
        async with Watched(tmp_path, cluster, port=0).monitor:
            access = MonitorAccess.read(tmp_path)
            for method, path, body, status, message in REFUSED:
                answer = await ask(access.url + path, method, body, access.token)
                assert answer.status == status, (method, path, body, answer.body)
                assert message in answer.error, (method, path, body, answer.error)
            wrong = await ask(f"{access.url}/scale", "GET", None, access.token)
            assert wrong.headers["allow"] == "POST"
        assert cluster.roles() == before

    asyncio.run(scenario())


def test_the_key_of_prometheus_reads_and_does_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("of-prometheus\n")
    file.chmod(0o600)

    async def scenario() -> None:
        cluster = PaperCluster()
        before = cluster.roles()
        async with Watched(tmp_path, cluster, port=0, api_key_file=file).monitor:
            url = MonitorAccess.read(tmp_path).url
            for path in ("/metrics", "/status"):
                assert (await ask(url + path, token="of-prometheus")).status == 200
                assert (await ask(url + path, token="of-prometheu")).status == 401
            answer = await ask(f"{url}/scale", "POST", {"replicas": 2}, "of-prometheus")
            assert answer.status == 401
        assert cluster.roles() == before

    asyncio.run(scenario())


def test_everything_needs_the_token_and_web_pages_read_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        cluster = PaperCluster()
        before = cluster.roles()
        async with Watched(tmp_path, cluster, port=0).monitor:
            access = MonitorAccess.read(tmp_path)
            for token in (None, "", "wrong", access.token + "x", access.token[:-1], "ü"):
                for method, path, body in (
                    ("POST", "/scale", {"replicas": 2}),
                    ("POST", "/replicas", {"address": "http://gpu3:8000"}),
                    ("DELETE", "/replicas/replica-0", None),
                    ("GET", "/metrics", None),
                    ("GET", "/status", None),
                ):
                    answer = await ask(access.url + path, method, body, token)
                    assert answer.status == 401 and "token" in answer.error, (token, path)
            for host in ("attacker.example", "router"):
                rebound = await ask(f"{access.url}/status", token=access.token, host=host)
                assert rebound.status == 403
        assert cluster.roles() == before

    asyncio.run(scenario())


def test_monitor_json_is_its_owners_alone_and_goes_with_the_run(tmp_path: Path) -> None:
    file = tmp_path / "monitor.json"
    file.write_text("{}")  # left behind by a run that was killed, readable for everybody
    file.chmod(0o644)

    async def scenario() -> MonitorAccess:
        async with Watched(tmp_path, PaperCluster(), port=0).monitor:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            return MonitorAccess.read(tmp_path)

    access = asyncio.run(scenario())
    assert len(access.token) > 30 and list(tmp_path.iterdir()) == []
    host, port = access.url.removeprefix("http://").split(":")
    with socket.create_server((host, int(port))):  # it is free again
        pass
    with pytest.raises(ValueError, match=r"monitor.json does not exist: .*--monitor.port"):
        MonitorAccess.read(tmp_path)


def test_a_run_ends_well_whatever_became_of_monitor_json(tmp_path: Path) -> None:
    file = tmp_path / "monitor.json"

    async def scenario(text: str | None) -> None:
        async with Watched(tmp_path, PaperCluster(), port=0).monitor:
            file.unlink() if text is None else file.write_text(text)

    for text in (None, "{", "[]", '{"url": "http://x", "token": "another run", "pid": 1}'):
        asyncio.run(scenario(text))
        assert (file.read_text() if file.exists() else None) == text


def test_the_runs_own_signal_handlers_and_loggers_stay(tmp_path: Path) -> None:
    import logging

    async def scenario() -> None:
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        handlers = list(logging.getLogger("uvicorn").handlers)
        async with Watched(tmp_path, PaperCluster(), port=0).monitor:
            await ask(f"{MonitorAccess.read(tmp_path).url}/status")
            during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
            assert during == before
            assert logging.getLogger("uvicorn").handlers == handlers
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_port_that_is_taken_and_a_host_that_is_not_ours_are_named(tmp_path: Path) -> None:
    async def start(**options: object) -> None:
        async with Watched(tmp_path, None, **options).monitor:
            pass

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match=r"--monitor.port \d+: cannot listen on .*in use"),
    ):
        asyncio.run(start(port=taken.getsockname()[1]))
    with pytest.raises(ValueError, match=r"--monitor.host /nowhere: is no address"):
        asyncio.run(start(port=0, host="/nowhere"))
    assert not (tmp_path / "monitor.json").exists()


def test_an_inline_run_has_metrics_and_no_verbs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Watched(tmp_path, None, port=0).monitor as monitor:
            access = MonitorAccess.read(tmp_path)
            monitor.observe_step(0, METRICS, [])
            page = samples((await ask(f"{access.url}/metrics", token=access.token)).body.decode())
            assert page["nanorl_train_reward", ()] == 0.5
            for method, path in (("POST", "/scale"), ("DELETE", "/replicas/x")):
                answer = await ask(access.url + path, method, {"replicas": 2}, access.token)
                assert answer.status == 409 and "--cluster.backend" in answer.error

    asyncio.run(scenario())


def test_a_defect_of_what_is_watched_is_said_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(PaperCluster):
        def roles(self):
            raise KeyError("replica-0")

    async def scenario() -> str:
        watched = Watched(tmp_path, Broken(), port=0)
        async with watched.monitor as monitor:
            for step in range(3):
                monitor.observe_step(step, METRICS, [])
            access = MonitorAccess.read(tmp_path)
            for _ in range(3):
                answer = await ask(f"{access.url}/metrics", token=access.token)
                assert answer.status == 500 and "KeyError: 'replica-0'" in answer.error
        return watched.log

    assert asyncio.run(scenario()).count("cannot see all of the run (KeyError") == 1
    assert caplog.text.count("a request to the monitor failed") == 1


def test_options_are_bounded_and_off_by_default() -> None:
    assert (MonitorConfig().port, MonitorConfig().alerts) == (None, ())
    for options, message in (
        ({"port": -1}, "--monitor.port -1: must be 0 or more"),
        ({"port": 65536}, "--monitor.port 65536: must be at most 65535"),
        ({"stall_minutes": 0.0}, "--monitor.stall-minutes 0.0: must be more than 0"),
        ({"stall_minutes": float("nan")}, "must be a finite number"),
        ({"collapse_steps": 0}, "--monitor.collapse-steps 0: must be 1 or more"),
        ({"api_key_file": Path("x")}, "--monitor.api-key-file x: nothing listens without"),
        ({"host": "0.0.0.0"}, "--monitor.host 0.0.0.0: nothing listens without --monitor.port"),
    ):
        with pytest.raises(ValueError, match=message):
            MonitorConfig(**options)


PROGRAM = """
import asyncio, io, sys
from pathlib import Path
from nanorl.options.monitor_config import MonitorConfig
from nanorl.observability.monitor.readings import RoleReadings
from nanorl.observability.monitor.monitor import RunMonitor
from nanorl.observability.report.live import LiveView

async def run():
    live = LiveView("x", is_live=False)
    async with RunMonitor(MonitorConfig(**{options}), Path({folder!r}), live) as monitor:
        monitor.observe_step(0, {{"success": 1.0}}, [])
        assert len(asyncio.all_tasks()) == 1

blocked = {blocked!r}
if blocked:
    sys.modules[blocked] = None
asyncio.run(run())
print([name for name in ("prometheus_client", "starlette", "apprise") if name in sys.modules])
"""


def run_program(folder: Path, blocked: str = "", **options: object) -> str:
    text = PROGRAM.format(options=json.dumps(options), folder=str(folder), blocked=blocked)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_run_without_its_options_starts_and_imports_nothing(tmp_path: Path) -> None:
    assert run_program(tmp_path).strip() == "[]"


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        ("prometheus_client", {"port": 0}, "[monitor]'"),
        ("apprise", {"alerts": ["json://127.0.0.1"]}, "[alerts]'"),
    ],
)
def test_a_missing_extra_is_one_message(
    tmp_path: Path, missing: str, options: dict, message: str
) -> None:
    said = run_program(tmp_path, missing, **options)
    assert f"needs the package {missing}; run: " in said and message in said
