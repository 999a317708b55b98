"""scripts/protocols.py: what comes along is what it says, and a real run becomes a row."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ROOT, SMALL

from nanorl.observability.report.evaluation import Evaluation, TaskScore
from nanorl.observability.report.summary import FIELDS, NULLABLE
from nanorl.run.parse import parse_arguments

sys.path[:0] = [str(ROOT / "scripts")]
import protocols  # noqa: E402
from comparison.matrix import RunJob  # noqa: E402

PAGE = ROOT / "docs" / "protocols.md"


def test_every_protocol_has_a_supervised_start_and_a_line_on_the_page() -> None:
    jobs = protocols.jobs_of(protocols.ProtocolOptions(seeds=(4,)), ())
    assert {job.seed for job in jobs} == {4}
    assert [job.label for job in jobs] == list(protocols.PROTOCOLS)
    text = PAGE.read_text("utf-8")
    for job in jobs:
        config = parse_arguments(list(job.words))
        assert config.preset == "smollm2" and config.seed == 4 and config.warm_start.steps
        assert config.evaluation.every and config.evaluation.k > 1
        assert f"\n| `{job.label}` |" in text


def test_the_gallery_has_ten_recipes_that_say_what_they_are(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    jobs = protocols.jobs_of(protocols.ProtocolOptions(seeds=(4,), gallery=True), ())
    assert len(jobs) == 10 and set(protocols.PROTOCOLS) < {job.label for job in jobs}
    for job in jobs:
        assert parse_arguments(list(job.words)).rl.steps
        assert len(protocols.about(job.label)) > 20
    with pytest.raises(ValueError, match="--gallery and --protocols"):
        protocols.ProtocolOptions(protocols=("wordle",), gallery=True)


@pytest.mark.parametrize("page", list(protocols.PAGES))
def test_the_pages_have_the_newest_figures(page: str) -> None:
    text = protocols.PAGES[page].read_text("utf-8")
    assert protocols.written(page) == text, "call: python scripts/protocols.py --pages"


# -- a real run ------------------------------------------------------------------------------------


def as_toml(words: tuple[str, ...]) -> str:
    """Options of a command line as lines of a file."""
    return "".join(
        f"{name.removeprefix('--').replace('-', '_')} = {_value(value)}\n"
        for name, value in zip(words[::2], words[1::2], strict=True)
    )


def _value(text: str) -> str:
    return text if text.replace(".", "").replace("-", "").isdigit() else json.dumps(text)


@pytest.mark.slow
def test_a_run_becomes_a_row_and_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text(as_toml(SMALL))
    words = ["--protocols", str(tmp_path / "own.toml"), "--seeds", "0"]
    kept = tmp_path / "kept.json"
    words += ["--keep", str(kept), "--out", str(tmp_path / "out"), "--", "--rl.steps", "1"]
    assert protocols.main(words) == 0
    capsys.readouterr()
    data = json.loads((tmp_path / "out" / "protocols.json").read_text())
    (row,) = data["rows"]
    folder = tmp_path / "out" / "own" / "seed0"
    assert (folder / "model-trained").is_dir()
    assert not (folder / "start").exists() and not (folder / "checkpoints").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert row["after"]["success"]["value"] == summary["heldout_success_after"]
    assert row["before"]["success"]["value"] == summary["heldout_success_before"]
    assert row["runs"][0]["num_tasks"] == summary["heldout_n"] and row["sampled_tokens"] > 0
    assert json.loads(kept.read_text())["rows"][0]["runs"][0]["options"]
    place = words.index("--out") + 1
    elsewhere = [*words[:place], str(tmp_path / "elsewhere"), *words[place + 1 :]]
    assert protocols.main(elsewhere) == 0
    assert f"{kept} has the figures of 1 of 1 runs" in capsys.readouterr().out
    assert not (tmp_path / "elsewhere" / "own").exists()
    assert json.loads((tmp_path / "elsewhere" / "protocols.json").read_text())["rows"] == [row]
    kept.unlink()
    assert protocols.main(words) == 0
    assert "1 runs, 1 of them finished before" in capsys.readouterr().out
    assert json.loads(kept.read_text())["rows"] == [row]


def test_kept_figures_are_of_a_file_its_options_and_a_seed(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("seed = 1\n")

    def job(seed: int, *extra: str) -> RunJob:
        words = ("--config", str(file), "--seed", str(seed), *extra)
        return RunJob(label="own", seed=seed, folder=tmp_path / "own", words=words)

    figures = protocols.figures_of(made_up(tmp_path, 0, {"before": 2, "after": 9}))
    kept = protocols.KeptFigures.read(tmp_path / "kept.json")
    kept.add(job(0), figures)
    again = protocols.KeptFigures.read(tmp_path / "kept.json")
    found = again.of(job(0))
    assert found is not None and found["after"]["success"] == 0.9
    assert again.of(job(1)) is None and again.of(job(0, "--rl.steps", "3")) is None
    assert again.of(replace(job(0), label="other")) is None
    file.write_text("seed = 2\n")
    assert again.of(job(0)) is None
    again.add(job(0), figures | {"after": {"success": 0.5, "reward": 0.5, "kinds": {}}})
    newest = json.loads((tmp_path / "kept.json").read_text())["rows"]
    assert [row["value"] for row in newest] == [50.0]  # one row a recipe: of its newest options
    (tmp_path / "kept.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no figures of this script"):
        protocols.KeptFigures.read(tmp_path / "kept.json")


# -- figures of made-up runs -----------------------------------------------------------------------


def made_up(
    folder: Path, seed: int, successes: dict[str, int], sampled: tuple[float, ...] = ()
) -> RunJob:
    """A finished run of ten tasks, which pay half where they fail; `sampled` is the success of its
    evaluations while RL went on."""
    job = RunJob(label="made_up", seed=seed, folder=folder / "made_up" / f"seed{seed}", words=())
    job.folder.mkdir(parents=True)
    for stage, right in successes.items():
        scores = [
            TaskScore(
                task_id=str(n), kind="a", prompt="?", num_samples=1,
                num_successes=int(n < right), mean_reward=1.0 if n < right else 0.5,
            )
            for n in range(10)
        ]  # fmt: skip
        Evaluation(
            title=stage,
            about={},
            scores=scores,
            mean_turns=1.0,
            mean_action_tokens=3.0,
            seconds=1.0,
        ).write(job.folder / f"eval-{stage}.json")
    summary: dict[str, Any] = {
        name: None if name in NULLABLE else types[0]() for name, types in FIELDS.items()
    }
    summary |= {"wall_s": 60.0 * (seed + 1), "peak_rss_bytes": 100 + seed, "heldout_n": 10}
    if sampled:
        summary["evaluations"] = [
            {"step": 4 * i, "k": 2, "heldout": {"success": x, "pass_at_k": x + 0.1}}
            for i, x in enumerate(sampled)
        ]
    (job.folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": step, "action_tokens": 50, "reward": reward}
        for step, reward in enumerate((0.1, 0.3, 0.5 + 0.2 * seed))
    ]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job.note("finished")
    return job


def test_the_figures_are_those_of_a_calculation_by_hand(tmp_path: Path) -> None:
    jobs = [
        made_up(tmp_path, 0, {"untrained": 1, "before": 4, "after": 8}),  # the other was cut short
        made_up(tmp_path, 1, {"before": 2, "after": 10}),
    ]
    row = protocols.row_of("made_up", [protocols.figures_of(job) for job in jobs])
    # means of 0.8 and 1.0; Student's interval of two is 12.7062 * 0.1 to either side
    assert row["value"] == pytest.approx(90.0) and "untrained" not in row
    assert row["after"]["success"]["high"] == pytest.approx(0.9 + 1.27062, abs=1e-4)
    # rewards: 0.9 and 1.0; before 0.7 and 0.6
    assert row["after"]["reward"]["value"] == pytest.approx(0.95)
    assert row["before"]["reward"]["value"] == pytest.approx(0.65)
    assert (row["wall_s"], row["sampled_tokens"], row["peak_rss_bytes"]) == (90.0, 150.0, 101)
    # two first steps: 0.2; two last: 0.4 and 0.5
    assert row["first_reward"] == pytest.approx(0.2)
    assert row["last_reward"] == pytest.approx(0.45)
    line = protocols.table([row]).splitlines()[-1]
    assert line == (
        "| made_up | – | 30.0% (0 to 100); 0.65 | 90.0% (0 to 100); 0.95 | – | – | 0.20 → 0.45 "
        "| 0, 1 | 2 | 150 |"
    )


@pytest.mark.parametrize(
    ("lasts", "said"),
    [
        # gains of 40, 50 and 45 points: their mean is 45, and Student's interval of three
        # 4.3027 * 5 / sqrt(3) = 12.42 to either side
        ((0.5, 0.7, 0.55), "**+45.0 (+32.6 to +57.4)**"),
        # 0, 20 and -5: 5, and 4.3027 * 13.229 / sqrt(3) = 32.86
        ((0.1, 0.4, 0.05), "+5.0 (-27.9 to +37.9)"),
    ],
)
def test_a_sampled_gain_is_bold_where_its_interval_excludes_nothing(
    tmp_path: Path, lasts: tuple[float, ...], said: str
) -> None:
    firsts = (0.1, 0.2, 0.1)
    jobs = [
        made_up(tmp_path, seed, {"before": 1, "after": 2}, (first, 0.9, last))
        for seed, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    ]
    line = protocols.table(
        [protocols.row_of("made_up", [protocols.figures_of(job) for job in jobs])]
    ).splitlines()[-1]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[6] == said
    last = sum(lasts) / 3
    assert cells[5] == f"13.3% → {last:.1%}; pass@2 23.3% → {last + 0.1:.1%}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--protocols", "gone"],
            "--protocols gone: no such protocol; name a TOML file, or one of",
        ),
        (["--seeds", "1", "1"], "--seeds 1 1: give each seed once"),
        (["--", "--seed", "3"], "--seed after --: this script sets it for every run"),
        (["--page", "/nowhere.md"], "/nowhere.md"),
    ],
)
def test_what_is_wrong_is_refused_before_any_work(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert protocols.main(["--out", str(tmp_path / "out"), *words]) == 2
    except SystemExit as end:
        assert end.code == 2, "tyro's"
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
