"""A run in two environments: killed and resumed it ends with the bits of one that nobody killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from forked_runs import SMALL, RunProcess, Slow, rows
from run_outcomes import differences

from nanorl import cli
from nanorl.envs.mix import environment_of
from nanorl.inspection.viewer.overview import overview_html
from nanorl.inspection.viewer.runs import ViewedRun
from nanorl.observability.store import RolloutStore

pytestmark = pytest.mark.sandbox
GAMES = Path(__file__).parents[1] / "envs" / "mixed_games.py"
TWO = (
    *(*SMALL, "--env", f"{GAMES}:Echo", "code", "--env-weights", "1", "2"),
    *("--env-args", "Echo.most=9", "--rl.tasks-per-step", "3", "--rl.steps", "4"),
    *("--evaluation.num-tasks", "6", "--save-every", "2", "--rl.curriculum", "pools"),
    *("--rl.curriculum-args", "hard=0.4", "easy=0.4", "candidates=4"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run = RunProcess(folder / "log", *TWO, "--out", str(folder / "run"))
    assert run.wait() == 0, run.output()
    return folder / "run"


def test_a_run_in_two_environments_survives_a_kill_bit_by_bit(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    slow = Slow(update=6, seconds=60.0, marker=tmp_path / "slow")  # three of the warm start
    run = RunProcess(tmp_path / "log", *TWO, "--out", str(out), slow=slow)
    run.await_file(slow.marker)
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL and len(rows(out)) < 4
    again = RunProcess(tmp_path / "log", "--resume", "--out", str(out))
    assert again.wait() == 0, again.output()
    assert differences(out, whole) == []


def test_the_pools_are_in_the_checkpoints_and_in_every_step(whole: Path) -> None:
    sizes = [sum(row[f"pool_{pool}"] for pool in ("easy", "normal", "hard")) for row in rows(whole)]
    assert sizes == sorted(sizes) and sizes[0] == 3
    with RolloutStore(whole / "rollouts.sqlite") as store:
        assert sizes[-1] == len({entry.task_id for entry in store.entries()})
    assert rows(whole)[-1]["pool_hard"] > 0, "nothing is solved so early"


def test_success_of_each_is_in_summary_steps_and_at_the_end(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    found = summary["per_environment"]
    assert {name: row["n_after"] for name, row in found.items()} == {"Echo": 2, "code": 4}
    solved = sum(row["after"] * row["n_after"] for row in found.values())
    assert solved / 6 == pytest.approx(summary["heldout_success_after"])
    config = json.loads((whole / "config.json").read_text())
    assert config["env"] == [f"{GAMES}:Echo", "code"] and config["env_weights"] == [1.0, 2.0]
    with RolloutStore(whole / "rollouts.sqlite") as store:
        entries = store.entries()
        names = {environment_of(entry.kind) for entry in entries}
    assert names == {"Echo", "code"}
    played = sum(
        row.get(f"environment/{name}/num_rollouts", 0) for row in rows(whole) for name in names
    )
    assert played == len(entries) == 4 * 3 * 2
    assert "Echo" in (whole / "report.html").read_text()
    printed = (whole.parent / "log").read_text().partition("success on held-out tasks")[2]
    assert "  Echo " in printed and "  code " in printed


def test_the_model_card_names_both_and_chats_with_one(whole: Path) -> None:
    card = (whole / "model-trained" / "README.md").read_text()
    assert "the environments" in card and "mixed_games.py:Echo, code" in card
    assert "--env mixed_games.py:Echo code" in card, "nanorl eval plays both"
    [chat] = [line for line in card.splitlines() if line.startswith("nanorl chat")]
    assert chat.endswith("--env mixed_games.py:Echo")


def test_it_is_replayed_viewed_and_evaluated(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(whole)]) == 0
    assert "came out equal to the last bit" in capsys.readouterr().out
    out = str(tmp_path / "eval")
    words = ["--num-tasks", "3", "--out", out, "--device", "cpu"]
    assert cli.main(["eval", str(whole), *words]) == 0
    for folder in (whole, Path(out)):
        page = overview_html(ViewedRun("it", folder))
        assert "By environment" in page and ">Echo<" in page, "the viewer's first page"
    printed = capsys.readouterr().out
    assert "  Echo " in printed and "  code " in printed
    assert cli.main(["compare", f"{whole}:before", str(whole)]) == 0
    assert "  code: " in capsys.readouterr().out
