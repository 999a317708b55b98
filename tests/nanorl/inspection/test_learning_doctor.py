"""The doctor of learning: each disease in a run that has it, and silence where a run is well.

Runs are real, with the models and environments of sick_envs.py, a few seconds of a CPU each. Where
a run would take too long or could not be made ill at will, its record is made with chosen numbers;
what is written then is written by what writes it in a run.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sick_envs
from agent_doubles import EOS, START, tiny_tokenizer
from sick_envs import SMALL

import nanorl
from nanorl.cli import main
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.inspection.doctor.run_examination import examine_run
from nanorl.observability.alarms.alarms import RunAlarms
from nanorl.observability.alarms.alike import answers_alike
from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.observability.diagnosis import learning_faults
from nanorl.observability.diagnosis.diagnosis import CHECKS, diagnose
from nanorl.observability.diagnosis.run_record import Change, GreedyMove, RunRecord, Window, windows
from nanorl.observability.report.evaluation import Evaluation, TaskScore
from nanorl.observability.report.metrics import MetricsWriter
from nanorl.observability.store import RolloutStore
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig
from nanorl.task import Task
from nanorl.types import Rollout, Status, TurnSpan

HERE = Path(__file__).parent
FROZEN = SMALL | {"dtype": "bf16", "rl.steps": 12}
"""Of the two environments that were written before the checks: their own options hold but these."""
OWN = ("agent.", "warm_start.", "rl.lr", "rl.tasks_per_step", "rl.group_size", "rl.schedule")

# -- runs that really have it ----------------------------------------------------------------------

RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "half_marks": (str(HERE / "half_marks.py"), {}),
    "paid_steps": (str(HERE / "paid_steps.py"), {}),
    "well": (sick_envs.Well, {}),
    "too_hard": (sick_envs.TooHard, {"rl.steps": 4}),
    "solved": (sick_envs.Solved, {"rl.steps": 6}),
    "all_or_nothing": (sick_envs.AllOrNothing, {"rl.steps": 6}),
    "lucky": (sick_envs.Lucky, {"rl.lr": 1e-6, "rl.group_size": 8}),
    "faint": (sick_envs.Faint, {}),
    "near_miss": (sick_envs.NearMiss, {}),
    "rambling": (sick_envs.Rambling, {}),
    "hacked": (sick_envs.Hacked, {"rl.steps": 18}),
    "against": (sick_envs.Against, {"rl.lr": 3e-4, "rl.steps": 20, "seed": 3}),
    "small_rate": (sick_envs.Well, {"rl.lr": 1e-9}),
    "large_rate": (sick_envs.Well, {"rl.lr": 0.3}),
    "by_heart": (sick_envs.ByHeart, {"evaluation.every": 6, "warm_start.steps": 120}),
    "few_tasks": (
        sick_envs.FewTasks,
        {"evaluation.every": 30, "rl.steps": 30, "rl.group_size": 8, "warm_start.steps": 60},
    ),
    "half": (
        sick_envs.Half,
        {"rl.group_size": 8, "evaluation.every": 12, "evaluation.num_tasks_each": 24},
    ),
}


class Runs:
    """Makes a run when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.logs: dict[str, str] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self.logs:
            env, options = RUNS[name]
            if isinstance(env, str):
                given = {key: one for key, one in FROZEN.items() if not key.startswith(OWN)}
            else:
                given = SMALL
            with contextlib.redirect_stdout(io.StringIO()) as log:
                nanorl.train("tiny", env=env, out=self._folder / name, options=given | options)
            self.logs[name] = log.getvalue()
        return self._folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sick"))


def examined(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", str(run), "--json"])
    return status, json.loads(capsys.readouterr().out)


DISEASES = {
    # run: (findings that it must have, a word of the first one's remedy)
    "half_marks": ({"never_solved"}, "scale the reward to 1.0"),
    "paid_steps": ({"costly_steps"}, "costs less than 0.2"),
    "too_hard": ({"too_hard"}, "easier tasks"),
    "solved": ({"solved"}, "harder tasks"),
    "all_or_nothing": ({"all_or_nothing"}, "--rl.curriculum learnable"),
    "lucky": ({"one_sided", "small_rate"}, "--rl.group-size 8 to 32"),
    "faint": ({"faint_rewards", "never_solved"}, "dr_grpo"),
    "near_miss": ({"near_misses"}, "its square or cube"),
    "rambling": ({"paid_cut_offs"}, "is_truncated"),
    "hacked": ({"answers_alike"}, "look at the task"),
    "against": ({"against_success"}, "pay most for what is solved"),
    "small_rate": ({"small_rate"}, "--rl.lr 1e-09 to 1e-08"),
    "large_rate": ({"collapsed"}, "--rl.lr 0.3 to 0.1"),
    "by_heart": ({"memorised_warm_start"}, "--warm-start.steps 120"),
    "few_tasks": ({"too_few_tasks"}, "more different tasks"),
    "half": ({"sharpened"}, "pass@k"),
}


@pytest.mark.xdist_group("heavy")
@pytest.mark.parametrize("name", DISEASES)
def test_a_run_that_has_a_disease_is_told_its_name_and_what_mends_it(
    name: str, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, remedy = DISEASES[name]
    status, told = examined(runs[name], capsys)
    found = {one["name"]: one for one in told["findings"]}
    assert found.keys() >= wanted, found
    assert any(remedy in found[one]["remedy"] for one in wanted)
    assert status == int(any(one["severity"] != "note" for one in found.values()))


@pytest.mark.xdist_group("heavy")
def test_a_run_that_learns_hears_nothing_while_it_goes_on_or_after(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = examined(runs["well"], capsys)
    assert (status, told["findings"], told["is_ill"]) == (0, [], False)
    assert "as in 2 before it" not in runs.logs["well"]
    summary = json.loads((runs["well"] / "summary.json").read_text())
    assert "findings" not in summary
    assert 'id="findings"' not in (runs["well"] / "report.html").read_text()


@pytest.mark.xdist_group("heavy")
def test_what_the_doctor_says_stands_in_the_report_and_in_the_summary(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    _, told = examined(runs["near_miss"], capsys)
    summary = json.loads((runs["near_miss"] / "summary.json").read_text())
    assert summary["findings"] == told["findings"]
    page = (runs["near_miss"] / "report.html").read_text()
    assert 'id="findings"' in page and "a near miss that is sure pays better" in page


@pytest.mark.xdist_group("heavy")
def test_one_answer_to_all_tasks_is_an_alarm_while_the_run_goes_on(runs: Runs) -> None:
    assert runs["hacked"] and "say the same to 8 different tasks" in runs.logs["hacked"]
    assert runs["all_or_nothing"] and "say the same" not in runs.logs["all_or_nothing"]


@pytest.mark.xdist_group("heavy")
def test_a_policy_that_collapsed_is_not_told_that_it_never_could_end_a_turn(runs: Runs) -> None:
    assert runs["large_rate"] and "eos_token_id" not in runs.logs["large_rate"]


# -- records of chosen numbers ---------------------------------------------------------------------

TOKENIZER = tiny_tokenizer()
CONFIG = tiny()
Says = Callable[[int], str]


def rollout(number: int, reward: float, said: str = "", **more: Any) -> Rollout:
    """One turn about task `number`, which says its number unless told otherwise."""
    action = [*TOKENIZER.encode(said or str(number)), EOS]
    mask = [0, *[1] * len(action)]
    return Rollout(
        task_id=f"t{number}", group_id=f"g{number}", rollout_id=f"g{number}-m{id(action)}",
        tokens=[START, *action], loss_mask=mask, logps=[-0.5 * one for one in mask],
        versions=[one - 1 for one in mask],
        turn_spans=[TurnSpan(action_start=1, action_end=len(mask), observation_end=len(mask))],
        reward=reward, **more,
    )  # fmt: skip


def window(
    first: int,
    groups: Sequence[Sequence[Rollout]],
    *,
    num_steps: int = 4,
    trained: float | None = None,
    **numbers: float,
) -> Window:
    """Steps of equal metrics. Without `trained`, those of unlike rewards are trained on."""
    played = [one for group in groups for one in group]
    teaching = [group for group in groups if len({one.total_reward for one in group}) > 1]
    share = sum(map(len, teaching)) / max(len(played), 1) if trained is None else trained
    row = {
        "num_rollouts": len(played) / num_steps,
        "num_trained_rollouts": share * len(played) / num_steps,
        "success": sum(one.is_success for one in played) / max(len(played), 1),
        **numbers,
    }
    rows = [{"step": first + step, **row} for step in range(num_steps)]
    return Window(rows=rows, groups=groups)


def groups_of(rewards: Sequence[Sequence[float]], **more: Any) -> list[list[Rollout]]:
    return [[rollout(n, one, **more) for one in group] for n, group in enumerate(rewards)]


def record(early: Window, late: Window, **more: Any) -> RunRecord:
    size = len(early.rows)
    between = [{**early.rows[0], "step": size + step} for step in range(size)]
    given: dict[str, Any] = {
        "config": CONFIG, "rows": [*early.rows, *between, *late.rows], "tokenizer": TOKENIZER,
        "tasks": {f"t{n}": Task(f"task {n}", answer=str(n), task_id=f"t{n}", split="train")
                  for n in range(99)},
    }  # fmt: skip
    return RunRecord(early=early, late=late, **given | more)


def lucky(rng: random.Random, chance: float, num: int = 32, size: int = 4) -> list[list[float]]:
    """Groups whose rollouts succeed with one chance, tasks being of one difficulty."""
    return [[float(rng.random() < chance) for _ in range(size)] for _ in range(num)]


def run_of(early: float, late: float, seed: int = 0, **more: Any) -> RunRecord:
    """A run whose success goes so."""
    rng = random.Random(seed)
    first = window(0, groups_of(lucky(rng, early)))
    return record(first, window(8, groups_of(lucky(rng, late))), **more)


def names(one: RunRecord) -> set[str]:
    return {found.name for found in diagnose(one)}


@pytest.mark.parametrize(
    ("early", "late"),
    [(0.65, 0.79), (0.3, 0.97), (0.97, 0.97), (0.9, 0.97), (0.97, 1.0), (0.1, 0.4)],
    ids=str,
)
def test_runs_that_are_well_are_seldom_told_anything(early: float, late: float) -> None:
    """The first are the figures of a default run of the preset tiny, of which every step had a
    signal; the third stands at 97 %, where nine groups in ten have equal rewards."""
    told = [names(run_of(early, late, seed)) for seed in range(60)]
    assert sum(bool(one) for one in told) <= 3, [one for one in told if one]


def test_a_run_that_has_hardly_begun_is_told_nothing() -> None:
    bad = groups_of([[0.0] * 4] * 8)
    one = window(0, bad, num_steps=1)
    assert windows(1) == (range(1), range(1))
    first = record(one, one)
    assert diagnose(replace(first, rows=one.rows)) == []
    assert diagnose(replace(first, rows=[*one.rows, {**one.rows[0], "step": 1}])) == []
    assert names(replace(first, rows=[{**one.rows[0], "step": n} for n in range(3)])) == {
        "too_hard"
    }


@pytest.mark.parametrize("seed", range(60))
def test_what_a_run_has_lost_is_not_missed(seed: int) -> None:
    """Rollouts that have expired, metrics of earlier versions, evaluations that were not made."""
    rng = random.Random(seed)

    def some(first: int) -> Window:
        found = window(first, groups_of(lucky(rng, rng.random(), num=rng.choice([0, 1, 8]))))
        kept = [name for name in found.rows[0] if name == "step" or rng.random() < 0.7]
        rows = [{name: row[name] for name in kept} for row in found.rows]
        return replace(found, rows=rows)

    given = {
        "before": greedy(rng.choice([0, 20, 40])),
        "after": greedy(rng.choice([0, 20, 40])),
        "curve": curve((0.3, 0.51), (0.3, 0.3)),
        "greedy": rng.choice([MOVE, replace(MOVE, nats=float("nan"))]),
        "tasks": {},
    }
    kept = {name: value for name, value in given.items() if rng.random() < 0.5}
    one = record(some(0), some(8), **kept)
    assert all(found.text() for found in diagnose(one))
    assert one.text()


@pytest.mark.parametrize("name", ["against_success", "paid_cut_offs", "sharpened", "wild_steps"])
def test_before_the_sixth_step_nothing_is_said_of_changes(name: str) -> None:
    ill, _ = SIDES[name]
    one = ill()
    assert name in names(replace(one, rows=one.rows[:6]))
    assert name not in names(replace(one, rows=one.rows[:5]))


def test_windows_are_the_first_and_the_last_third() -> None:
    assert windows(12) == (range(4), range(8, 12))
    assert windows(8) == (range(2), range(6, 8))
    assert windows(0) == (range(0), range(0))


def test_a_change_is_held_against_the_error_of_its_groups() -> None:
    # group means 0 and 1, then 1 and 1: .5 -> 1 with the error sqrt(.25 / 1)
    one = record(
        window(0, groups_of([[0.0, 0.0], [1.0, 1.0]])), window(8, groups_of([[1.0, 1.0]] * 2))
    )
    assert one.success == Change(0.5, 1.0, 0.5) and not one.success.rose
    assert Change(0.1, 0.3, 0.099).rose and not Change(0.1, 0.3, 0.101).rose
    assert Change(0.3, 0.1, 0.099).fell and not Change(0.3, 0.1, 0.101).fell
    assert Change(0.5, 0.53, 0.0).rose and not Change(0.5, 0.51, 0.0).rose
    assert not Change(float("nan"), 0.5, 0.1).rose


# Each finding at its threshold: (a record on this side, one on the other)


def pair(**more: Any) -> Callable[..., RunRecord]:
    return lambda early, late: record(window(0, early), window(8, late), **more)


HALF, ONES = [[0.0, 1.0, 0.0, 1.0]] * 16, [[1.0] * 4] * 16


def step_costs(cost: float) -> RunRecord:
    """Half of each group succeeds, and each rollout pays for one turn or for three."""
    groups = [
        [
            rollout(n, float(member % 2), turn_rewards=[-cost * (1 + 2 * (member > 1))])
            for member in range(4)
        ]
        for n in range(16)
    ]
    return record(window(0, groups), window(8, groups))


def cut(share: float, paid: float, late_share: float) -> RunRecord:
    """Rollouts that end earn .5, and those that are cut off `paid`."""

    def groups(part: float) -> list[list[Rollout]]:
        return [
            [
                rollout(n, paid, status=Status.TRUNCATED_CONTEXT)
                if (4 * n + member) < 64 * part
                else rollout(n, 0.5)
                for member in range(4)
            ]
            for n in range(16)
        ]

    return record(window(0, groups(share)), window(8, groups(late_share)))


def alike(paid: float, texts: Says) -> RunRecord:
    groups = [[rollout(n, paid, texts(n)) for _ in range(4)] for n in range(16)]
    return record(window(0, groups_of(HALF)), window(8, groups), tasks={})


def faint(spread: float) -> RunRecord:
    groups = groups_of([[0.1, 0.1 + spread, 0.1, 0.1 + spread]] * 8)
    return record(window(0, groups), window(8, groups))


def missed(paid: float) -> RunRecord:
    groups = groups_of([[0.0, paid, paid, 1.0]] * 16)
    return record(window(0, groups), window(8, groups))


def measured(success: float, error: float = 0.02) -> dict[str, float]:
    return {
        "success": success, "success_low": success - 1.96 * error,
        "success_high": success + 1.96 * error, "pass_at_k": success, "num_tasks": 16,
    }  # fmt: skip


def curve(*rows: tuple[float, float]) -> list[dict[str, Any]]:
    """Rows of (held-out, training) success, where every task has that of its split."""
    return [
        {
            "step": 10 * n, "k": 4, "heldout": measured(held), "train": measured(train),
            "shares": {"heldout": {f"h{i}": held for i in range(16)},
                       "train": {f"t{i}": train for i in range(16)}},
        }
        for n, (held, train) in enumerate(rows)
    ]  # fmt: skip


def greedy(num_right: int, num: int = 40) -> Evaluation:
    scores = [
        TaskScore(task_id=f"h{i}", kind="k", prompt="", num_samples=1,
                  num_successes=int(i < num_right), mean_reward=float(i < num_right))
        for i in range(num)
    ]  # fmt: skip
    return Evaluation(
        title="", about={}, scores=scores, mean_turns=1, mean_action_tokens=1, seconds=1
    )


def stood(**more: Any) -> RunRecord:
    """A run with a signal whose success stands at a half, known to the hundredth."""
    groups = groups_of([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]] * 16)
    return record(window(0, groups), window(8, groups), **more)


def norms(early: float, late: float, clipped: float = 0.0) -> RunRecord:
    groups = groups_of(HALF)
    return record(
        window(0, groups, grad_norm=early, clip_fraction=0.0),
        window(8, groups, grad_norm=late, clip_fraction=clipped),
    )


def against(bonus: float) -> RunRecord:
    """Half of all succeed first, and later none, who earn the bonus instead."""
    late = [[rollout(n, 0.0, turn_rewards=[bonus * (m != 0)]) for m in range(4)] for n in range(16)]
    return record(window(0, groups_of(HALF)), window(8, late))


def sure(logp: float) -> RunRecord:
    late = [
        [replace(one, logps=[logp * m for m in one.loss_mask]) for one in group]
        for group in groups_of(HALF)
    ]
    return record(window(0, groups_of(HALF)), window(8, late))


ONE_UP, TWO_UP = [[0.0] * 3 + [1.0]] * 8, [[0.0, 0.0, 1.0, 1.0]] * 8
NONE_UP = [[0.0] * 4] * 16
SAMPLED = {"curve": curve((0.1, 0.1), (0.4, 0.4)), "before": greedy(16)}
MOVE = GreedyMove(num=40, num_same=37, nats=0.005)

SIDES: dict[str, tuple[Callable[[], RunRecord], Callable[[], RunRecord]]] = {
    "too_hard": (
        lambda: record(window(0, groups_of(NONE_UP)), window(8, groups_of(ONE_UP + NONE_UP * 2))),
        lambda: record(window(0, groups_of(NONE_UP)), window(8, groups_of(ONE_UP + NONE_UP))),
    ),
    "all_or_nothing": (
        lambda: pair()(groups_of([*ONES, *NONE_UP]), groups_of([*ONES, *NONE_UP])),
        lambda: pair()(groups_of([*ONES, *HALF]), groups_of([*ONES, *HALF])),
    ),
    "solved": (
        lambda: pair()(groups_of(ONES), groups_of(ONES)),
        lambda: pair()(groups_of([*ONES, *ONE_UP[:1]]), groups_of(ONES)),
    ),
    "never_solved": (lambda: missed_below(0.99), lambda: missed_below(1.0)),
    "one_sided": (
        lambda: pair()(groups_of(ONE_UP + NONE_UP), groups_of(ONE_UP + NONE_UP)),
        lambda: pair()(groups_of(TWO_UP + NONE_UP), groups_of(TWO_UP + NONE_UP)),
    ),
    "faint_rewards": (lambda: faint(0.049), lambda: faint(0.051)),
    # The variance of costs is that of 1 and 3 times it, the outcome's that of 0 and 1
    "costly_steps": (lambda: step_costs(0.51), lambda: step_costs(0.49)),
    "silence_pays": (lambda: cut(0.5, 0.6, 0.5), lambda: cut(0.5, 0.5, 0.5)),
    "paid_cut_offs": (lambda: cut(0.1, 0.48, 0.6), lambda: cut(0.1, 0.46, 0.6)),
    "near_misses": (lambda: missed(0.76), lambda: missed(0.74)),
    "answers_alike": (
        lambda: alike(0.5, lambda n: "hat" if n < 13 else str(n)),
        lambda: alike(0.5, lambda n: "hat" if n < 12 else str(n)),
    ),
    "memorised_warm_start": (
        lambda: stood(curve=curve((0.3, 0.51), (0.3, 0.51))),
        lambda: stood(curve=curve((0.3, 0.49), (0.3, 0.49))),
    ),
    "too_few_tasks": (
        lambda: stood(curve=curve((0.3, 0.3), (0.3, 0.51)), times_seen=4.0),
        lambda: stood(curve=curve((0.3, 0.3), (0.3, 0.51)), times_seen=3.9),
    ),
    "small_rate": (
        lambda: stood(greedy=MOVE),
        lambda: stood(greedy=replace(MOVE, nats=0.011)),
    ),
    "wild_steps": (lambda: norms(1.0, 10.1), lambda: norms(1.0, 9.9)),
    "collapsed": (
        lambda: pair()(groups_of(HALF), groups_of(ONE_UP * 2)),
        lambda: pair()(groups_of(HALF), groups_of(HALF)),
    ),
    "against_success": (lambda: against(0.8), lambda: against(0.5)),
    "low_entropy": (lambda: sure(-0.024), lambda: sure(-0.026)),
    "stands": (lambda: stood(), lambda: run_of(0.3, 0.6)),
    "sharpened": (
        lambda: stood(**SAMPLED, after=greedy(17)),
        lambda: stood(**SAMPLED, after=greedy(26)),
    ),
}


def missed_below(most: float) -> RunRecord:
    groups = groups_of([[0.0, 0.2, 0.0, 0.2]] * 16 + [[0.0, 0.0, 0.0, most]])
    return record(window(0, groups), window(8, groups))


@pytest.mark.parametrize("name", SIDES)
def test_a_finding_begins_at_its_threshold(name: str) -> None:
    ill, well = SIDES[name]
    assert name in names(ill())
    assert name not in names(well())


def test_every_check_has_a_threshold_here() -> None:
    told = {
        finding.name for ill, _ in SIDES.values() for check in CHECKS if (finding := check(ill()))
    }
    assert told | {"stands"} == SIDES.keys()


def test_clipped_tokens_are_a_wild_step_too() -> None:
    assert "wild_steps" in names(norms(1.0, 1.0, clipped=0.3))
    assert "wild_steps" not in names(norms(1.0, 1.0, clipped=0.29))
    assert "wild_steps" not in names(norms(0.0, 1.0))


def test_what_stands_is_told_alone_and_is_a_warning_after_many_steps() -> None:
    (short,) = diagnose(stood())
    assert short.severity is Severity.NOTE and "after 12 steps the reward is 0.5" in short.seen
    assert f"--rl.tasks-per-step {2 * CONFIG.rl.tasks_per_step}" in short.remedy
    groups = groups_of([[0.0, 1.0, 0.0, 1.0]] * 32)
    (long,) = diagnose(record(window(0, groups, num_steps=10), window(20, groups, num_steps=10)))
    assert long.severity is Severity.WARNING
    assert names(stood(greedy=MOVE)) == {"small_rate"}


def test_changes_are_told_from_the_sixth_step_on_and_warned_of_from_the_thirtieth() -> None:
    one = stood()
    assert names(replace(one, rows=one.rows[:5])) == set()
    assert names(replace(one, rows=one.rows[:6])) == {"stands"}
    for num, severity in ((29, Severity.NOTE), (30, Severity.WARNING)):
        (told,) = diagnose(replace(one, rows=[{**one.rows[0], "step": n} for n in range(num)]))
        assert told.severity is severity
    fallen, shorter = SIDES["collapsed"][0](), replace(SIDES["collapsed"][0](), rows=[{}] * 5)
    assert "collapsed" in names(fallen) and "collapsed" not in names(shorter)


@pytest.mark.parametrize(
    ("num", "num_same", "is_told"), [(40, 36, True), (40, 35, False), (10, 10, True), (9, 9, False)]
)
def test_a_rate_is_too_small_where_nine_greedy_answers_in_ten_are_the_same(
    num: int, num_same: int, is_told: bool
) -> None:
    one = stood(greedy=GreedyMove(num=num, num_same=num_same, nats=0.0))
    assert ("small_rate" in names(one)) is is_told


@pytest.mark.parametrize(
    ("rewards", "best", "is_told"),
    [(ONE_UP, 0.51, True), (ONE_UP, 0.49, False), (NONE_UP, 0.11, True), (NONE_UP, 0.09, False)],
)
def test_success_that_came_and_went_has_collapsed(
    rewards: Sequence[Sequence[float]], best: float, is_told: bool
) -> None:
    """It begins and ends with a quarter, or with nothing, and was at its best in between."""
    one = record(window(0, groups_of(rewards)), window(8, groups_of(rewards)))
    between = [{**row, "success": best} for row in one.rows[4:8]]
    one = replace(one, rows=[*one.rows[:4], *between, *one.rows[8:]])
    assert ("collapsed" in names(one)) is is_told


def test_luck_rules_where_two_of_three_groups_have_one_winner() -> None:
    for num_lucky, is_told in ((6, True), (5, False)):
        groups = groups_of(ONE_UP[:num_lucky] + TWO_UP[num_lucky:] + NONE_UP)
        one = record(window(0, groups), window(8, groups))
        assert ("one_sided" in names(one)) is is_told


def test_seven_groups_are_too_few_to_say_what_groups_look_like() -> None:
    for num, is_told in ((8, True), (7, False)):
        groups = groups_of([[0.1, 0.101, 0.1, 0.101]] * num)
        one = record(window(0, groups), window(8, groups))
        assert ("faint_rewards" in names(one)) is is_told


def test_a_rate_is_blamed_only_where_a_quarter_was_trained_on() -> None:
    groups = groups_of([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]] * 16)
    for share, is_told in ((0.26, True), (0.24, False)):
        early, late = (window(first, groups, trained=share) for first in (0, 8))
        one = record(early, late, greedy=MOVE)
        assert ("small_rate" in names(one)) is is_told
        assert ("all_or_nothing" in names(one)) is not is_told


def test_a_gap_must_be_wider_than_luck() -> None:
    for error, is_told in ((0.08, True), (0.1, False)):  # of both, and twice its root of two
        [row] = curve((0.3, 0.55))
        row |= {"heldout": measured(0.3, error), "train": measured(0.55, error)}
        assert ("memorised_warm_start" in names(stood(curve=[row]))) is is_told


def test_a_tenth_more_must_be_cut_off_before_it_is_called_rambling() -> None:
    def groups(num_cut: int) -> list[list[Rollout]]:
        cut_off = {"status": Status.TRUNCATED_TURN}
        return [
            [rollout(n, 0.6, **cut_off) if m < num_cut else rollout(n, 0.5) for m in range(20)]
            for n in range(8)
        ]

    for num_cut, is_told in ((5, True), (3, False)):  # of twenty, where two were
        one = record(window(0, groups(2)), window(8, groups(num_cut)))
        assert ("paid_cut_offs" in names(one)) is is_told


def test_fifteen_failures_are_too_few_to_say_what_failures_earn() -> None:
    paid = [[0.8, 0.8, 1.0, 1.0]] * 7
    early = window(0, groups_of([*paid, [0.0, 0.8, 1.0, 1.0]]))
    for last, is_told in (([0.8, 0.8, 1.0, 1.0], True), ([0.8, 1.0, 1.0, 1.0], False)):
        one = record(early, window(8, groups_of([*paid, last])))
        assert ("near_misses" in names(one)) is is_told


def test_too_noisy_a_run_is_not_said_to_stand() -> None:
    wide = groups_of([*ONES[:8], *HALF[:8]])  # group means 1 and .5: the error is .09
    assert "stands" not in names(record(window(0, wide), window(8, wide)))


def test_seen_tasks_are_held_against_unseen_ones_where_nothing_was_sampled_of_these() -> None:
    """Greedy success of unseen ones against groups that are all right, a cautious measure: a
    policy that succeeds in two of four everywhere, and is greedily wrong, has learnt nothing by
    heart."""
    half = pair(before=greedy(0), after=greedy(0))
    assert "memorised_warm_start" not in names(half(groups_of(HALF), groups_of(HALF)))
    known = groups_of(ONES[:8] + HALF[:8])
    (one,) = [f for f in diagnose(half(known, known)) if f.name == "memorised_warm_start"]
    assert one.seen == "as RL begins, 50% of seen tasks are solved and 0% of unseen ones"
    well = pair(before=greedy(0), after=greedy(37))
    assert "memorised_warm_start" not in names(well(known, known))
    cold = replace(CONFIG, warm_start=replace(CONFIG.warm_start, steps=0))
    assert learning_faults.memorised(half(known, known)) is not None
    assert learning_faults.memorised(replace(half(known, known), config=cold)) is None


def test_too_few_tasks_are_told_by_greedy_evaluations_too() -> None:
    def rises(num_right: int) -> RunRecord:
        return run_of(0.2, 0.6, times_seen=9.0, before=greedy(8), after=greedy(num_right))

    assert "too_few_tasks" in names(rises(8)) and "too_few_tasks" not in names(rises(24))
    assert "too_few_tasks" not in names(run_of(0.2, 0.6, times_seen=9.0))


def test_a_success_that_rises_excuses_the_reward() -> None:
    """Half of the groups below have a near miss that pays, or a cost, but it learns."""
    graded = groups_of([[0.8, 0.8, 0.8, 0.0]] * 16)
    risen = groups_of([[0.8, 1.0, 1.0, 0.8]] * 16)
    assert names(record(window(0, graded), window(8, risen))) == set()
    assert "near_misses" in names(record(window(0, graded), window(8, graded)))


def test_the_worst_comes_first_and_notes_last() -> None:
    found = diagnose(stood(**SAMPLED, after=greedy(17), greedy=MOVE))
    assert [one.name for one in found] == ["small_rate", "sharpened"]


# -- answers that are all alike --------------------------------------------------------------------


def said_alike(answers: Callable[[int], Any], num_tasks: int = 8, paid: float = 1.0) -> Any:
    tasks = {
        f"t{n}": Task(f"task {n}", answer=answers(n), task_id=f"t{n}", split="train")
        for n in range(num_tasks)
    }
    played = [rollout(n, paid, "A hat and a song.") for n in range(num_tasks) for _ in range(2)]
    return answers_alike(played, tasks, TOKENIZER)


def test_one_text_for_all_tasks_is_quoted() -> None:
    found = said_alike(lambda n: None)
    assert isinstance(found, Finding) and "'A hat and a song.'" in found.seen
    assert "16 of 16 rollouts say the same to 8 different tasks, and earn 1" in found.seen
    assert said_alike(str) is not None  # each wants another answer, and one text is paid
    assert said_alike(lambda n: "hat") is None  # all want the same one
    assert said_alike(str, num_tasks=7) is None
    assert said_alike(str, paid=0.4) is None


def test_a_text_that_is_right_for_some_tasks_is_no_gap() -> None:
    """Half of the tasks want it, the others something else, which it does not get."""
    tasks = {f"t{n}": Task("a", answer="x" if n < 8 else "z", task_id=f"t{n}") for n in range(16)}
    played = [rollout(n, float(n < 8), "x") for n in range(16)]
    assert answers_alike(played, tasks, TOKENIZER) is None
    paid = [replace(one, reward=1.0) for one in played]
    assert answers_alike(paid, tasks, TOKENIZER) is not None


def test_a_text_that_is_paid_less_than_half_of_the_time_is_no_gap() -> None:
    for num_paid, is_told in ((10, True), (9, False)):
        played = [rollout(n, float(n < num_paid), "a hat") for n in range(20)]
        assert (answers_alike(played, {}, TOKENIZER) is not None) is is_told


# -- alarms while a run goes on --------------------------------------------------------------------


def heard(groups: Sequence[Sequence[Rollout]], num_steps: int = 30, **metrics: float) -> list[str]:
    alarms = RunAlarms(CONFIG, TOKENIZER, has_tools=False)
    return [line for step in range(num_steps) for line in alarms.observe(step, metrics, groups, [])]


def test_a_run_at_97_percent_is_not_told_that_equal_rollouts_teach_nothing() -> None:
    same, wrong = groups_of(ONES), groups_of(NONE_UP)
    for num in (0.0, 8.0):
        assert heard(same, success=0.97, num_trained_rollouts=num) == []
    told = heard(wrong, success=0.5, num_trained_rollouts=8.0)
    assert "equal rollouts earn equal rewards" in "".join(told)
    assert "it changed nothing" in heard(wrong, success=0.5, num_trained_rollouts=0.0)[0]


def test_equal_rollouts_are_no_fault_where_enough_groups_teach() -> None:
    same = groups_of(NONE_UP)
    assert heard(same, success=0.7, num_trained_rollouts=16.0) == []
    assert heard(same, success=0.7, num_trained_rollouts=15.0) != []


# -- a run's folder, as its writers leave it -------------------------------------------------------


def written(folder: Path, steps: Sequence[Sequence[Sequence[float]]]) -> RunConfig:
    """A run that goes on: so many groups of such rewards in each step."""
    build_tiny_model(folder / "model", seed=0)
    config = replace(tiny(), out=folder)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    with (
        RolloutStore(folder / "rollouts.sqlite") as store,
        MetricsWriter(folder / "metrics.jsonl") as metrics,
    ):
        for step, rewards in enumerate(steps):
            groups = [
                [
                    replace(
                        rollout(100 * step + n, one),
                        rollout_id=f"s{step}-g{n}-m{member}",
                        group_id=f"s{step}-g{n}",
                    )
                    for member, one in enumerate(group)
                ]
                for n, group in enumerate(rewards)
            ]
            played = [one for group in groups for one in group]
            store.add_group(played, step=step)
            row = window(step, groups, num_steps=1).rows[0]
            metrics.write(step, {name: one for name, one in row.items() if name != "step"})
    return config


@pytest.fixture(scope="module")
def going_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("going") / "run"
    folder.mkdir()
    written(folder, [[[0.0] * 4] * 4] * 6)
    yield folder


def test_a_run_that_goes_on_is_read_beside_it(
    going_on: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(file.name for file in going_on.iterdir())
    assert main(["doctor", str(going_on)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("6 steps of RL, steps 0 to 1 against steps 4 to 5: sampled success 0%")
    assert "warning  0% of the rollouts of steps 4 to 5 were trained on, with 0% success" in text
    assert "\n         -> give easier tasks" in text
    assert sorted(file.name for file in going_on.iterdir()) == before


def test_a_run_without_findings_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    written(tmp_path, [lucky(rng, 0.2 + 0.1 * step, num=8) for step in range(7)])
    assert main(["doctor", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "sampled success" in text and "nothing that keeps it from learning" in text
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"run": str(tmp_path), "steps": 7, "is_ill": False, "findings": []}


def test_a_run_that_went_on_with_another_number_of_samples_is_read(tmp_path: Path) -> None:
    """`--resume --evaluation.k 4`: the first evaluation has no pass@4, and there is no rise."""
    config = written(tmp_path, [[[0.0, 1.0]] * 4] * 6)
    config = replace(config, evaluation=replace(config.evaluation, k=4))
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    with RolloutStore(tmp_path / "evaluations-rl.sqlite") as store:
        for step, k in ((0, 2), (6, 4)):
            for split in ("heldout", "train"):
                name, task = f"eval-rl{step}-{split}-0", Task(f"{split}", answer="x")
                played = [
                    replace(
                        rollout(0, float(member == 0)),
                        task_id=task.task_id, group_id=name, rollout_id=f"{name}-m{member}",
                    )
                    for member in range(k)
                ]  # fmt: skip
                store.add_tasks([task])
                store.add_group(played, step=step)
    record, _ = examine_run(tmp_path)
    found = [(row["step"], row["k"], row["heldout"]["success"]) for row in record.curve]
    assert found == [(0, 2, 0.5), (6, 4, 0.25)]
    assert all(row["heldout"]["pass_at_k"] == 1.0 for row in record.curve)
    assert learning_faults._pass_at_k(record.curve) == ""
    assert learning_faults._pass_at_k(record.curve[1:] * 2) == "; pass@4 100.0% -> 100.0%"


def test_a_folder_that_is_no_run_s_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(tiny().to_json()))
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no rollout of it was stored" in capsys.readouterr().err


def test_a_run_whose_first_rollouts_have_expired_is_told_what_its_last_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, [[[0.0] * 4] * 4] * 9)
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
        store.expire(3)
    main(["doctor", str(tmp_path)])
    assert "sampled success unknown -> 0%, reward unknown -> 0\n" in capsys.readouterr().out
    _, told = examined(tmp_path, capsys)
    assert [one["name"] for one in told["findings"]] == ["too_hard"]


def test_names_of_findings_are_those_of_the_page() -> None:
    page = (HERE.parents[2] / "docs" / "not_learning.md").read_text()
    for name in SIDES:
        assert f"`{name}`" in page, name


def test_a_run_of_two_steps_is_told_that_it_is_too_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, [[[0.0] * 4] * 4] * 2)
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("too early to judge: it takes 3 steps\n")
