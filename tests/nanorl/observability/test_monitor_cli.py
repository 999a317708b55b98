"""`nanorl status` and `nanorl scale` as a user runs them, beside a run with a monitor."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from monitor_doubles import PaperCluster, Watched

from nanorl import cli
from nanorl.observability.monitor.monitor_access import MonitorAccess


def command(folder: Path, *lines: str, monitored: bool = True) -> list[int]:
    """The exit statuses of commands given one after another while a run with a monitor goes on;
    RUN in a line is its folder."""

    async def scenario() -> list[int]:
        watched = Watched(folder, PaperCluster(), **({"port": 0} if monitored else {}))
        async with watched.monitor as monitor:
            monitor.begin_phase("rl")
            monitor.observe_step(11, {"success": 0.5}, [])
            return [
                await asyncio.to_thread(cli.main, line.replace("RUN", str(folder)).split())
                for line in lines
            ]

    return asyncio.run(scenario())


def test_status_shows_the_run_and_its_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "status --run RUN") == [0]
    shown = capsys.readouterr().out
    assert "phase rl, step 11 is done" in " ".join(shown.split())
    assert [line.split()[:2] for line in shown.splitlines()[-2:]] == [
        ["policy-0", "ready"],
        ["replica-0", "ready"],
    ]


def test_status_for_programs_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, "status --run RUN --as-json") == [0]
    assert json.loads(capsys.readouterr().out)["metrics"] == {"success": 0.5}


def test_scale_adds_and_removes_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "scale --run RUN --replicas 2",
        "scale --run RUN --add http://gpu3:8000",
        "scale --run RUN --remove replica-0",
    )
    assert command(tmp_path, *lines) == [0, 0, 0]
    last = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in last] == ["policy-0", "replica-1", "external-3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("scale --run RUN --replicas -2", "replicas: Input should be greater than or equal to 0"),
        ("scale --run RUN --replicas 9", "replicas=9: must be 1 to 3, there are 3 cores"),
        ("scale --run RUN --remove replica/9", "no replica is called 'replica/9'; there is: rep"),
        ("scale --run RUN --add http://nobody:1", "no answer from there: "),
        ("scale --run RUN", "give one of --replicas, --add and --remove"),
        ("scale --run RUN --replicas 1 --remove x", "give one of --replicas, --add and --remove"),
        ("status --run RUN/other", "monitor.json does not exist: no run with a monitor"),
    ],
)
def test_a_wrong_command_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert command(tmp_path, line) == [2]
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_run_that_was_killed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it must not be asked
    assert command(tmp_path, "status --run RUN") == [0]
    MonitorAccess(url="http://127.0.0.1:9", token="t", pid=1).write(tmp_path)
    assert cli.main(["status", "--run", str(tmp_path)]) == 2
    assert "does not answer (" in capsys.readouterr().err
    (tmp_path / "monitor.json").write_text("{")
    assert cli.main(["status", "--run", str(tmp_path)]) == 2
    assert "monitor.json is damaged" in capsys.readouterr().err


def test_the_command_starts_without_torch() -> None:
    text = "import sys; import nanorl.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
