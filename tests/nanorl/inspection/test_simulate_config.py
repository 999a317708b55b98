"""Bad configurations of the simulator are refused in one sentence, and good ones read whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanorl.inspection.simulate.__main__ import main
from nanorl.inspection.simulate.published import config_names, read_config, read_published
from nanorl.inspection.simulate.simulation_config import SimulationConfig
from nanorl.options.values import read_record

BAD: list[tuple[Any, str]] = [
    ([], "must hold options, not list"),
    ({"clutser": {}}, "no option is called clutser; did you mean cluster?"),
    ({"cluster": {"replicas": 0}}, "--cluster.replicas 0: must be 1 or more"),
    ({"cluster": {"replicas": 1.5}}, "cluster: replicas = 1.5: must be a whole number"),
    (
        {"cluster": {"placement": "together"}},
        "'together': must be one of separate, colocated",
    ),
    ({"workload": {"answer": {"kind": "normal"}}}, "must be one of lognormal, constant"),
    ({"workload": {"answer": {"kind": "empirical"}}}, "give at least one length"),
    (
        {"workload": {"answer": {"values": [1, 2.5]}}},
        r"\[1, 2.5\]: must be a whole number",
    ),
    ({"workload": {"answer": {"mean": 99, "cap": 50}}}, "must be at most --workload.answer.cap 50"),
    ({"workload": {"answer": {"sigma": 0}}}, "sigma 0.0: must be more than 0"),
    ({"engine": {"cache_tokens": 1000}}, "has 16584 tokens and could never run"),
    ({"engine": {"max_batch_tokens": 100}}, "--engine.max-batch-tokens 100: must be 256 or more"),
    ({"phases": {"update_s": -1}}, "--phases.update-s -1.0: must be 0 or more"),
    ({"mode": "fast"}, "mode = 'fast': must be one of sync, streaming, async"),
    ({"mode": "async"}, "mode async without staleness is streaming"),
    ({"max_staleness": 0.5}, "--max-staleness 0.5: mode sync has none"),
    ({"minibatches": 4}, "--minibatches 4: mode sync trains when all groups are there"),
    ({"mode": "streaming", "minibatches": 65}, "--minibatches 65: must be at most 64"),
    (
        {"mode": "async", "max_staleness": 1, "cluster": {"placement": "colocated"}},
        "engines that take turns with the trainer cannot roll out",
    ),
    ({"name": 3}, "name = 3: must be text"),
    ({"partial_rollouts": 1}, "partial_rollouts = 1: must be true or false"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_a_bad_configuration_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_record(SimulationConfig, data, where="--config mine.json")


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    given = {"workload": {"turns": 3, "answer": {"values": [5, 6], "kind": "empirical"}}}
    path.write_text(json.dumps(given))
    config, plain = read_config(str(path)), SimulationConfig()
    assert config.workload.turns == 3 and config.workload.answer.values == (5, 6)
    answer = replace(plain.workload.answer, kind="empirical", values=(5, 6))
    assert config == replace(plain, workload=replace(plain.workload, turns=3, answer=answer))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file, and no configuration of that name; there"):
        read_config(str(tmp_path / "none.json"))
    (tmp_path / "torn.json").write_text('{"name": ')
    with pytest.raises(ValueError, match="not JSON"):
        read_config(str(tmp_path / "torn.json"))


def test_every_published_run_is_a_configuration_of_its_name() -> None:
    assert len(config_names()) == len(set(config_names()))
    for name in config_names():
        assert read_config(name).name == name


def test_predictions_see_no_published_figure_of_generation() -> None:
    """What is fitted is listed, and no other run changes engine or answers but by the router."""
    for family in read_published():
        assert 1 <= len(family.fitted) <= 3
        for run in family.runs.values():
            assert not {"answer"} & set(run.changes.get("workload", {}))
            assert set(run.changes.get("engine", {})) <= {"router_gate", "prefill_s"}


SMALL = {
    "workload": {
        "tasks_per_step": 2, "group_size": 2, "answer": {"kind": "constant", "mean": 40},
    },
    "cluster": {"replicas": 2, "trainer_gpus": 2},
}  # fmt: skip


def test_the_command_prints_draws_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    files = ["--svg", str(tmp_path / "a.svg"), "--json", str(tmp_path / "a.json")]
    assert main(["--config", str(path), *files, "--quantum", "2", "--phases.update-s", "3"]) == 0
    said = capsys.readouterr().out
    assert "SIMULATED: unnamed, 4 GPUs" in said and "train 3.0" in said
    assert "tokens for one; with 1 the step is" in said
    assert "SIMULATED" in (tmp_path / "a.svg").read_text()
    (numbers,) = json.loads((tmp_path / "a.json").read_text())
    assert numbers["is_simulated"] and numbers["train_s"] == pytest.approx(3.0)


def test_the_command_scales_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL))
    assert main(["--config", str(path), "--gpus", "4", "8", "--once"]) == 0
    said = capsys.readouterr().out
    assert "4 GPUs (2 replicas" in said and "8 GPUs (4 replicas" in said
    assert "train 30.0" in said and "train 15.0" in said
    assert "taken to fall in proportion" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "verl"], "error: --config verl: no such file"),
        (["--gpus", "1"], "error: --gpus 1: "),
        (["--svg", "nowhere/a.svg"], "there is no folder nowhere; make it first"),
        (["--svg", "a.svg", "--gpus", "8", "16"], "a picture is of one run"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
