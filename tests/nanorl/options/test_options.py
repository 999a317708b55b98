"""Runs of the command line under options drawn at random, and an asynchronous run's records."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from forked_runs import ROOT, SMALL, RunProcess, rows

from nanorl.algorithms.recipes import RECIPES
from nanorl.observability.store import RolloutStore

sys.path[:0] = [str(ROOT / "scripts")]
import check_options  # noqa: E402

pytestmark = pytest.mark.sandbox
TREE = list(check_options.options(check_options.get_preset("tiny").config()))


def play(folder: Path, drawn: dict[str, str]) -> tuple[str, str]:
    """The verdict on one combination, and the reason."""
    flags = check_options.SMALLEST | drawn | {"--out": str(folder / "run")}
    run = RunProcess(folder / "log", *check_options.spelled(flags))
    status = run.wait()
    assert status is not None, run.output()
    return check_options.judge(drawn, status, run.output(), folder / "run")


@pytest.mark.parametrize("recipe", ["ppo", "reinforce_pp", "gspo"])
def test_options_drawn_at_random_train_or_are_refused_by_name(recipe: str, tmp_path: Path) -> None:
    """A few of what `scripts/check_options.py` plays by the dozen."""
    drawn = check_options.draw(random.Random(recipe), recipe, TREE)
    verdict, reason = play(tmp_path, drawn)
    assert verdict in ("trained", "refused"), (drawn, reason)


def test_the_draw_covers_every_option_and_every_recipe() -> None:
    rng = random.Random(0)
    drawn: set[str] = set()
    for recipe in RECIPES:
        for _ in range(60):
            drawn |= set(check_options.draw(rng, recipe, TREE))
    assert drawn >= {option.flag for option in TREE}
    assert {"--rl.max-staleness", "--rl.epochs", "--rl.reference"} <= drawn


def test_a_refusal_that_names_nothing_and_a_traceback_are_broken(tmp_path: Path) -> None:
    drawn = {"--rl.epochs": "2"}
    assert check_options.judge(drawn, 2, "error: --rl.epochs 2: no", tmp_path)[0] == "refused"
    assert check_options.judge(drawn, 2, "error: it did not work", tmp_path)[0] == "BROKEN"
    assert check_options.judge(drawn, 2, "Traceback: rl.epochs", tmp_path)[0] == "BROKEN"
    assert check_options.judge(drawn, -1, "rl.epochs", tmp_path)[0] == "BROKEN"


def test_the_records_of_an_asynchronous_run_are_true(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = RunProcess(
        tmp_path / "log", *SMALL, "--rl.max-staleness", "2", "--out", str(run)
    )  # fmt: skip
    assert process.wait() == 0, process.output()
    with RolloutStore(run / "rollouts.sqlite") as store:
        for entry in store.entries():
            assert entry.version == store.get(entry.rollout_id).version
            assert entry.step - 2 <= entry.version <= entry.step
        assert any(entry.version < entry.step for entry in store.entries())
    steps = rows(run)
    assert max(row["staleness_max"] for row in steps) >= 1
    assert all(row.get("logp_gap_max", 0.0) == 0.0 for row in steps)
    summary = json.loads((run / "summary.json").read_text())
    tokens = sum(row["action_tokens"] for row in steps)
    played = sum(row["rollout_s"] for row in steps)
    assert summary["tokens_per_s_rollout"] == pytest.approx(tokens / played, rel=1e-6)
    assert summary["logp_gap_max"] == 0.0
