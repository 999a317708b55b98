"""A real run whose groups are compared by a judge in an engine of its own.

Random weights never rank anything, so here every reply is a ranking: its checksum.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest
from forked_runs import SMALL, RunProcess, rows
from tiny_text import save_folder

from nanorl.cli import main
from nanorl.observability.store import RolloutStore

ENV = """
import nanorl

class Odd(nanorl.Env):
    def tasks(self, rng):
        return nanorl.Task(f"Say {rng.randint(1, 99)}.")

    def step(self, text):
        return self.done(reward=float(len(text) % 2))
"""


def checksums(reply: str, mark: str, count: int) -> list[float]:
    """A score for each attempt, of the reply, the attempts and its number."""
    return [zlib.crc32(f"{reply} {mark} {i}".encode()) % 101 / 100 for i in range(count)]


def every_reply_ranks() -> None:
    from nanorl.envs.rewards import group_judge

    group_judge.read_scores = checksums


def judge_folder(folder: Path) -> Path:
    """A model that reads whole groups."""
    save_folder(folder)
    file = folder / "config.json"
    file.write_text(re.sub(r'(max_position_embeddings": )\d+', r"\g<1>4096", file.read_text()))
    return folder


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_is_paid_by_a_judge_of_groups_and_replays_as_it_was_played(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps of two groups of two: six questions. The rewards are what the judge said, beside
    it stands what the environment says, here or in a worker, and evaluations are of that alone."""
    file, run = tmp_path / "odd.py", tmp_path / "run"
    file.write_text(ENV)
    process = RunProcess(
        tmp_path / "log",
        *(*SMALL, "--env", str(file), "--env-workers", str(workers), "--warm-start.steps", "0"),
        *("--reward", "group_judge", "--reward-args", f"folder={judge_folder(tmp_path / 'judge')}"),
        *("device=cpu", "max_tokens=6", "own_weight=0.25", "--out", str(run)),
        prepare=every_reply_ranks,
    )
    assert process.wait(240) == 0, process.output()
    steps = rows(run)
    assert sum(row["judge_calls"] for row in steps) == 6
    assert all(row["judge_prompt_tokens"] > 2 * 100 and row["judge_s"] > 0 for row in steps)
    assert 0 < sum(row["judge_reply_tokens"] for row in steps) <= 6 * 6
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        rollouts = store.query()
    assert len(rollouts) == 12
    for one in rollouts:
        judged, own = one.metrics["reward/group_judge"], one.metrics["reward/own"]
        assert one.reward == 0.75 * judged + 0.25 * own and own in (0.0, 1.0)
    assert len({one.metrics["reward/group_judge"] for one in rollouts}) > 3
    with RolloutStore(run / "evaluations.sqlite", is_read_only=True) as store:
        assert {one.reward for one in store.query()} <= {0.0, 1.0}
    status = main(["replay", str(run), "--from-step", "1", "--to-step", "2"])
    assert status == 0, capsys.readouterr().out
