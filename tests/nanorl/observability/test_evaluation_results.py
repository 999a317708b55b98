"""eval.json and `nanorl compare`: what is counted, what is paired, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanorl.cli import main
from nanorl.commands.evaluate import EvalOptions
from nanorl.observability.report.comparison import PairedComparison, comparison_text
from nanorl.observability.report.evaluation import Evaluation, TaskScore, evaluation_text
from nanorl.task import Task
from nanorl.types import Branch, Rollout, TurnSpan


def rollout(task: Task, reward: float, **more: object) -> Rollout:
    return Rollout(
        task_id=task.task_id, group_id="g", rollout_id="r", tokens=[1, 2], loss_mask=[0, 1],
        logps=[0.0, -1.0], versions=[-1, 0],
        turn_spans=[TurnSpan(action_start=1, action_end=2, observation_end=2)],
        reward=reward, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def result(shares: dict[str, float], title: str = "old", num_samples: int = 1) -> Evaluation:
    scores = [
        TaskScore(
            task_id=name, kind="k", prompt=f"prompt of {name}", num_samples=num_samples,
            num_successes=round(share * num_samples), mean_reward=share,
        )
        for name, share in shares.items()
    ]  # fmt: skip
    return Evaluation(
        title=title, about={}, scores=scores, mean_turns=1.0, mean_action_tokens=2.0, seconds=3.0
    )


def test_an_evaluation_counts_by_task_and_survives_its_file(tmp_path: Path) -> None:
    one, two = Task("a", 1, kind="x"), Task("b", 2, kind="y")
    played = [
        (one, rollout(one, 1.0, metrics={"reward/style": 0.5, "answered": 1.0})),
        (two, rollout(two, 0.5, turn_rewards=[0.25])),
        (one, rollout(one, 0.0, metrics={"reward/style": 0.0})),
        (two, rollout(two, 0.0)),
    ]
    found = Evaluation.of(played, title="t", about={"k": 2}, seconds=4.0)
    first, second = found.scores
    assert (first.num_samples, first.num_successes, first.parts) == (2, 1, {"style": 0.25})
    assert (second.num_successes, second.mean_reward) == (0, 0.375)
    assert found.success.value == 0.25 and found.pass_ks() == [1, 2]
    assert found.pass_at(1) == found.success and found.pass_at(2).value == 0.5
    assert found.parts()["style"].value == 0.25
    found.write(tmp_path / "eval.json")
    assert Evaluation.read(tmp_path / "eval.json") == found
    said = json.loads((tmp_path / "eval.json").read_text())
    assert said["per_kind"]["y"]["value"] == 0.0 and said["pass_at"]["2"]["value"] == 0.5
    assert "pass@2       50.0% (95 %: 9.5 to 90.5)" in evaluation_text(found)


def test_the_mean_reward_has_turns_of_all_sequences_in_it() -> None:
    """As the reward of a training step: what was earned before a history was compacted, too."""
    task = Task("a", 1)
    before = Branch(
        tokens=[1, 2], loss_mask=[0, 1], logps=[0.0, -1.0], versions=[-1, 0],
        turn_spans=[TurnSpan(action_start=1, action_end=2, observation_end=2)],
        turn_rewards=[0.5], is_history=True,
    )  # fmt: skip
    one = rollout(task, 1.0, turn_rewards=[0.25], branches=[before])
    found = Evaluation.of([(task, one)], title="t", about={}, seconds=1.0)
    assert found.mean_reward.value == one.total_reward == 1.75


def test_only_common_tasks_are_compared_and_the_others_are_counted_out_loud() -> None:
    old = result({f"t{n}": float(n < 4) for n in range(12)})
    new = result({f"t{n}": float(n == 0 or n > 3) for n in range(10)} | {"u": 1.0}, "new")
    one = PairedComparison.of(old, new)
    assert (len(one.pairs), len(one.won), len(one.lost)) == (10, 6, 3)
    assert (one.success(0).value, one.success(1).value) == (0.4, 0.7)
    assert one.difference.value == pytest.approx(0.3)
    assert one.p_value == pytest.approx(2 * (1 + 9 + 36 + 84) / 512)
    text = comparison_text(one)
    assert "no difference that these tasks can show, on the 10 tasks that both played (3 " in text
    assert "6 won, 3 lost, p = 0.51 (McNemar's exact test)" in text
    lost, won = text.index("  lost:"), text.index("  won:")
    assert lost < text.index("t1  prompt of t1") < won < text.index("t9  prompt of t9")
    with pytest.raises(ValueError, match="old and new have no task in common"):
        PairedComparison.of(old, result({"z": 1.0}, "new"))


def test_the_worst_change_comes_first_and_long_tables_are_cut() -> None:
    old = result({f"t{n:02}": 1.0 for n in range(30)}, num_samples=4)
    new = result({f"t{n:02}": (n % 4) / 4 for n in range(30)}, "new", num_samples=4)
    one = PairedComparison.of(old, new)
    changes = [after.share - before.share for before, after in one.lost]
    assert changes == sorted(changes) and changes[0] == -1.0
    text = comparison_text(one)
    assert "new against old: worse" in text and "and 18 more" in text
    assert "exact sign test over the tasks" in text


def test_the_command_finds_evaluations_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    result({"t": 0.0}).write(tmp_path / "a" / "eval.json")
    result({"t": 0.0}).write(tmp_path / "b" / "eval-untrained.json")
    result({"t": 1.0}).write(tmp_path / "b" / "eval-before.json")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["compare", a, b, f"{b}:untrained", f"{a}/eval.json"]) == 0
    said = capsys.readouterr().out
    assert f"{b} (before RL) against {a}: " in said
    assert f"{b} (untrained) against {a}: " in said and f"{a}/eval.json against {a}: " in said
    for arguments, message in [
        ((a,), "1 given; name two or more"),
        ((a, f"{b}:after"), "b has eval-before.json, eval-untrained.json"),
        ((a, f"{a}/nothing"), "eval MODEL"),
    ]:
        assert main(["compare", *arguments]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "a" / "eval.json").write_text('{"title": "x"}')
    assert main(["compare", a, b]) == 2
    assert "is not the result of an evaluation" in capsys.readouterr().err


def test_options_that_cannot_be_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="--k 0: must be 1 or more"):
        EvalOptions(model="smollm2", k=0)
    with pytest.raises(ValueError, match="--temperature 0 with --k 2: greedy samples are all ali"):
        EvalOptions(model="smollm2", k=2, temperature=0.0)
    (tmp_path / "config.json").write_text('{"preset": "tiny"}')
    assert main(["eval", str(tmp_path)]) == 2
    assert "neither a model-trained nor a checkpoint yet" in capsys.readouterr().err
