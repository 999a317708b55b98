"""Runs that go on otherwise, or begin in others: `--resume` with options, `--fork`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ROOT, SMALL, RunProcess, rows

from nanoengine.state.checkpoint import list_checkpoints
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig
from nanorl.options.trust import remember
from nanorl.run.continuation import check_resume, find_origin, read_config
from nanorl.run.history import RunHistory

sys.path[:0] = [str(ROOT / "scripts")]
import train_agent  # noqa: E402

sandboxed = pytest.mark.sandbox
WEIGHTS = "model-trained/model.safetensors"
COMPUTED = ("loss", "grad_norm", "reward", "entropy", "lr")
# With a schedule that falls to 0, the rates would depend on when RL is to end.
OPTIONS = (*SMALL, "--save-every", "1", "--keep-checkpoints", "3", "--rl.schedule", "constant")


def run(out: Path, *arguments: str) -> str:
    process = RunProcess(out.with_suffix(".log"), *arguments, "--out", str(out))
    assert process.wait() == 0, process.output()
    return process.output()


def computed(folder: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in COMPUTED} for row in rows(folder)]


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three RL steps, with the checkpoints of steps 1, 2 and of the end."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    output = run(out, *OPTIONS)
    assert f"nanorl train --resume --out {out} --rl.steps 6\n" in output
    for verb in (f"nanorl chat {out}", f"nanorl view {out}", f"nanorl eval {out}"):
        assert verb in output
    return out


@sandboxed
def test_a_fork_ends_as_its_origin_did_and_a_longer_one_as_the_origin_prolonged(
    whole: Path, tmp_path: Path
) -> None:
    before = files(whole)
    same, longer, prolonged = (tmp_path / name for name in ("same", "longer", "prolonged"))
    run(same, "--fork", f"{whole}@1")
    assert computed(same) == computed(whole)
    assert (same / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    begun = RunHistory(same).read()
    assert [(event["event"], event["origin"], event["step"]) for event in begun] == [
        ("forked", f"{whole}@1", 1)
    ]
    assert begun[0]["changes"] == {}

    run(longer, "--fork", f"{whole}@2", "--rl.steps", "4")
    shutil.copytree(whole, prolonged)
    run(prolonged, "--resume", "--rl.steps", "4")  # it had finished
    assert len(computed(longer)) == 4 and computed(longer)[3]["grad_norm"] > 0
    assert computed(prolonged) == computed(longer)
    assert computed(prolonged)[:3] == computed(whole)
    assert (prolonged / WEIGHTS).read_bytes() == (longer / WEIGHTS).read_bytes()
    assert (prolonged / WEIGHTS).read_bytes() != (whole / WEIGHTS).read_bytes()
    assert files(whole) == before

    # and once more, with another learning rate
    output = run(
        prolonged, "--resume", "--rl.steps", "5", "--rl.lr", "1e-3", "--rl.group-size", "3"
    )
    assert "after RL: " in output
    assert [row["lr"] for row in rows(prolonged)][3:] == [rows(whole)[0]["lr"], 1e-3]
    assert [row["num_rollouts"] for row in rows(prolonged)] == [4, 4, 4, 4, 6]
    events = json.loads((prolonged / "summary.json").read_text())["history"]
    assert [(event["event"], event["step"]) for event in events] == [
        ("begun", 0),
        ("resumed", 3),
        ("resumed", 4),
    ]
    lr = read_config(whole, flag="").rl.lr
    assert events[2]["changes"] == {
        "rl.steps": [4, 5],
        "rl.lr": [lr, 1e-3],
        "rl.group_size": [2, 3],
    }
    assert "--rl.lr 1e-3" in events[2]["command"]
    config = read_config(prolonged, flag="")
    assert (config.rl.steps, config.rl.lr, config.resume) == (5, 1e-3, False)
    page = (prolonged / "report.html").read_text()
    assert f"rl.lr: {lr} → <b>0.001</b>" in page and '<section id="history">' in page
    assert '<section id="history">' not in (whole / "report.html").read_text()

    # only the evaluation after RL is played again
    run(prolonged, "--resume", "--evaluation.num-tasks", "1")
    summary = json.loads((prolonged / "summary.json").read_text())
    assert (summary["heldout_n"], summary["heldout_n_before"], len(rows(prolonged))) == (1, 2, 5)


def parse(*arguments: str) -> RunConfig:
    return train_agent.parse_arguments(list(arguments))


@sandboxed
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rl.steps", "2"], "--rl.steps 2: 3 are done; give more, or .* --fork {run}@2"),
        (["--seed", "7"], r"--seed 0 -> 7 \(it gives .* --fork {run} --out ANOTHER"),
        (["--dtype", "bf16"], "--dtype fp32 -> bf16"),
        (["--model", "x"], "--model None -> x .*start a new run"),
        (["--evaluation.seed", "1"], "--evaluation.seed 12345 -> 1 .*of other tasks"),
        (["--warm-start.steps", "9"], "--warm-start.steps 3 -> 9 .the warm start is over"),
        (["--rl.algorithm.kl-coef", "0.1"], "the policy as RL began was not kept"),
        (["--fork", "{run}"], "leave one of them out"),
    ],
)
def test_what_a_resumed_run_must_keep_is_refused_with_reason_and_remedy(
    whole: Path, flags: list[str], message: str
) -> None:
    given = [flag.format(run=whole) for flag in flags]
    with pytest.raises(ValueError, match=message.format(run=whole)):
        parse("--resume", "--out", str(whole), *given)


@sandboxed
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fork", "{run}@7"], "no such checkpoint; there are: @0, @1, @2, @3 .@done.. .*keeps"),
        (["--fork", "{run}@last"], "give a number of RL steps after the @, or done"),
        (["--fork", "{run}-not@1"], "config.json does not exist"),
        (["--fork", "{run}@2", "--rl.steps", "1"], "--rl.steps 1: 2 are done"),
        (["--fork", "{run}", "--out", "{run}"], "is the run that --fork begins in"),
        (["--fork", "{run}", "--model", "x"], "--model None -> x"),
    ],
)
def test_a_fork_that_cannot_begin_says_what_there_is(
    whole: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*(flag.format(run=whole) for flag in flags))


@sandboxed
def test_a_fork_has_a_store_of_its_own(whole: Path, tmp_path: Path) -> None:
    """Said before its folder is made, which would then be taken."""
    run, store = tmp_path / "run", str(tmp_path / "elsewhere.sqlite")
    shutil.copytree(whole, run)
    options = json.loads((run / "config.json").read_text()) | {"store": store}
    (run / "config.json").write_text(json.dumps(options))
    remember(options)
    with pytest.raises(ValueError, match=f"--store {store} has the rollouts of that run; name an"):
        parse("--fork", str(run))
    other = str(tmp_path / "other.sqlite")
    assert parse("--fork", str(run), "--store", other).store == other


@sandboxed
def test_a_fork_takes_its_origins_options_and_those_given(whole: Path) -> None:
    origin = read_config(whole, flag="")
    config = parse("--fork", str(whole), "--seed", "5", "--dtype", "bf16", "--algorithm", "gspo")
    assert config.run_dir == whole.with_name("whole-fork3")
    assert (config.seed, config.dtype, config.rl.algorithm.loss) == (5, "bf16", "gspo")
    assert config.warm_start == origin.warm_start and config.rl.steps == origin.rl.steps
    places = {place: find_origin(f"{whole}{place}").cursor for place in ("", "@2", "@done", "@3")}
    assert {place: cursor.place for place, cursor in places.items()} == {
        "": ("after", 0),
        "@2": ("rl", 2),
        "@done": ("after", 0),
        "@3": ("after", 0),
    }
    assert len(list_checkpoints(whole / "checkpoints")) == 3


def test_before_its_first_checkpoint_a_run_may_change_its_warm_start(tmp_path: Path) -> None:
    saved = dataclasses.replace(tiny(), out=tmp_path)
    warm = dataclasses.replace(saved.warm_start, steps=5)
    check_resume(saved, dataclasses.replace(saved, warm_start=warm))
    with pytest.raises(ValueError, match="--preset tiny -> smollm2"):
        check_resume(saved, dataclasses.replace(saved, preset="smollm2"))


@sandboxed
def test_a_fork_may_have_other_tasks_and_compares_with_the_policy_that_it_began_with(
    whole: Path, tmp_path: Path
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "fork"
    lines = ({"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(24))
    tasks.write_text("\n".join(map(json.dumps, lines)))
    # A critic and a reference, which the origin had not.
    algorithm = ("--rl.algorithm.advantage", "gae", "--rl.algorithm.kl-coef", "0.5")
    other = ("--tasks", str(tasks), "--rl.steps", "3", "--rl.lr", "1e-3", *algorithm)
    run(out, "--fork", f"{whole}@2", *other)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["heldout_success_before"] is None  # that was of other tasks
    assert summary["heldout_success_after"] is not None
    run(out, "--resume", "--rl.steps", "5")
    kls = [row.get("ref_kl") for row in rows(out)]
    assert kls[:2] == [None, None] and kls[2] == pytest.approx(0, abs=1e-6) and kls[4] > 1e-6
    assert ["value_loss" in row for row in rows(out)] == [False, False, True, True, True]
    assert [row["step"] for row in rows(out)] == [0, 1, 2, 3, 4]
