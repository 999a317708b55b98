"""Signals, a second process and missing files at awkward moments: nothing is lost or mixed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ROOT, SMALL, RunProcess, Slow, rows

from nanoengine.command_line import program
from nanoengine.state.checkpoint import list_checkpoints, open_checkpoint
from nanoengine.state.run_folder import RunFolder
from nanoengine.stop_signals import ANSWERS
from nanorl.cli import main
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.envs.tasks.readers import read_tasks
from nanorl.envs.tasks.source import ListTasks
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.store import RolloutStore
from nanorl.run.failed_start import WRITTEN
from nanorl.run.trainer import Trainer
from nanorl.sandbox.base import SandboxUnavailable

sandboxed = pytest.mark.sandbox
WEIGHTS = "model-trained/model.safetensors"


def tasks_of(answers: list[int]) -> str:
    return "\n".join(
        json.dumps({"prompt": f"What is {n} + {n}?", "answer": answer})
        for n, answer in enumerate(answers)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs, on tasks of a file beside it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "tasks.jsonl").write_text(tasks_of([2 * n for n in range(24)]))
    run = RunProcess(folder / "log", *on_tasks(folder), "--out", str(folder / "run"))
    assert run.wait() == 0, run.output()
    return folder / "run"


def on_tasks(folder: Path) -> tuple[str, ...]:
    return (*SMALL, "--tasks", str(folder / "tasks.jsonl"))


def train(*arguments: str) -> None:
    """In this process."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import train_agent
    finally:
        sys.path.pop(0)
    train_agent.train(train_agent.parse_arguments(list(arguments)))


def stands_at(run: Path) -> tuple[str, int]:
    cursor = open_checkpoint(run / "checkpoints").meta["cursor"]
    return cursor["phase"], cursor["step"]


def interrupt(run: RunProcess, marker: Path, times: int) -> None:
    """Press Ctrl-C so often while the optimizer step behind the marker is under way, each time when
    the one before has been answered: two that meet in the process would be one. Then the step goes
    on."""
    run.await_file(marker)
    for answer in ANSWERS[:times]:
        run.signal()
        run.await_true(lambda answer=answer: answer in run.output())  # type: ignore[misc]
    marker.unlink()


@sandboxed
def test_a_run_interrupted_in_three_optimizer_steps_ends_with_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    model = ("--model", str(whole / "model"))  # the same one: made once
    fresh = (*on_tasks(whole.parent), *model, "--out", str(out))
    resume = ("--resume", "--out", str(out))

    # twice in a step of the warm start
    slow = Slow(update=2, seconds=240, marker=tmp_path / "warm")
    run = RunProcess(tmp_path / "log1", *fresh, slow=slow)
    interrupt(run, slow.marker, times=2)
    assert run.wait() == 130, run.output()
    assert f"stopped and saved; go on with: {program()} train --resume --out {out}" in (
        run.output()
    )
    assert stands_at(out) == ("warm_start", 2)

    # twice in a step of RL: update 1 is the last of the warm start
    slow = Slow(update=2, seconds=240, marker=tmp_path / "rl")
    run = RunProcess(tmp_path / "log2", *resume, slow=slow)
    interrupt(run, slow.marker, times=2)
    assert run.wait() == 130, run.output()
    assert stands_at(out) == ("rl", 1)

    # three times: at once, unsaved; while it lives, no other process may touch the folder
    slow = Slow(update=1, seconds=240, marker=tmp_path / "third")
    run = RunProcess(tmp_path / "log3", *resume, slow=slow)
    run.await_file(slow.marker)
    for arguments in (resume, fresh):
        with pytest.raises(ValueError, match=f"in use by another process .pid {run.process.pid}."):
            train(*arguments)
    interrupt(run, slow.marker, times=3)
    assert run.wait() == 130, run.output()
    assert stands_at(out) == ("rl", 1)

    # to the end, with options that change nothing that is computed
    free = ("--threads", "2", "--tool.workers", "2", "--keep-rollout-steps", "1")
    run = RunProcess(tmp_path / "log4", *resume, *free)
    assert run.wait() == 0, run.output()
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert [row[name] for row in rows(out)] == [row[name] for row in rows(whole)], name
    assert all(row["grad_norm"] > 0 for row in rows(whole))
    assert {folder.name for folder in list_checkpoints(whole / "checkpoints")} == {
        "step_00000000",  # before RL
        "step_00000003",  # after it: its last step is saved once
    }
    for folder, steps in ((whole, {0, 1, 2}), (out, {2})):
        with RolloutStore(folder / "rollouts.sqlite") as store:
            assert {entry.step for entry in store.entries()} == steps
    assert "rollouts.sqlite holds 4 of training" in (out / "report.html").read_text()


def be_stopped_twice() -> None:
    """A run whose first step brings Ctrl-C, and whose end SIGTERM."""
    step, close = Trainer._step, InlineRoles.close

    @wraps(step)
    async def interrupted(self: Trainer, *args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        await step(self, *args)

    @wraps(close)
    def terminated(self: InlineRoles) -> None:
        signal.raise_signal(signal.SIGTERM)
        close(self)

    Trainer._step, InlineRoles.close = interrupted, terminated  # type: ignore[method-assign]


@sandboxed
def test_a_signal_that_comes_when_a_stopped_run_has_saved_does_not_cut_its_end_short(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = (*on_tasks(whole.parent), "--model", str(whole / "model"), "--out", str(out))
    run = RunProcess(tmp_path / "log", *given, prepare=be_stopped_twice)
    assert run.wait() == 130, run.output()
    assert f"stopped and saved; go on with: {program()} train --resume" in run.output()
    assert [run.output().count(answer) for answer in ANSWERS] == [1, 1, 0]


@sandboxed
def test_evaluations_of_a_run_are_kept_apart_and_can_be_compared_with_others(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = Evaluation.read(whole / "eval-after.json")
    summary = json.loads((whole / "summary.json").read_text())
    assert after.success.value == summary["heldout_success_after"]
    assert len(after.scores) == summary["heldout_n"] > 0
    with RolloutStore(whole / "evaluations.sqlite") as store:
        kept = [e.task_id for e in store.entries() if e.rollout_id.startswith("eval-after-")]
    assert sorted(kept) == sorted(score.task_id for score in after.scores)
    with RolloutStore(whole / "rollouts.sqlite") as store:
        assert not any(entry.rollout_id.startswith("eval") for entry in store.entries())

    num, out = len(after.scores), tmp_path / "again"
    arguments = ["eval", str(whole), "--num-tasks", str(num), "--k", "2", "--out", str(out)]
    assert main(arguments) == 0
    assert f"{num} held-out tasks, played 2 times each" in capsys.readouterr().out
    again = Evaluation.read(out / "eval.json")
    assert again.about["model"] == str(whole / "model-trained")
    assert {score.task_id for score in again.scores} == set(kept)
    with RolloutStore(out / "rollouts.sqlite") as store:
        assert len(store) == 2 * num
        assert len({tuple(rollout.tokens) for rollout in store.query()}) > num, "samples differ"
    assert main(arguments) == 2
    assert "it is not empty" in capsys.readouterr().err

    assert main(["compare", f"{whole}:before", str(whole), str(out), "--as-json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["old"], one["new"]) == (f"{whole} (before RL)", f"{whole} (after RL)")
    assert two["num_common"] == min(num, len(Evaluation.read(whole / "eval-before.json").scores))


@sandboxed
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("checkpoints", "model-trained"))
    with pytest.raises(ValueError, match=r"holds no checkpoint, but .* 12 rollouts"):
        train("--resume", "--out", str(run))
    assert len(rows(run)) == 3
    with RolloutStore(run / "rollouts.sqlite") as store:
        assert len(store) == 12


@sandboxed
def test_a_run_is_not_resumed_on_other_tasks(whole: Path) -> None:
    file = whole.parent / "tasks.jsonl"
    before = file.read_text()
    try:
        file.write_text(tasks_of([2 * n for n in range(23)] + [47]))
        with pytest.raises(ValueError, match="its tasks are not those that this run began with"):
            train("--resume", "--out", str(whole))
    finally:
        file.write_text(before)
    assert len(rows(whole)) == 3


def test_the_fingerprint_of_tasks_is_of_their_content_and_order(tmp_path: Path) -> None:
    lines = tasks_of(list(range(24))).splitlines()

    def fingerprint(*texts: str) -> str:
        file = tmp_path / "tasks.jsonl"
        file.write_text("\n".join(texts))
        return ListTasks(read_tasks(file), seed=0).fingerprint

    as_written = fingerprint(*lines)
    assert fingerprint("", *lines, "", "") == as_written
    assert fingerprint(*(line.replace(": ", ":") for line in lines)) == as_written
    assert fingerprint(*lines[:-1], lines[-1].replace("23}", "24}")) != as_written
    assert fingerprint(*reversed(lines)) != as_written


@sandboxed
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere"), "no such folder"),
        (("--tasks", "/nowhere.jsonl"), "does not exist"),
        (("--rl.algorithm.kl-coef", "0.1", "--rl.reference", "/nowhere"), "no such folder"),
    ],
)
def test_bad_options_leave_nothing_on_the_disk(
    whole: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    for out in (tmp_path / "runs" / "deep" / "run", tmp_path / "mine"):
        with pytest.raises(ValueError, match=message):
            train(*SMALL, "--model", str(whole / "model"), *arguments, "--out", str(out))
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_a_model_made_for_a_run_that_did_not_begin_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert list(tmp_path.rglob("model.safetensors"))
        raise SandboxUnavailable("no namespaces", "allow them")

    monkeypatch.setattr("nanorl.options.agent_kit.run_sandbox", refuse)
    with pytest.raises(SandboxUnavailable):
        train(*SMALL, "--out", str(tmp_path / "runs" / "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["summary.json", "model-trained", "report.html", "eval-x.json"])
def test_a_folder_that_is_no_run_is_not_written_over(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / name).write_text("mine")
    with pytest.raises(ValueError, match=f"--out .*theirs: holds {name}, which a run would over"):
        train(*SMALL, "--out", str(theirs))
    assert [(one.name, one.read_text()) for one in theirs.iterdir()] == [(name, "mine")]
    (theirs / name).rename(theirs / "notes.txt")  # a run beside a log or notes harms nobody
    with RunFolder(theirs, is_resumed=False, written=WRITTEN):
        pass
    assert [one.name for one in theirs.iterdir()] == ["notes.txt"]


def test_a_folder_whose_name_no_model_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--out .*: the name is not UTF-8"):
        RunFolder(tmp_path / os.fsdecode(b"caf\xe9"), is_resumed=False)
    assert not list(tmp_path.iterdir())


def hold(path: Path, connection: Connection) -> None:
    with RunFolder(path, is_resumed=False) as folder:
        folder.begin({})
        connection.send("locked")
        connection.recv()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[multiprocessing.Process]:
    """A process that has begun a run in tmp_path/run and does not leave it."""
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "run", its))
    process.start()
    assert mine.recv() == "locked"
    yield process
    process.kill()


def test_a_folder_belongs_to_one_process_until_it_dies(
    tmp_path: Path, holder: multiprocessing.Process
) -> None:
    run = tmp_path / "run"
    for is_resumed in (False, True):
        with pytest.raises(ValueError, match=f"in use by another process .pid {holder.pid}."):
            RunFolder(run, is_resumed=is_resumed)
    assert sorted(os.listdir(run)) == ["config.json", "lock"]
    holder.kill()
    holder.join()
    RunFolder(run, is_resumed=True).close()
    with pytest.raises(ValueError, match="already holds a run"):
        RunFolder(run, is_resumed=False)
    assert sorted(os.listdir(run)) == ["config.json", "lock"]
