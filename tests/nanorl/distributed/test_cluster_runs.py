"""Whole runs on processes: where a role runs, how many there are and how weights travel never
changes what is computed.

`plain` and `rich` are runs of one process. Every other run here has to end like one of them, bit
for bit; where a layout adds in another order, or time decides (staleness), what must hold is said.
The gradients of layouts: test_layouts.py. Deaths: test_faults.py.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ROOT, SMALL, RunProcess, Slow, rows
from paced_run import Pace
from run_outcomes import differences, rollouts
from serving import KEY, serve

from nanoengine.optim import DTYPES
from nanorl import cli
from nanorl.distributed.roles.replica_role import ReplicaRecipe
from nanorl.observability.store import RolloutStore
from nanorl.options.parts import Parts
from nanorl.options.run_config import RunConfig

pytestmark = pytest.mark.sandbox
# A penalty for length gives rollouts that solve nothing advantages that differ.
GRADED = ("--agent.max-context-tokens", "48", "--rl.algorithm.overlong-buffer", "40")
PLAIN = (*SMALL, *GRADED, "--rl.group-size", "4")
# With a reference, a critic, several steps over a batch, and the ratios that these need.
RICH = (
    *(*PLAIN, "--dtype", "bf16", "--algorithm", "ppo", "--rl.algorithm.kl-coef", "0.05"),
    *("--rl.epochs", "2"),
)
LOCAL = ("--cluster.backend", "local")
INLINE = ("--cluster.backend", "inline", "--rollout.replicas", "1")
FIRST_RL_UPDATE = 4  # after the three of the warm start
LONG = 24  # steps of the runs that are changed while they train
Start = Callable[..., RunProcess]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """The model that all runs start with, made once."""
    config = parsed(*SMALL, "--out", str(folder / "maker"))
    return Parts(config).folder


@pytest.fixture
def start(folder: Path, model: Path) -> Iterator[Start]:
    """Starts a run called `name`; none outlives the test."""
    started: list[RunProcess] = []

    def start(
        name: str, *arguments: str, slow: Slow | None = None, pace: Pace | None = None
    ) -> RunProcess:
        fresh = ("--model", str(model)) if "--resume" not in arguments else ()
        log, out = folder / f"{name}.log", ("--out", str(folder / name))
        prepare = None if pace is None else pace.keep
        run = RunProcess(log, *arguments, *fresh, *out, slow=slow, prepare=prepare)
        started.append(run)
        return run

    yield start
    for run in started:
        run.process.kill()
        run.process.join()


def finish(run: RunProcess) -> None:
    assert run.wait() == 0, run.output()


def stop(run: RunProcess, slow: Slow) -> None:
    """Ctrl-C in the slow step; it is the last one that the run makes."""
    run.await_file(slow.marker)
    run.signal()
    run.await_true(lambda: "stopping after this step" in run.output())
    slow.marker.unlink()
    assert run.wait() == 130, run.output()


@pytest.fixture(scope="module")
def inline(folder: Path, model: Path) -> dict[str, Path]:
    """The runs of one process, by name."""
    cases = {"plain": PLAIN, "rich": RICH, "long": (*PLAIN, "--rl.steps", str(LONG))}
    started = {
        name: RunProcess(
            folder / f"{name}.log", *arguments, "--model", str(model), "--out", str(folder / name)
        )
        for name, arguments in cases.items()
    }
    for run in started.values():
        finish(run)
    return {name: folder / name for name in cases}


def train_agent() -> Any:
    """The command's module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("train_agent")
    finally:
        sys.path.pop(0)


def parsed(*arguments: str) -> RunConfig:
    return train_agent().parse_arguments(list(arguments))


def test_the_runs_of_one_process_learn_from_rewards(inline: dict[str, Path]) -> None:
    """Else what follows would compare little."""
    plain, rich = rows(inline["plain"]), rows(inline["rich"])
    # The entropy bonus alone, without advantages, gives gradients below 0.01.
    assert all(row["grad_norm"] > 0.1 for row in plain + rich)
    assert all(row["value_loss"] > 0 and row["ratio"] != 1.0 for row in rich)
    assert rich[-1]["ref_kl"] > 0
    assert differences(inline["plain"], inline["rich"])


@pytest.mark.parametrize(
    ("like", "options"),
    [
        ("plain", ("--cluster.transport", "shm")),
        ("plain", ("--rollout.replicas", "3", "--cluster.transport", "dist")),
        ("plain", ("--cluster.placement", "colocated", "--cluster.transport", "disk")),
        ("rich", ("--rollout.replicas", "3", "--cluster.transport", "disk", "--cluster.delta")),
    ],
    ids=["one-replica", "three-dist", "colocated-disk", "rich-three-delta"],
)
def test_a_run_on_processes_ends_with_the_same_bits(
    inline: dict[str, Path], start: Start, folder: Path, like: str, options: tuple[str, ...]
) -> None:
    name = "-".join(("local", *(option.strip("-") for option in options)))
    finish(start(name, *(RICH if like == "rich" else PLAIN), *LOCAL, *options))
    assert differences(folder / name, inline[like]) == []


def test_a_run_on_ray_ends_with_the_same_bits(
    inline: dict[str, Path], start: Start, folder: Path
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    finish(start("ray", *PLAIN, "--cluster.backend", "ray", "--rollout.replicas", "2"))
    assert differences(folder / "ray", inline["plain"]) == []


def test_a_run_goes_on_in_another_back_end_and_ends_with_the_same_bits(
    inline: dict[str, Path], start: Start, folder: Path
) -> None:
    """Inline, stopped in its first RL step; on processes, stopped in the second; inline again."""
    slow = Slow(update=FIRST_RL_UPDATE, seconds=60, marker=folder / "first.marker")
    stop(start("moved", *RICH, slow=slow), slow)
    slow = Slow(update=1, seconds=60, marker=folder / "second.marker")
    local = (*LOCAL, "--rollout.replicas", "2")
    stop(start("moved", "--resume", *local, slow=slow), slow)
    assert len(rows(folder / "moved")) == 2
    finish(start("moved", "--resume", *INLINE))
    assert differences(folder / "moved", inline["rich"]) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--learner.dp", "2", "--learner.zero", "2"),
        ("--learner.tp", "2", "--rollout.tp", "2"),
        ("--learner.pp", "2"),
    ],
    ids=["dp2-zero2", "tp2-rollout-tp2", "pp2"],
)
def test_a_split_trainer_trains_what_the_replicas_sample_with(
    start: Start, folder: Path, options: tuple[str, ...]
) -> None:
    """Weights that were put together wrongly would give rollouts other log-probs."""
    name = "split" + "".join(options)
    finish(start(name, *PLAIN, *LOCAL, *options))
    for row in rows(folder / name):
        assert row["logp_gap_tokens"] > 0 and row["logp_gap_max"] < 1e-4
        assert row["grad_norm"] > 0 and row["num_rollouts"] == 8


def test_rollouts_go_on_while_the_learner_trains_and_say_their_versions(
    start: Start, folder: Path
) -> None:
    options = ("--rl.max-staleness", "1", "--rl.steps", "6", "--save-every", "1")
    slow = Slow(update=FIRST_RL_UPDATE + 2, seconds=60, marker=folder / "stale.marker")
    local = (*LOCAL, "--rollout.replicas", "2")
    run = start("stale", *PLAIN, *options, *local, slow=slow)
    stop(run, slow)
    assert len(rows(folder / "stale")) == 3
    finish(start("stale", "--resume"))
    ages = set()
    with RolloutStore(folder / "stale" / "rollouts.sqlite") as store:
        entries = store.entries()
        assert len(entries) == len({entry.rollout_id for entry in entries}) == 6 * 8
        for entry in entries:
            rollout = store.get(entry.rollout_id)
            for version, is_sampled in zip(rollout.versions, rollout.loss_mask, strict=True):
                assert (version >= 0) == bool(is_sampled)
                ages |= {entry.step - version} if is_sampled else set()
    assert ages == {0, 1}
    assert max(row["staleness_max"] for row in rows(folder / "stale")) == 1


# -- elastic -------------------------------------------------------------------------------------


def status(run: Path) -> dict[str, Any]:
    """What the monitor of a run says; {} while there is none."""
    try:
        access = json.loads((run / "monitor.json").read_text())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        key = {"Authorization": f"Bearer {access['token']}"}
        request = urllib.request.Request(access["url"] + "/status", headers=key)
        with opener.open(request, timeout=30) as response:
            return json.load(response)
    except (OSError, ValueError):
        return {}


def scale(run: Path, *arguments: str) -> None:
    assert cli.main(["scale", "--run", str(run), *arguments]) == 0


def replicas(run: Path) -> list[str]:
    return [role["name"] for role in status(run)["roles"] if role["kind"] == "replica"]


WATCHED = ("--monitor.port", "0", "--cluster.heartbeat-s", "0.1")


def test_replicas_come_and_go_while_a_run_trains(
    inline: dict[str, Path],
    start: Start,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One goes while it holds a request, which a newcomer then serves with the current weights."""
    run, pace = folder / "elastic", Pace(folder / "elastic.pace")
    held = Slow(update=22, seconds=60, marker=folder / "held.marker", is_request=True)
    many = ("--rl.steps", str(LONG))
    pace.allow(LONG)
    process = start("elastic", *PLAIN, *LOCAL, *WATCHED, *many, slow=held, pace=pace)
    process.await_file(held.marker)
    num_done = len(rows(run))
    assert num_done > 0
    pace.allow(num_done + 1)  # the step that waits for what is held, and no other
    scale(run, "--replicas", "3")
    assert replicas(run) == ["replica-0", "replica-1", "replica-2"]
    scale(run, "--remove", "replica-0")
    scale(run, "--replicas", "3")
    assert replicas(run) == ["replica-1", "replica-2", "replica-3"]
    pace.allow(num_done + 3)
    process.await_true(lambda: status(run).get("metrics", {}).get("num_replicas") == 3)
    scale(run, "--replicas", "1")
    assert replicas(run) == ["replica-1"]
    counters = next(role for role in status(run)["roles"] if role["kind"] == "collector")["metrics"]
    assert counters["num_finished_total"] > 8 * num_done
    assert counters["num_failed_total"] == 0
    assert cli.main(["scale", "--run", str(run), "--replicas", "0"]) == 2
    assert "replicas=0: at least one" in capsys.readouterr().err
    pace.allow(LONG)
    finish(process)
    assert differences(run, inline["long"]) == []
    metrics = rows(run)
    numbers = [row["num_replicas"] for row in metrics]
    assert (numbers[0], max(numbers), numbers[-1]) == (1, 3, 1)
    assert all(row["rollout_tokens_per_s"] > 0 for row in metrics)
    report = (run / "report.html").read_text()
    assert "Replicas" in report and "Rollout speed" in report


def test_a_server_that_somebody_else_started_serves_a_run(
    inline: dict[str, Path], start: Start, folder: Path, model: Path
) -> None:
    run, key, pace = folder / "served", folder / "key", Pace(folder / "served.pace")
    key.write_text(KEY)
    pace.allow(7)
    options = parsed(*PLAIN, "--model", str(model), "--out", str(run))
    recipe = ReplicaRecipe(
        folder=model, dtype=DTYPES[options.dtype], infer=Parts(options).infer_config()
    )
    with serve(recipe.make(), weights_root=run / "weights") as served:
        address = f"http://127.0.0.1:{served.port}"
        slow = Slow(update=FIRST_RL_UPDATE + 3, seconds=60, marker=folder / "handed.marker")
        process = start(
            "served",
            *(*PLAIN, *LOCAL, *WATCHED, "--rl.steps", str(LONG), "--cluster.transport", "disk"),
            *("--rollout.addresses", address, "--rollout.api-key-file", str(key)),
            slow=slow,
            pace=pace,
        )
        process.await_file(slow.marker)
        assert served.engine.metrics()["sampled_tokens"] > 0
        assert served.engine.version == 3
        scale(run, "--remove", "server-1")
        assert replicas(run) == ["replica-0"]
        before = served.engine.metrics()
        slow.marker.unlink()
        process.await_true(lambda: status(run).get("step", -1) >= 6)
        assert served.engine.metrics() == before
        scale(run, "--add", address)
        assert replicas(run) == ["replica-0", "server-2"]
        pace.allow(LONG)
        process.await_true(
            lambda: served.engine.metrics()["sampled_tokens"] > before["sampled_tokens"]
        )
        finish(process)
        assert served.engine.version == LONG
    assert differences(run, inline["long"]) == []
    assert len(rollouts(run)) == 8 * LONG


# -- what a user meets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*LOCAL, "--learner.tp", "3"), "tp=3: must divide num_heads=4"),
        ((*LOCAL, "--rollout.tp", "3"), "tp=3: must divide num_heads=4"),
        ((*LOCAL, "--learner.ep", "2"), "the model has no experts to split"),
        ((*LOCAL, "--learner.pp", "9"), "more stages than the 3 layers"),
        ((*LOCAL, "--rollout.addresses", "http://127.0.0.1:9"), "no nanoinfer.server that can be"),
        ((*LOCAL, "--rollout.addresses", "here"), "must look like http"),
        (
            (*LOCAL, "--rollout.addresses", "http://h:1", "--rollout.api-key-file", "/no"),
            "--rollout.api-key-file /no: cannot be read",
        ),
        (("--cluster.backend", "ray"), "needs Ray; run: "),
        # of the options alone
        (("--learner.dp", "2"), "add --cluster.backend local, or ray"),
        ((*LOCAL, "--rollout.replicas", "0"), "--rollout.replicas 0: must be 1 or more"),
        (("--cluster.transport", "shm"), "add --cluster.backend local, or ray"),
        ((*LOCAL, "--cluster.delta"), "add --cluster.transport disk"),
        (
            (*LOCAL, "--rollout.addresses", "http://h:1", "--cluster.transport", "shm"),
            "set --cluster.transport disk",
        ),
        ((*LOCAL, "--cluster.address", "h:1"), "only --cluster.backend ray joins a cluster"),
    ],
)
def test_what_cannot_be_is_said_before_any_work_is_done(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "nanosched.ray_backend", raising=False)
    before = children()
    said = refused(
        monkeypatch, capsys, *SMALL, "--model", str(model), *options, "--out", f"{tmp_path}/run"
    )
    assert message in said and "Traceback" not in said
    assert not list(tmp_path.iterdir()) and children() == before


def test_a_ray_cluster_that_is_not_there_is_said_at_once(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody else gets this port, and it does not listen
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        ray = ("--cluster.backend", "ray", "--cluster.address", address)
        out = ("--model", str(model), "--out", f"{tmp_path}/run")
        assert "nobody answers there" in refused(monkeypatch, capsys, *SMALL, *ray, *out)


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """What the command says, in this process, when it refuses."""
    monkeypatch.setattr(sys, "argv", ["scripts/train_agent.py", *arguments])
    assert train_agent().main() == 2
    return " ".join(capsys.readouterr().err.split())


def children() -> list[str]:
    """The processes that this one has started."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [pid for file in found for pid in file.read_text().split()]
