"""`nanorl store`, and runs that keep their rollouts elsewhere."""

import sys
from pathlib import Path
from typing import Any

import pytest
from test_store import make_rollout

import nanorl
from nanorl import cli
from nanorl.observability.store import RolloutStore
from nanorl.rollout_json import from_json, to_json

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from postgres_server import PostgresServer, why_not

OPTIONS: dict[str, Any] = {
    **{"dtype": "fp32", "threads": 1, "warm_start.steps": 0, "rl.tasks_per_step": 1},
    **{"rl.group_size": 2, "rl.algorithm.advantage": "reinforce_pp", "agent.max_turn_tokens": 4},
    "evaluation": {"num_tasks": 2, "num_tasks_untrained": 0, "num_tasks_no_tool": 0},
}


class Plain(nanorl.Env):
    """Says something, and that is it."""

    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task(f"say {rng.randint(0, 99)}", answer="x", kind="plain")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.sqlite"
    failed = [{"num_tool_errors": 1.0}]
    with RolloutStore(path) as store:
        for step in range(3):
            store.add_group(
                [
                    make_rollout(f"s{step}-m0", task_id="sums-1", turn_metrics=failed),
                    make_rollout(f"s{step}-m1", task_id="sums-1", reward=0.0),
                ],
                step=step,
            )
        again = from_json(
            to_json(make_rollout("s0-m1", task_id="sums-1")) | {"rollout_id": "again"}
        )
        store.add_group([again], step=3)
    return path


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["store", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_what_there_is_and_slices_and_duplicates_are_said(file, capsys):
    text = said(capsys, file)
    assert "7 rollouts of 4 steps" in text and "by status: finished 7" in text
    assert "by type: sums 7" in text and "1 say what an earlier one said" in text
    lines = said(capsys, file, "--where", "turn=1, failed", "--most", "2").splitlines()
    assert [line.split()[0] for line in lines] == ["s1-m0", "s2-m0", "3"]
    assert "1 failed" in lines[0] and lines[-1] == "3 rollouts: turn=1, failed"
    assert "2x  s0-m1" in said(capsys, file, "--duplicates")


def test_rollouts_are_dropped_and_still_counted(file, capsys):
    text = said(capsys, file, "--expire-steps", "2", "--vacuum")
    assert "dropped 4 rollouts" in text and "3 rollouts of 2 steps" in text
    assert "4 more were dropped, 2 of them successes" in text


def test_wrong_words_are_one_line(file, capsys, tmp_path):
    for words, why in (
        ([file, "--where", "turn=two"], "'two' is not a whole number"),
        ([file, "--expire-days", "0"], "--expire-days 0.0: must be more than 0"),
        ([tmp_path], "is not a run's folder"),
    ):
        assert cli.main(["store", *map(str, words)]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.xdist_group("postgres")
def test_a_run_keeps_its_rollouts_in_postgres(tmp_path, capsys):
    with PostgresServer() as server:
        address = f"{server.address}&run=first"
        options = OPTIONS | {"store": address, "keep_rollout_steps": 1, "keep_rollout_mb": 500}
        run = nanorl.train("tiny", env=Plain, steps=2, out=tmp_path / "run", options=options)
        assert not (run.folder / "rollouts.sqlite").exists()
        with RolloutStore(address) as store:
            assert [entry.step for entry in store.entries()] == [1, 1]
            assert {entry.kind for entry in store.entries()} == {"plain"}
            assert store.task(store.entries()[0].task_id).prompt.startswith("say")
        assert "2 more were dropped" in said(capsys, run.folder)
        with pytest.raises(ValueError, match=r"run=first: has 2 rollouts of another run"):
            nanorl.train("tiny", env=Plain, steps=1, out=tmp_path / "other", options=options)
