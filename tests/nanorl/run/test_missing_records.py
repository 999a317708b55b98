"""A run's folder that has lost something: said in one line, and refused where the run would end
otherwise than undisturbed. Every case damages a finished run of three steps and goes on to five."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import SMALL, RunProcess, rows

from nanoengine.state.checkpoint import latest_checkpoint, lost_newest, read_cursor
from nanorl.run.cursor import Cursor
from nanorl.run.history import RunHistory
from nanorl.run.missing_records import missing_records, passed_over

pytestmark = pytest.mark.sandbox
WEIGHTS = "model-trained/model.safetensors"
COMPUTED = ("loss", "grad_norm", "reward", "lr")
# With a schedule that falls to 0, the rates would depend on when RL is to end.
OPTIONS = (*SMALL, "--save-every", "1", "--rl.schedule", "constant")
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three RL steps."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    process = RunProcess(out.with_suffix(".log"), *OPTIONS, "--out", str(out))
    assert process.wait() == 0, process.output()
    return out


@pytest.fixture(scope="module")
def undisturbed(whole: Path) -> tuple[bytes, list[list[object]]]:
    """What the run gives that goes on with its whole folder."""
    status, output, folder = go_on(whole, whole.with_name("undisturbed"), lambda _: None)
    assert status == 0, output
    for word in ("lacks", "missing", "newest checkpoint"):
        assert word not in output, "nothing was lost"
    assert "missing" not in json.loads((folder / "summary.json").read_text())
    return (folder / WEIGHTS).read_bytes(), computed(folder)


def go_on(whole: Path, out: Path, damage: Damage, *flags: str) -> tuple[int | None, str, Path]:
    shutil.copytree(whole, out)
    damage(out)
    more = ("--resume", "--out", str(out), "--rl.steps", "5", *flags)
    process = RunProcess(out.with_suffix(".log"), *more)
    return process.wait(), process.output(), out


def computed(folder: Path) -> list[list[object]]:
    return [[row["step"], *(row.get(name) for name in COMPUTED)] for row in rows(folder)]


def edit(file: str, **options: object) -> Damage:
    def change(run: Path) -> None:
        content = json.loads((run / file).read_text())
        for name, value in options.items():
            *path, last = name.split("__")
            section = content
            for part in path:
                section = section[part]
            section[last] = value
        (run / file).write_text(json.dumps(content))

    return change


def remove(name: str) -> Damage:
    def change(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def keep(name: str, share: float) -> Damage:
    return lambda run: os.truncate(run / name, int((run / name).stat().st_size * share))


def keep_lines(*numbers: int) -> Damage:
    def change(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[number] for number in numbers))

    return change


def forget_step(run: Path) -> None:
    with sqlite3.connect(run / "rollouts.sqlite") as database:
        database.execute("DELETE FROM rollouts WHERE step = 1")
    database.close()


NEWEST = "checkpoints/step_00000003"
GOES_ON: dict[str, tuple[Damage, str]] = {
    "metrics gone": (remove("metrics.jsonl"), "metrics.jsonl lacks steps 0 to 2"),
    "metrics torn": (keep("metrics.jsonl", 0.9), "metrics.jsonl lacks step 2:"),
    "metrics without a line": (keep_lines(0, 2), "metrics.jsonl lacks step 1:"),
    "rollouts gone": (remove("rollouts.sqlite"), "the store lacks the rollouts of steps 0 to 2"),
    "rollouts without a step": (forget_step, "the store lacks the rollouts of step 1:"),
    "history gone": (remove("history.jsonl"), "history.jsonl has 1 of at least 2 starts"),
    "evaluations gone": (remove("evaluations.sqlite"), "evaluations.sqlite is missing"),
    "an evaluation gone": (remove("eval-before.json"), "eval-before.json is missing"),
    "no meta.json": (remove(f"{NEWEST}/meta.json"), "step_00000003 was the newest .* from step_00"),
    "no checkpoint": (remove(NEWEST), "step_00000003 was the newest .* from step_00000002"),
}
REPLACED = ("history gone", "evaluations gone", "no meta.json", "no checkpoint")
"""What the run that goes on writes again, or has said once."""


@pytest.mark.parametrize("case", GOES_ON)
def test_a_lost_record_is_said_and_changes_no_bit(
    whole: Path, undisturbed: tuple[bytes, list[list[object]]], tmp_path: Path, case: str
) -> None:
    damage, said = GOES_ON[case]
    status, output, folder = go_on(whole, tmp_path / "run", damage)
    assert status == 0, output
    assert re.search(said, output), output
    weights, all_rows = undisturbed
    assert (folder / WEIGHTS).read_bytes() == weights
    found = computed(folder)
    assert [row for row in all_rows if row in found] == found, "those that are there are the same"
    if case in REPLACED:
        return
    missing = json.loads((folder / "summary.json").read_text())["missing"]
    assert len(missing) == 1 and re.search(said, missing[0])
    assert missing[0].split(":")[0] in (folder / "report.html").read_text()


REFUSED: dict[str, tuple[Damage, str]] = {
    "seed": (edit("config.json", seed=7), r"seed is 7 there, and was 0 \(write 0 again\)"),
    "lr": (
        edit("config.json", rl__lr=1e-3),
        "again, and give --rl.lr 0.001 with --resume",
    ),
    "group size": (edit("config.json", rl__group_size=3), "rl.group_size is 3 there, and was 2"),
    "tasks of the evaluation": (edit("config.json", evaluation__seed=1), "evaluation.seed is 1"),
    "model": (edit("model/config.json", rope_theta=200.0), "configuration or tokenizer is not"),
    "template": (
        edit("model/tokenizer_config.json", chat_template="{{ messages[0].content }}"),
        "configuration or tokenizer is not",
    ),
    "torn meta.json": (
        keep(f"{NEWEST}/meta.json", 0.5),
        "step_00000003 is damaged .*_00000002",
    ),
    "torn metrics": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n'),
        "line 2 is not a metrics row .* delete the line",
    ),
    "metrics of another order": (keep_lines(1, 0, 2), "line 2 .*step 0 follows step 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_end_otherwise_is_refused_with_the_way_to_mend_it(
    whole: Path, tmp_path: Path, case: str
) -> None:
    damage, said = REFUSED[case]
    status, output, folder = go_on(whole, tmp_path / "run", damage)
    assert status == 2, output
    last = output.strip().splitlines()[-1]
    assert re.search(said, last) and "Traceback" not in output, output
    assert (folder / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes(), "nothing was done"


def test_an_option_that_was_edited_may_be_given_as_a_flag_and_others_are_recorded(
    whole: Path, tmp_path: Path
) -> None:
    def change(run: Path) -> None:
        edit("config.json", save_every=2, rl__lr=1e-3)(run)

    status, output, folder = go_on(whole, tmp_path / "run", change, "--rl.lr", "5e-4")
    assert status == 0, output
    assert [row["lr"] for row in rows(folder)][3:] == [5e-4, 5e-4]
    changes = RunHistory(folder).read()[-1]["changes"]
    assert changes["save_every"] == [1, 2] and changes["rl.lr"][1] == 5e-4


def test_a_checkpoint_knows_the_options_that_it_was_made_with(whole: Path) -> None:
    newest = latest_checkpoint(whole / "checkpoints")
    assert newest is not None
    options = read_cursor(newest)["options"]
    assert options["seed"] == 0 and options["rl.group_size"] == 2 and "out" not in options


def test_what_is_missing_is_named_by_its_steps(tmp_path: Path) -> None:
    cursor = Cursor(phase="rl", step=9)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "num_rollouts": 0}\n{"step": 5}\n')
    said = missing_records(tmp_path, cursor, {0, 1, 7, 8}, first=1)
    assert [one.partition(":")[0] for one in said] == [
        "metrics.jsonl lacks steps 0 to 2, 4 and 6 to 8",
        "the store lacks the rollouts of steps 2 and 4 to 6",
    ]


def test_a_checkpoint_that_is_none_any_more_is_named(tmp_path: Path) -> None:
    assert lost_newest(tmp_path / "none") is None and passed_over(tmp_path, None) == ""
    (tmp_path / "step_00000004").mkdir()
    assert lost_newest(tmp_path) is None, "nobody said that it was complete"
    (tmp_path / "latest").write_text("step_00000004\n")
    assert lost_newest(tmp_path) == tmp_path / "step_00000004"
    assert "going on from the beginning" in passed_over(tmp_path, None)
    (tmp_path / "step_00000004" / "meta.json").write_text("{}")
    assert lost_newest(tmp_path) is None
