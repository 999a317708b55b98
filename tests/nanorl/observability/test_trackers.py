"""`--log`: a real run in each tracker, offline, read back; trackers that fail, hang or are away."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_runs import SMALL, RunProcess, rows

from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.observability.report.metrics import flatten_numbers
from nanorl.observability.store import RolloutStore
from nanorl.observability.trackers import services
from nanorl.observability.trackers.rollout_rows import RolloutRow
from nanorl.observability.trackers.run_spans import RunSpans
from nanorl.observability.trackers.sending import TrackerLine, Trackers, identity_of
from nanorl.observability.trackers.services import TrackedRun, TrackioTracker, require_trackers
from nanorl.options.run_config import RunConfig
from nanosched import SchedulerError

NOWHERE = "http://127.0.0.1:9"  # the port "discard", where nothing listens


def offline(folder: Path) -> dict[str, str]:
    """All that trackers write lies in `folder`, caches of a home among it, and what would leave
    this machine fails."""
    (folder / "home").mkdir()
    return {
        **{name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")},
        "HOME": str(folder / "home"),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # its database needs more than mlflow-skinny
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


@pytest.mark.sandbox
@pytest.mark.rare
def test_a_run_and_its_resumption_are_one_page_in_each_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    out, environment = tmp_path / "run", offline(tmp_path)
    few = (*SMALL, "--rl.steps", "1", "--evaluation.num-tasks-no-tool", "0")
    for more in (
        (*few, "--log", "wandb", "mlflow"),
        ("--resume", "--rl.steps", "2", "--rl.lr", "1e-4"),
    ):
        log = tmp_path / "log"
        process = RunProcess(log, *more, "--out", str(out), environment=environment)
        assert process.wait(300) == 0, process.output()
    assert "not everything reached it" not in process.output()
    identity = identity_of(out)

    [history_of, config_of] = read_wandb(out / "wandb", identity)
    for row in rows(out):
        sent = [found for found in history_of if "loss" in found and found["step"] == row["step"]]
        assert sent and flatten_numbers(row).items() <= sent[-1].items()
    assert config_of["rl.lr"] == 1e-4 and config_of["preset"] == "tiny"
    after = [found for found in history_of if "evaluation/after/success" in found]
    assert [found["step"] for found in after] == [1, 2]
    warm = [found for found in history_of if "warm_start/loss" in found]
    assert [found["warm_start/step"] for found in warm] == [0, 1, 2]
    tables = list(out.glob("wandb/*/files/media/table/rollouts/*.json"))
    wandb_rows = [row for table in tables for row in rows_of(table.read_text())]
    with RolloutStore(out / "rollouts.sqlite") as store:
        stored = {entry.rollout_id: store.get(entry.rollout_id) for entry in store.entries()}
    shown = {row["rollout_id"]: row for row in wandb_rows}
    assert shown.keys() > stored.keys() and "eval-after-0" in shown
    for rollout_id, rollout in stored.items():
        assert shown[rollout_id]["reward"] == rollout.total_reward
        assert shown[rollout_id]["question"] and shown[rollout_id]["expected"]
        assert f"wanted  {shown[rollout_id]['expected']}" in shown[rollout_id]["turns"]
    board_of_the_run(out)

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    client = MlflowClient(environment["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("nanorl")
    [page] = client.search_runs([experiment.experiment_id])
    assert (page.info.status, page.data.tags["nanorl.run"]) == ("FINISHED", identity)
    assert page.data.params["rl.steps"] == "1"  # as it began
    assert page.data.tags["rl.lr.changed"] == "0.0001"
    for name in ("loss", "grad_norm"):
        points = {p.step: p.value for p in client.get_metric_history(page.info.run_id, name)}
        assert points == {row["step"]: row[name] for row in rows(out)}
    files = json.loads(page.data.tags["mlflow.loggedArtifacts"])
    assert {"path": "rollouts/rl-00001.json", "type": "table"} in files
    listed = client.list_artifacts(page.info.run_id, "rollouts")
    assert {file["path"] for file in files} == {file.path for file in listed}
    place = client.download_artifacts(page.info.run_id, "rollouts/rl-00001.json")
    mlflow_rows = {row["rollout_id"]: row for row in rows_of(Path(place).read_text())}
    assert mlflow_rows.keys() == {name for name in stored if name.startswith("s1-")}
    assert all(mlflow_rows[name] == shown[name] for name in mlflow_rows)


def rows_of(table: str) -> list[dict[str, Any]]:
    """The rows of a table that is JSON in columns and data."""
    found = json.loads(table)
    return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]


def board_of_the_run(out: Path) -> None:
    """TensorBoard's own reader finds the warm start, the evaluations and some rollouts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars(part: str, tag: str) -> dict[int, float]:
        events = EventAccumulator(str(out / "tensorboard" / part))
        events.Reload()
        points = [(event.step, event.value) for event in events.Scalars(f"{part}/{tag}")]
        assert len(dict(points)) == len(points), "a step is there once"
        return dict(points)

    assert list(scalars("warm_start", "loss")) == [0, 1, 2]
    assert all(value > 0 for value in scalars("warm_start", "tokens").values())
    assert scalars("warm_start", "lr").keys() == {0, 1, 2}
    summary = json.loads((out / "summary.json").read_text())
    before = scalars("evaluation/before", "success")
    assert before == {0: summary["heldout_success_before"]}
    after = scalars("evaluation/after", "success")
    assert list(after) == [1, 2] and after[2] == summary["heldout_success_after"]
    texts = EventAccumulator(str(out / "tensorboard" / "rollouts"))
    texts.Reload()
    assert texts.Tags()["tensors"]


def read_wandb(folder: Path, identity: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the last options in W&B's files of that run. They are LevelDB logs (blocks of
    32 KiB; records of checksum, length, kind) of its own protocol buffers, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[dict[str, Any]] = []
    options: dict[str, Any] = {}
    for file in sorted(folder.glob(f"offline-run-*/run-{identity}.wandb")):
        data, at, message = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            message += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind not in (1, 4):  # whole, or the last part
                continue
            record = Record.FromString(message)
            message = b""
            if record.HasField("history"):
                found.append(values_of(record.history.item))
            if record.HasField("config"):
                options |= values_of(record.config.update)
    return found, options


def values_of(items: Any) -> dict[str, Any]:
    return {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in items}


@pytest.mark.slow
def test_clearml_has_the_numbers_the_options_and_the_tables_of_a_run_and_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("clearml", reason="needs clearml, of the extra dev")
    for name, value in offline(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    out = tmp_path / "run"
    out.mkdir()
    said: list[str] = []

    async def part(first: int) -> None:
        config = RunConfig(preset="tiny", out=out, log=("clearml",), log_project="p", seed=first)
        async with Trackers(config, str, say=said.append) as trackers:
            trackers.log(0, {"warm_start": {"loss": 2.0}})
            for step in range(first, 2):
                trackers.log(step, {"loss": 1.0 + step, "time": {"wait_s": 0.5}})
            trackers.log_rollouts(1, "rl", [a_row()])

    for first in (0, 1):
        asyncio.run(part(first))
    assert not said
    [folder] = (one for one in (tmp_path / "clearml" / "offline").iterdir() if one.is_dir())
    task = json.loads((folder / "task.json").read_text())
    assert task["name"] == "run" and task["project_name"] == "p"
    assert task["hyperparams"]["options"]["seed"]["value"] == "1"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    sent = [event for line in lines for event in json.loads(line)]
    points = [(e["metric"], e["variant"], e["iter"], e["value"]) for e in sent if "value" in e]
    assert points.count(("loss", "loss", 1, 2.0)) == 2  # the step that was repeated, at its place
    assert ("time", "wait_s", 0, 0.5) in points and ("warm_start", "loss", 0, 2.0) in points
    [table, _] = [event for event in sent if event["metric"] == "rollouts/rl"]
    assert '"a question"' in table["plot_str"] and table["iter"] == 1


def a_row() -> RolloutRow:
    """A rollout as trackers show it."""
    return RolloutRow(
        rollout_id="r",
        task_id="t",
        kind="k",
        question="a question",
        answer="7",
        expected="7",
        reward=1.0,
        status="finished",
        verdict="right",
        num_turns=1,
        num_tokens=3,
        turns="agent   7",
    )


class Broken:
    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.run.project == "hangs":
            time.sleep(600)
        if self.run.project == "dies":
            os._exit(3)
        raise OSError("the network is gone")

    log_rollouts = log  # type: ignore[assignment]

    def finish(self) -> None: ...


class BrokenProcess(services.TrackerProcess):
    """As in a tracker's process, where a patch of this one does not reach."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._tracker = Broken(run)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("project", "why"),
    [("refuses", "the network is gone"), ("hangs", "within 0.5 s"), ("dies", "exited with code 3")],
)
def test_a_tracker_that_fails_is_said_once_and_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str, why: str
) -> None:
    monkeypatch.setattr("nanorl.observability.trackers.sending.TrackerProcess", BrokenProcess)
    config = RunConfig(preset="tiny", out=tmp_path, log=("wandb",), log_project=project)
    said: list[str] = []
    slowest_s = 0.0

    async def run() -> None:
        nonlocal slowest_s
        async with Trackers(
            config, str, say=said.append, finish_s=0.5 if project == "hangs" else 60
        ) as t:
            for step in range(3):
                begin = time.perf_counter()
                t.log(step, {"loss": 1.0})
                slowest_s = max(slowest_s, time.perf_counter() - begin)

    asyncio.run(run())
    assert len(said) == 1 and why in said[0] and said[0].startswith("--log wandb: not everything")
    assert slowest_s < 100  # it would hang for ten minutes


def test_who_does_not_wait_for_a_tracker_leaves_none_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a run ends: the library's process goes on without it."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")

    async def endless(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(TrackerLine, "drain", endless)
    folder = build_tiny_model(tmp_path / "model", seed=0)

    async def leave(observer: Trackers | RunSpans) -> None:
        async with observer:
            asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)  # type: ignore[union-attr]

    for service in ("wandb", "otel"):
        config = RunConfig(preset="tiny", out=tmp_path, log=(service,))
        observer: Any = Trackers(config, str, say=print)
        if service == "otel":
            observer = RunSpans(config, folder, say=print)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(leave(observer))
        with pytest.raises(SchedulerError, match="closed"):
            observer._scheduler.actor(Broken).remote()


def test_without_trackers_nothing_is_started_or_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with Trackers(RunConfig(out=tmp_path), str, say=print) as trackers:
            trackers.log(0, {"loss": 1.0})

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_one_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_trackers(())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--log mlflow needs .*\[mlflow\]'"):
        require_trackers(("mlflow",))


def test_trackio_is_asked_for_one_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a double of its interface: it cannot be installed everywhere."""
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    double = SimpleNamespace(
        init=lambda **options: calls.append(options) or run, Table=lambda dataframe: dataframe
    )
    monkeypatch.setitem(sys.modules, "trackio", double)
    tracker = TrackioTracker(
        TrackedRun(project="p", name="n", identity="0123456789", folder=tmp_path, options={"a": 1})
    )
    tracker.log(3, {"loss": 0.5})
    tracker.finish()
    assert calls[0] == {
        **{"project": "p", "name": "n-012345", "config": {"a": 1}},
        **{"resume": "allow", "embed": False},
    }
    assert calls[1:] == [(3, {"loss": 0.5}), "end"]
