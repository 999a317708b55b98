"""How runs begin and what stands before RL: a start that failed, a run without a warm start, and
the weights that RL began with."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanoinfer.params import SamplingParams
from nanorl import cli
from nanorl.commands.evaluate import EvalOptions, run_evaluation
from nanorl.envs.http_record.record_config import HttpConfig
from nanorl.observability.store import RolloutStore
from nanorl.options.run_config import RunConfig
from nanorl.run.continuation import find_origin
from nanorl.run.failed_start import take_away_failed_start
from nanorl.run.parse import parse_arguments
from nanorl.run.restarts import RunToEnd
from nanorl.run.saved_models import SavedModels, find_models

GAME = """
import nanorl

class Game(nanorl.Env):
    def tasks(self, rng):
        number = rng.randint(1, 99)
        return nanorl.Task(f"Say {number}.", answer=number)
    def reset(self):
        if BROKEN:
            raise RuntimeError("the board is missing")
    def step(self, text):
        return self.done(reward=float(len(text) % 2))
    def teacher(self, observations, rng):
        return str(self.task.answer)
"""
SMALL = (
    *("--preset", "tiny", "--rl.steps", "1", "--rl.tasks-per-step", "2", "--rl.group-size", "2"),
    *("--evaluation.num-tasks", "4", "--evaluation.num-tasks-untrained", "2", "--threads", "1"),
    *("--agent.max-turn-tokens", "8", "--env-workers", "0", "--warm-start.traces-per-step", "2"),
)


def train(folder: Path, *more: str, is_broken: bool = False, steps: int = 0) -> int:
    """`nanorl train` in this process, of a file of its own for each state of the environment."""
    file = folder / f"game_{'broken' if is_broken else 'whole'}.py"
    file.write_text(GAME.replace("BROKEN", str(is_broken)))
    words = [*SMALL, "--env", str(file), "--out", str(folder / "run"), *more]
    return cli.main(["train", *words, "--warm-start.steps", str(steps)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a warm start, after one in its folder that failed."""
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    assert train(folder, steps=2) == 0
    return folder / "run"


def test_the_corrected_command_takes_the_folder_of_a_start_that_failed(
    plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(plain, is_broken=True) == 2
    assert "the board is missing" in capsys.readouterr().err
    assert (plain / "run" / "config.json").is_file(), "it had begun"
    assert train(plain) == 0
    said = capsys.readouterr().out
    assert f"{plain / 'run'}: a run that failed at its start is now in failed-start-*" in said
    assert len((plain / "run" / "history.jsonl").read_text().splitlines()) == 1
    assert train(plain) == 2, "a run that has finished is nobody's to take away"
    assert "already holds a run" in capsys.readouterr().err
    check_without_warm_start(plain / "run", said)


def check_without_warm_start(run: Path, said: str) -> None:
    """What the weights can do before RL is measured once, and shown under one name."""
    summary = json.loads((run / "summary.json").read_text())
    before = summary["heldout_success_before"]
    assert before is not None and summary["heldout_success_untrained"] == before
    assert summary["heldout_n_untrained"] == summary["heldout_n_before"] == 4
    assert not (run / "eval-untrained.json").exists()
    with RolloutStore(run / "evaluations.sqlite") as store:
        ids = [entry.rollout_id for entry in store.entries()]
    assert sum(name.startswith("eval-before") for name in ids) == 4
    assert not any(name.startswith("eval-untrained") for name in ids)
    table = said[said.rindex("success on held-out tasks") :]
    assert "  untrained" in table and "before RL" not in table and "warm start" not in table


def test_only_what_a_run_wrote_is_taken_away(tmp_path: Path) -> None:
    options = json.dumps({"preset": "tiny"})
    for name, text in (("config.json", options), ("notes.txt", "mine"), ("metrics.jsonl", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "pictures").mkdir()  # a fork has its origin's, where there is no such folder
    assert take_away_failed_start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed-start-1", "notes.txt"]
    (tmp_path / "config.json").write_text(options)
    assert take_away_failed_start(tmp_path)
    assert (tmp_path / "failed-start-1" / "config.json").is_file()  # moved aside, never removed
    assert (tmp_path / "failed-start-2" / "config.json").is_file()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"config.json": '{"model_type": "llama"}'}, "a model's folder"),
        ({"config.json": "{"}, "whatever that is"),
        ({"config.json": '{"preset": "tiny"}', "metrics.jsonl": '{"step": 0}\n'}, "a step is done"),
        ({"config.json": '{"preset": "tiny"}', "summary.json": "{}"}, "it has ended"),
        ({"config.json": '{"preset": "tiny"}', "model-trained/a": ""}, "it has a model"),
        (
            {
                "config.json": '{"preset": "tiny", "warm_start": {"steps": 2}}',
                "checkpoints/latest": "step_00000002",
                "checkpoints/step_00000002/meta.json": "{}",
            },
            "its warm start is trained",
        ),
    ],
)
def test_anything_else_stays(files: dict[str, str], why: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert not take_away_failed_start(tmp_path), why
    assert all((tmp_path / name).is_file() for name in files)


def test_what_rl_began_with_can_be_named(warm: Path) -> None:
    weights = {}
    for stage in ("untrained", "before", "after"):
        with find_models(f"{warm}:{stage}").folder() as folder:
            weights[stage] = load_file(folder / "model.safetensors")
    trained = load_file(warm / "model-trained" / "model.safetensors")
    assert are_equal(weights["after"], trained)
    assert are_equal(weights["untrained"], load_file(warm / "model" / "model.safetensors"))
    assert not are_equal(weights["untrained"], weights["before"]), "the warm start lies between"
    with pytest.raises(ValueError, match=r"no stage 'befor'; there are untrained, before, after"):
        find_models(f"{warm}:befor")


def are_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_an_evaluation_plays_what_rl_began_with(
    warm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "before"
    words = ["eval", f"{warm}:before", "--num-tasks", "4", "--out", str(out)]
    assert cli.main(words) == 0, capsys.readouterr().err
    with (
        RolloutStore(out / "rollouts.sqlite") as again,
        RolloutStore(warm / "evaluations.sqlite") as first,
    ):
        played = {rollout.task_id: rollout.tokens for rollout in again.query()}
        before = [one for one in first.query() if one.rollout_id.startswith("eval-before")]
    assert played == {rollout.task_id: rollout.tokens for rollout in before} and len(played) == 4


def test_an_evaluation_does_not_write_over_one_that_chose_the_same_folder(
    warm: Path, tmp_path: Path
) -> None:
    """Two that begin together both find the first name free. One is here within the other."""
    saved = find_models(str(warm))
    options = EvalOptions(model=str(warm), num_tasks=1, out=tmp_path / "out")
    config = replace(options.run_config(saved), model=str(saved.place))

    def play(title: str, run_to_end: RunToEnd = asyncio.run) -> None:
        sampling = SamplingParams(temperature=0)
        run_evaluation(config, title=title, samples=1, sampling=sampling, run_to_end=run_to_end)

    def late(coroutine: Any) -> Any:
        """The other begins to play, and has written, before this one does."""
        play("first")
        return asyncio.run(coroutine)

    with pytest.raises(ValueError, match="another evaluation was written there meanwhile"):
        play("second", late)
    assert json.loads((tmp_path / "out" / "eval.json").read_text())["title"] == "first"
    assert not (tmp_path / "out" / "lock").exists()


def test_a_fork_may_begin_where_rl_began(warm: Path, tmp_path: Path) -> None:
    checkpoints = warm / "checkpoints"
    assert not any(find_origin(str(warm)).checkpoint == one for one in (warm / "start").iterdir())
    origin = find_origin(f"{warm}@0")
    assert origin.cursor.rl_steps_done == 0 and origin.checkpoint.parent in (
        checkpoints,
        warm / "start",
    )
    out = tmp_path / "fork"
    assert cli.main(["train", "--fork", f"{warm}@0", "--out", str(out), "--rl.lr", "1e-4"]) == 0
    events = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [event["origin"] for event in events] == [f"{warm}@0"]


ELSEWHERE = GAME.replace(
    "    def tasks", '    defaults = {"agent.max_turns": 2, "rl.steps": 9}\n    def tasks'
).replace("BROKEN", "False")


def test_another_environment_brings_its_limits_along(warm: Path, tmp_path: Path) -> None:
    """And nothing else: how long a fork trains is said by the run that it begins in."""
    file = tmp_path / "elsewhere.py"
    file.write_text(ELSEWHERE)
    saved = find_models(str(warm))
    assert saved.run is not None and saved.run.agent.max_turns == 4
    played = EvalOptions(model=str(warm), env=str(file)).run_config(saved)
    fork = parse_arguments(["--fork", f"{warm}@0", "--env", str(file)])
    assert played.agent.max_turns == fork.agent.max_turns == 2
    assert fork.rl.steps == saved.run.rl.steps == 1
    given = ["--fork", f"{warm}@0", "--env", str(file), "--agent.max-turns", "3"]
    assert parse_arguments(given).agent.max_turns == 3
    same = EvalOptions(model=str(warm)).run_config(saved)
    assert same.agent == saved.run.agent


def test_an_evaluation_is_answered_from_its_runs_record(tmp_path: Path) -> None:
    http = HttpConfig(mode="record", allow=("example.org",))
    run = RunConfig(preset="tiny", out=tmp_path / "run", http=http)
    saved = SavedModels(name="run", place=tmp_path / "run" / "model-trained", run=run)
    played = EvalOptions(model="run", out=tmp_path / "out").run_config(saved)
    assert played.http.mode == "record" and played.run_dir == tmp_path / "out"
    assert played.http_store == tmp_path / "run" / "http.sqlite"


def test_fewer_held_out_tasks_than_asked_for_are_said(
    warm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(warm), "--num-tasks", "90", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    said = capsys.readouterr().err
    assert "not 90: the environment has no more that training never sees" in said
