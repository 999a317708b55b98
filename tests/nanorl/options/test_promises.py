"""The sets of features that `scripts/check_promises.py` draws, and what it calls broken."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from forked_runs import ROOT

from nanorl.algorithms.recipes import RECIPES
from nanorl.run.parse import parse_arguments

sys.path[:0] = [str(ROOT / "scripts")]
import check_promises  # noqa: E402

FORMS = [form for forms in check_promises.FEATURES.values() for form in forms]


@pytest.mark.parametrize("form", FORMS)
def test_every_feature_goes_with_the_smallest_run(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    parse_arguments([*check_promises.SMALLEST, *form.split(), "--out", str(tmp_path)])


def test_a_set_has_so_many_features_and_all_are_drawn() -> None:
    rng = random.Random(0)
    drawn = [check_promises.draw(rng, 5) for _ in range(2000)]
    assert {len(features) for features in drawn} == {5}
    assert {form for features in drawn for form in features} == set(FORMS)
    assert {f"--algorithm {name}" for name in RECIPES} <= set(FORMS)


def test_a_promise_that_is_broken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap, rollouts that differ when played again, and runs that end with other bits."""
    trial = check_promises.Trial(tmp_path / "one", ["--lora.rank", "4"], random.Random(0), 9.0)
    (trial.folder / "run").mkdir()
    (trial.folder / "run" / "metrics.jsonl").write_text('{"step": 0, "logp_gap_max": 0.5}\n')
    ends = {"replay": (1, "1 of 9 differs"), "train": (0, "")}
    monkeypatch.setattr(check_promises, "nanorl", lambda verb, *_: verb)
    monkeypatch.setattr(check_promises, "end_of", lambda verb, _: ends[verb])
    monkeypatch.setattr(trial, "_resumed", lambda: (0, ""))
    sums = {"run": {"weights": "a", "steps": 1}, "resumed": {"weights": "b", "steps": 1}}
    monkeypatch.setattr(check_promises, "bits", lambda run: sums.get(run.name, sums["run"]))
    assert list(trial.broken()) == [
        "gap of run [0.5]",
        "replay of run 1: 1 of 9 differs",
        "resumed: other weights",
    ]
    trial.words += ["--rl.max-staleness", "1"]  # the resumed run is another, which keeps its own
    (trial.folder / "resumed").mkdir()
    (trial.folder / "resumed" / "metrics.jsonl").write_text('{"step": 0, "logp_gap_max": 0.0}\n')
    assert list(trial.broken())[2:] == ["replay of resumed 1: 1 of 9 differs"]
    assert trial.refusal() is None
    ends["train"] = (2, "say\nerror: --lora.rank 4: no")
    assert trial.verdict() == ("refused", ["--lora.rank 4: no"])
    ends["train"] = (-9, "")
    assert trial.verdict()[0] == "BROKEN"
