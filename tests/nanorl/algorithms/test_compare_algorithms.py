"""scripts/compare_algorithms.py: real runs of a tiny matrix, one of them killed, and its figures on
made-up numbers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_runs import ROOT, SMALL, Slow, _context, _main
from run_outcomes import rollouts, weights
from waiting import wait_until

from nanoengine.state.run_folder import LOCK, take_lock
from nanorl.algorithms.recipes import RECIPES
from nanorl.envs.base import Services
from nanorl.envs.catalog import load_kind
from nanorl.observability.report.evaluation import Evaluation, TaskScore
from nanorl.observability.report.statistics import mean_of_runs, paired_difference
from nanorl.observability.report.summary import FIELDS, NULLABLE
from nanorl.observability.store import RolloutStore
from nanorl.options.presets import tiny_environment
from nanorl.run.parse import parse_arguments
from nanorl.task import Task

sys.path[:0] = [str(ROOT / "scripts")]
import compare_algorithms  # noqa: E402
from comparison import matrix, noisy_reward  # noqa: E402
from comparison.figures import Figures, moving_average, step_to_level  # noqa: E402
from comparison.matrix import MatrixPlan, RunJob  # noqa: E402
from comparison.pages import UNEXPLAINED, cells, html, markdown, picture, remarks  # noqa: E402
from comparison.variants import Variant, VariantSet, read_variants  # noqa: E402

VARIANTS = {
    "title": "Three",
    "baseline": "first",
    "factors": [
        {
            "first": "--algorithm grpo",
            "broken": "--algorithm opd --rl.reference /nowhere/at/all",
            "second": {"options": "--algorithm gspo", "reason": "it is another"},
            "after_it": "--algorithm opd --rl.reference {model:broken}",
        }
    ],
}
# Those of SMALL that a comparison does not set itself.
_OWN = ("--preset", "--rl.steps", "--evaluation.num-tasks-no-tool", "--save-every")
EXTRA = [
    word
    for pair in zip(SMALL[::2], SMALL[1::2], strict=True)
    if pair[0] not in _OWN
    for word in pair
]
TIMES = ("wall_s", "cpu_s", "peak_rss_bytes")


# -- real runs -------------------------------------------------------------------------------------


class ForkedRun:
    """Stands for `subprocess.Popen`: a run forked from a process that has imported everything."""

    def __init__(self, words: Sequence[str], log: Path, slow: Slow | None) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            try:
                matrix.die_with(parent)
                _main(log, tuple(words), slow, {}, {})
            except SystemExit as end:
                os._exit(int(end.code or 0))
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status


def drive(arguments: Sequence[str], log: Path, marker: Path | None) -> None:
    """compare_algorithms.py in a process of its own; the second update of gspo's run waits."""

    def start(words: Sequence[str], run_log: Path) -> ForkedRun:
        is_slow = marker is not None and "gspo" in words
        slow = Slow(update=2, seconds=300.0, marker=marker) if is_slow and marker else None
        return ForkedRun(words, run_log, slow)

    matrix.start_run = start  # type: ignore[assignment]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.exit(compare_algorithms.main(arguments))


class Comparison:
    """A process of compare_algorithms.py over VARIANTS."""

    def __init__(self, out: Path, *, marker: Path | None = None) -> None:
        out.mkdir(exist_ok=True)
        (out / "three.json").write_text(json.dumps(VARIANTS))
        words = ["--variants", str(out / "three.json"), "--seeds", "0", "--steps", "2"]
        words += ["--out", str(out), "--", *EXTRA, "--save-every", "1"]
        self.log = out / "driver.log"
        self.process = _context.Process(target=drive, args=(words, self.log, marker))
        self.process.start()

    def wait(self) -> int | None:
        self.process.join(120)
        return self.process.exitcode

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its runs end with it
        self.process.join()


def result(out: Path) -> list[dict[str, Any]]:
    """The rows without times and memory, and without the folder in what was said."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items() if name not in TIMES}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return value.replace(str(out), "OUT") if isinstance(value, str) else value

    return plain(json.loads((out / "comparison.json").read_text())["rows"])


def start_weights(run: Path) -> dict[str, str]:
    with RolloutStore(run / "rollouts.sqlite") as store:
        return store.facts("weights/")["weights/0"]


def stamps(folder: Path) -> dict[str, int]:
    found = [path for path in folder.parent.rglob("*") if path.is_file()]
    return {str(path): path.stat().st_mtime_ns for path in found}


@pytest.mark.sandbox
@pytest.mark.slow
def test_a_killed_comparison_ends_as_an_undisturbed_one_and_repeats_nothing(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with Comparison(whole) as undisturbed:
        assert undisturbed.wait() == 1, "two runs failed"  # and the others went on
    _check_results(whole)
    marker = tmp_path / "marker"
    with Comparison(cut, marker=marker) as killed:
        wait_until(marker.exists, 120, alive=killed.process.is_alive, told=killed.log.read_text)
        finished = stamps(cut / "first" / "seed0") | stamps(cut / "base" / "seed0")
        os.kill(killed.process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        assert killed.wait() == -signal.SIGKILL
    assert not (cut / "comparison.json").exists()
    with Comparison(cut) as again:
        assert again.wait() == 1, again.log.read_text()
    said = again.log.read_text()
    assert "5 runs, 2 of them finished before" in said
    assert "first seed 0: finished" not in said.split("5 runs, 2 of")[1]
    unchanged = stamps(cut / "first" / "seed0") | stamps(cut / "base" / "seed0")
    assert finished == unchanged
    rows = [json.loads(one) for one in (cut / "second/seed0/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1]
    history = json.loads((cut / "second/seed0/summary.json").read_text())["history"]
    assert [event["event"] for event in history] == ["forked", "resumed"]
    assert result(cut) == result(whole)


def _check_results(whole: Path) -> None:
    runs = {label: whole / label / "seed0" for label in ("first", "second")}
    begun = {label: start_weights(run) for label, run in runs.items()}
    assert begun["first"] == begun["second"] and begun["first"]
    base = weights(whole / "base" / "seed0")
    for run in runs.values():
        moved = [name for name, one in weights(run).items() if not bool((one == base[name]).all())]
        assert moved, "RL trained"
    first, second = (rollouts(run) for run in runs.values())
    of_step_0 = [one for one in first.values() if one[3] == 0]
    assert of_step_0 and all(one in second.values() for one in of_step_0), "the same tasks"
    rows = {row["name"]: row for row in result(whole)}
    assert {name: len(row["runs"]) for name, row in rows.items()} == {
        "first": 1, "broken": 0, "second": 1, "after_it": 0,
    }  # fmt: skip
    assert "/nowhere/at/all" in rows["broken"]["errors"]["0"]
    assert rows["after_it"]["errors"] == {"0": "it needs broken seed 0, which failed"}
    assert rows["second"]["sampled_tokens"] == sum(
        one["action_tokens"] for one in map(json.loads, (runs["second"] / "metrics.jsonl").open())
    )
    page = (whole / "report.html").read_text()
    assert "<svg" in page and "it is another" in page and "http" not in _without_names(page)
    assert {path.name for path in whole.glob("comparison.*")} == {
        "comparison.json", "comparison.md", "comparison.svg",
    }  # fmt: skip
    assert not (whole / "base/seed0/eval-no_tool.json").exists()


def _without_names(page: str) -> str:
    """Without the name of SVG's language, which nothing is loaded from."""
    return page.replace("http://www.w3.org/2000/svg", "").replace("Content-Security", "")[400:]


# -- figures on made-up numbers --------------------------------------------------------------------


def evaluation(right: int, wrong: int, *, first_wrong: bool = False) -> Evaluation:
    shares = [1] * right + [0] * wrong
    scores = [
        TaskScore(
            task_id=f"t{i}", kind="k", prompt="p", num_samples=1, num_successes=one,
            mean_reward=float(one),
        )
        for i, one in enumerate(shares[::-1] if first_wrong else shares)
    ]  # fmt: skip
    return Evaluation(
        title="x", about={}, scores=scores, mean_turns=1.0, mean_action_tokens=1.0, seconds=1.0
    )


def made_up(out: Path, label: str, seed: int, after: int, steps: Sequence[float]) -> RunJob:
    """A finished run of ten held-out tasks; each step samples 100 tokens more than the last."""
    folder = out / label / f"seed{seed}"
    folder.mkdir(parents=True)
    rows = [
        {
            "step": i, "success": success, "action_tokens": 100.0 * (i + 1),
            "trained_tokens": 50.0, "step_s": 2.0, "cpu_s": 1.5,
        }
        for i, success in enumerate(steps)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        name: None if name in NULLABLE else (0 if int in kinds else "x")
        for name, kinds in FIELDS.items()
    }
    summary |= {"peak_rss_bytes": 2**30, "git_commit": "abc"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({"rl": {"epochs": 2}}))
    evaluation(after, 10 - after).write(folder / "eval-after.json")
    job = RunJob(label=label, seed=seed, folder=folder, words=("--x",))
    job.note("finished")
    return job


@pytest.fixture
def figures(tmp_path: Path) -> Figures:
    """Before: 4 of 10. a: 8 and 9 after; b: 5 and 4; c: failed. a is the baseline."""
    jobs = []
    for seed in (0, 1):
        base = tmp_path / "base" / f"seed{seed}"
        base.mkdir(parents=True)
        evaluation(4, 6).write(base / "eval-before.json")
        jobs.append(RunJob(label="base", seed=seed, folder=base, words=()))
    jobs += [
        made_up(tmp_path, "a", 0, 8, [0.2, 0.4, 0.8]),
        made_up(tmp_path, "a", 1, 9, [0.4, 0.8, 0.8]),
        made_up(tmp_path, "b", 0, 5, [0.2, 0.2, 0.4]),
        made_up(tmp_path, "b", 1, 4, [0.2, 0.2, 0.2]),
    ]
    failed = RunJob(label="c", seed=0, folder=tmp_path / "c" / "seed0", words=("--x",))
    failed.note("failed", "no memory")
    variants = {name: Variant(label=name, options=f"--x {name}") for name in "abc"}
    return Figures.read(
        [*jobs, failed],
        VariantSet(title="Letters", baseline="a", variants=variants),
        level=0.6,
        window=2,
        notes={"b": "it was asked to"},
    )


ABOUT: dict[str, Any] = {
    "title": "Letters", "preset": "tiny", "seeds": [0, 1], "steps": 3, "baseline": "a",
    "level": 0.6, "window": 2,
}  # fmt: skip


def test_the_figures_of_made_up_runs_are_those_of_a_calculation_by_hand(figures: Figures) -> None:
    a, b, c = figures.rows()
    # gains 4 and 5 tenths: mean 45 points, s = 0.1/sqrt(2), t(1) = 12.706: 12.706*0.05 = 0.6353
    assert a["value"] == pytest.approx(45.0) and a["before"] == pytest.approx(0.4)
    assert a["gain"]["low"] == pytest.approx(0.45 - 0.63531, abs=1e-4)
    assert a["gain"]["high"] == pytest.approx(0.45 + 0.63531, abs=1e-4)
    assert a["after"]["value"] == pytest.approx(0.85)
    # 100 + 200 + 300 tokens; 3 steps of 50 trained tokens in 2 passes
    assert (a["sampled_tokens"], a["trained_tokens"]) == (600.0, 300.0)
    assert (a["wall_s"], a["cpu_s"], a["peak_rss_bytes"]) == (6.0, 4.5, 2.0**30)
    # means of two steps: 0.3, 0.6 and 0.6, 0.8: after 3 steps and after 2
    assert (a["step_to_level"], a["num_reached"]) == (2.5, 2)
    assert a["seconds_to_level"] == pytest.approx((6.0 + 4.0) / 2)  # of 2 s a step
    assert (b["step_to_level"], b["num_reached"], b["seconds_to_level"]) == (None, 0, None)
    assert a["share_of_baseline"] == 1.0 and a["against_baseline"] is None
    assert b["share_of_baseline"] == pytest.approx(0.05 / 0.45)
    # 5 - 8 and 4 - 9 tenths
    assert b["against_baseline"]["value"] == pytest.approx(-0.4)
    assert b["against_baseline"]["high"] == pytest.approx(-0.4 + 12.7062 * 0.1, abs=1e-4)
    assert [row["is_little"] for row in (a, b)] == [False, True]
    assert [point["tokens"] for point in a["curve"]] == [100.0, 300.0, 600.0]
    assert [(p["low"], p["mean"], p["high"]) for p in a["curve"]] == [
        pytest.approx(one) for one in [(0.2, 0.3, 0.4), (0.3, 0.45, 0.6), (0.6, 0.7, 0.8)]
    ]
    assert c["value"] is None and c["errors"] == {"0": "no memory"}


def test_a_single_seed_has_the_interval_of_its_tasks(figures: Figures) -> None:
    alone = Figures(
        chosen=figures.chosen, runs={name: runs[:1] for name, runs in figures.runs.items()},
        errors=figures.errors, level=0.6, window=2, notes={},
    )  # fmt: skip
    a, b, _ = alone.rows()
    assert a["gain"] == paired_difference([0] * 4 + [1] * 4 + [0] * 2).to_json()
    assert b["against_baseline"] == paired_difference([0] * 5 + [-1] * 3 + [0] * 2).to_json()
    assert cells(a, ABOUT)[0] == "a (1 of 2 seeds)"
    assert ("b", "", UNEXPLAINED.format(baseline="a")) in remarks(alone.rows(), ABOUT)


def test_the_pages_say_what_the_rows_say_and_why_one_helps_little(figures: Figures) -> None:
    rows = figures.rows()
    table = markdown(rows, ABOUT)
    assert (
        "| a | 40.0 → 85.0 (21.5 to 148.5) | +45.0 (-18.5 to +108.5) | 1.00 | – | 600 | 300 |"
        in table
    )
    assert "| b ⚠ | 40.0 → 45.0 " in table and "- **b**: it was asked to" in table
    assert "- **c**: seed 0 failed: no memory" in table and "| c" not in table
    page, drawn = html(rows, ABOUT), picture(rows, ABOUT)
    assert page.count("<tr>") == 3 and drawn.count('class="own"') == 2
    assert drawn.count('class="other"') == 1, "the baseline behind b alone"
    evil = [dict(rows[0], name="<script>", reason="<img>")]
    assert "<script>" not in html(evil, ABOUT) and "<img>" not in html(evil, ABOUT)


def test_a_level_is_reached_where_a_whole_window_has_it() -> None:
    assert step_to_level([0.9, 0.1, 0.5, 0.7], 0.6, 1) == 1
    assert step_to_level([0.9, 0.1, 0.5, 0.7], 0.6, 2) == 4
    assert step_to_level([0.9], 0.6, 2) is None
    assert step_to_level([None, 0.6, None, None], 0.6, 2) == 2
    assert moving_average([1.0, None, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]


def test_students_interval_of_few_runs() -> None:
    """t(2) = 4.302653, t(10) = 2.228139, t(30) = 2.042272 (any table)."""
    few = mean_of_runs([1.0, 2.0, 3.0])
    assert (few.value, few.high) == (2.0, pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-4))
    for num, t in ((11, 2.228139), (31, 2.042272)):
        values = [float(i) for i in range(num)]
        error = (sum((v - (num - 1) / 2) ** 2 for v in values) / (num - 1) / num) ** 0.5
        assert mean_of_runs(values).high == pytest.approx((num - 1) / 2 + t * error, rel=2e-4)
    alone = mean_of_runs([0.5])
    assert (alone.low, alone.high) == (-float("inf"), float("inf"))


def test_the_slow_tool_s_environment_is_the_preset_s_and_slow() -> None:
    slow, quick = load_kind(str(ROOT / "scripts/comparison/slow_code.py"), {}), tiny_environment()
    task = slow.tasks(0).batch(0, 1)[0]
    assert task == quick.tasks(0).batch(0, 1)[0]
    services = Services(tokenizer=None, sandbox=None, timeout_s=1.0, is_tool_enabled=False)

    async def play(env: Any) -> list[Any]:
        return [await env.reset(task), await env.step("<run>1</run>"), await env.step("<ans>7")]

    replies = asyncio.run(play(quick.open(services)))
    begin = time.monotonic()
    assert asyncio.run(play(slow.open(services))) == replies and replies[2].is_done
    assert time.monotonic() - begin >= 0.3, "one call of the tool was answered so much later"


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "wrong"), [("train", 0.125), ("heldout", 0.0)])
def test_one_verdict_in_eight_of_training_is_the_wrong_way_round(split: str, wrong: float) -> None:
    task = Task("1 + 1", "2", task_id="sum-1", kind="sum", split=split)
    found = {"2": 0, "3": 0}
    for number in range(4000):
        for answer in found:
            rollout = SimpleNamespace(rollout_id=f"s{number}-{answer}")
            verdict = noisy_reward.score(rollout, task, answer)
            assert verdict in (0.0, 1.0) and verdict == noisy_reward.score(rollout, task, answer)
            found[answer] += verdict != float(answer == "2")
    # four deviations of a mean of 4,000 draws
    assert all(abs(count / 4000 - wrong) <= 0.021 for count in found.values())
    assert (sum(found.values()) == 0) == (split == "heldout")


def test_the_hard_comparison_has_every_recipe_and_losses_without_a_ratio_use_a_batch_once() -> None:
    variants = read_variants("hard").variants
    assert variants.keys() == RECIPES.keys()
    for one in variants.values():
        words = [word.replace("{model:grpo}", "a/model") for word in one.options.split()]
        rl = parse_arguments(["--preset", "tiny", *words]).rl
        assert rl.max_staleness == 8
        assert rl.epochs == (1 if rl.algorithm.loss == "reinforce" else 4), one.label


def test_every_recipe_is_compared_and_a_factor_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # as compare_algorithms.sh does: the slow tool's file is named from it
    chosen = read_variants("recipes")
    assert list(chosen.variants) == list(RECIPES) and chosen.variants["opd"].needs == ("grpo",)
    common = "--rl.minibatches 2 --algorithm"
    settled = [one for one in chosen.variants.values() if one.options != f"{common} {one.label}"]
    assert all(one.options.startswith(common) for one in chosen.variants.values())
    assert settled and all(one.reason for one in settled), "each departure has its reason"
    stale = read_variants("staleness")
    assert len(stale.variants) == 6 * 5
    own = "--rl.algorithm.correction mis --rl.max-staleness 4"
    assert stale.variants["mis-s4"].options == f"--cluster.backend local {own}"
    oldest = stale.chosen([label for label in stale.variants if label.endswith("s8")])
    for one in (chosen, oldest, *map(read_variants, ("reuse", "async", "distill"))):
        plan = MatrixPlan(out=Path("nowhere"), preset="tiny", seeds=(0,), steps=2, extra=())
        assert len(plan.jobs(one)) == 1 + len(one.variants), "nanorl train takes them all"


def test_two_comparisons_in_one_folder_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would take the first's half-made forks for leftovers."""
    monkeypatch.setattr(matrix, "start_run", lambda *_: pytest.fail("a run was started"))
    lock = take_lock(tmp_path / LOCK)
    try:
        assert compare_algorithms.main(["--out", str(tmp_path), "--algorithms", "grpo"]) == 2
    finally:
        os.close(lock)
    assert f"in use by another process (pid {os.getpid()})" in capsys.readouterr().err


def test_the_variants_of_the_page_are_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    [block] = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "rates.json").write_text(block)
    found = read_variants(str(tmp_path / "rates.json"))
    assert list(found.variants) == ["grpo-5e-4", "grpo-1e-3", "cispo-5e-4", "cispo-1e-3"]
    assert found.variants["cispo-1e-3"] == Variant(
        label="cispo-1e-3",
        options="--algorithm cispo --rl.lr 1e-3",
        reason="is it too careful?",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithms", "nope"], "--algorithms nope: no such variant; there are grpo"),
        (["--algorithms", "opd"], "opd reads the trained model of grpo.*add grpo"),
        (
            ["--variants", "gone"],
            "--variants gone: there is no such file.*recipes, reuse, staleness",
        ),
        (["--seeds", "1", "1"], "--seeds 1 1: give each seed once"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--level", "1.5"], "--level 1.5"),
        (["--preset", "huge"], "--preset huge: no such preset"),
        (["--", "--seed", "3"], "--seed after --: this script sets it"),
        (["--", "--rl.group-size", "1"], "variant grpo: --rl.group-size 1: --rl.algorithm.adv"),
        (["--", "--rl.nothing", "1"], "variant grpo: --rl.nothing: there is no such option"),
        (["--variants", "{bad}"], "wanted is .*factors"),
        (["--variants", "{label}"], "the label '../x' names a folder"),
        (["--variants", "{needs}"], r"needs {model:gone}, which is no other variant"),
        (["--variants", "{none}"], "the baseline 'z' is none of a"),
        (
            ["--out", "{out}", "--algorithms", "grpo"],
            "grpo.*was made with other options .*--steps 9",
        ),
        (["--out", "{notes}", "--algorithms", "grpo"], "notes.json: not JSON"),
    ],
)
def test_what_is_wrong_is_refused_before_any_work(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(matrix, "start_run", lambda *_: pytest.fail("a run was started"))
    files = {
        "bad": {"title": "x"},
        "label": {"title": "x", "baseline": "../x", "factors": [{"../x": ""}]},
        "needs": {"title": "x", "baseline": "a", "factors": [{"a": "--rl.reference {model:gone}"}]},
        "none": {"title": "x", "baseline": "z", "factors": [{"a": ""}]},
    }
    for name, data in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    old = tmp_path / "out" / "grpo" / "seed0"
    old.mkdir(parents=True)
    job = RunJob(label="grpo", seed=0, folder=old, words=("--steps", "9"))
    job.note("finished")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.json").write_text("{")
    places = {f"{{{name}}}": str(tmp_path / f"{name}.json") for name in files}
    places |= {"{out}": str(tmp_path / "out"), "{notes}": str(tmp_path / "notes")}
    given = ["--out", str(tmp_path / "new"), *(places.get(word, word) for word in words)]
    try:
        assert compare_algorithms.main(given) == 2
    except SystemExit as end:
        assert end.code == 2, "tyro's, of options of this script"
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said), said
    assert not (tmp_path / "new").exists()
