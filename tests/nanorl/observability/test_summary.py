"""summary.json holds exactly the fields that other tools rely on, or is refused."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from nanorl.observability.report.summary import (
    FIELDS,
    build_summary,
    git_commit,
    peak_rss_bytes,
    read_summary,
    validate_summary,
    write_summary,
)

# Copied from the design, not from the code.
CONTRACT = [
    *("preset", "seed", "steps", "wall_s", "heldout_success_before", "heldout_success_after"),
    *("heldout_n", "heldout_success_untrained", "heldout_success_no_tool", "dtype"),
    *("logp_gap_max", "logp_gap_mean", "tokens_per_s_rollout", "tokens_per_s_train"),
    *("num_rollouts", "num_failed_rollouts", "peak_rss_bytes", "git_commit"),
]

GOOD = {
    "preset": "tiny",
    "seed": 0,
    "steps": 40,
    "wall_s": 300.5,
    "heldout_success_before": 0.5,
    "heldout_success_after": 0.875,
    "heldout_n": 400,
    "heldout_success_untrained": 0.0,
    "heldout_success_no_tool": 0.01,
    "dtype": "float32",
    "logp_gap_max": 1e-5,
    "logp_gap_mean": 1e-7,
    "tokens_per_s_rollout": 900.0,
    "tokens_per_s_train": 1200.0,
    "num_rollouts": 7680,
    "num_failed_rollouts": 0,
    "peak_rss_bytes": 10**9,
    "git_commit": "abc",
}


def test_the_fields_are_those_of_the_contract_in_its_order(tmp_path):
    assert list(FIELDS) == CONTRACT
    shuffled = dict(reversed(GOOD.items()))
    summary = build_summary(shuffled, {"per_type": {"sum": {"before": 0.5, "after": 1, "n": 9}}})
    assert list(summary) == [*CONTRACT, "per_type"]
    write_summary(tmp_path / "summary.json", summary)
    assert list(json.loads((tmp_path / "summary.json").read_text())) == [*CONTRACT, "per_type"]
    assert read_summary(tmp_path / "summary.json") == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("name", CONTRACT)
def test_every_missing_field_is_refused(name):
    fields = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(ValueError, match=f"missing field '{name}'"):
        build_summary(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sucess": 1.0}, "unknown field 'sucess'"),
        ({"steps": "40"}, "steps='40' must be int"),
        ({"seed": None}, "seed=None must be int"),
        ({"wall_s": float("nan")}, "wall_s=nan must be finite"),
        ({"heldout_success_after": 87.5}, "a fraction, not percent"),
        ({"heldout_n": True}, "heldout_n=True must be int"),
        ({"per_type": {"sum": {"later": 0.5}}}, "per_type.'sum'. has 'later'"),
        ({"per_type": {"sum": {"after": "x"}}}, "give numbers under"),
    ],
)
def test_wrong_values_are_refused_and_nothing_is_overwritten(tmp_path, change, message):
    path = tmp_path / "summary.json"
    write_summary(path, GOOD)
    with pytest.raises(ValueError, match=message):
        write_summary(path, {**GOOD, **change})
    assert read_summary(path) == GOOD


def test_what_was_not_measured_is_null():
    validate_summary({**GOOD, "heldout_success_untrained": None, "git_commit": None})


def test_a_damaged_summary_and_a_missing_folder_are_named(tmp_path):
    (tmp_path / "summary.json").write_text('{"preset":')
    with pytest.raises(ValueError, match=r"summary\.json is not JSON"):
        read_summary(tmp_path / "summary.json")
    with pytest.raises(OSError, match=r"check that the folder.*none/summary\.json"):
        write_summary(tmp_path / "none" / "summary.json", GOOD)


def test_a_summary_is_synced_then_renamed_and_a_failure_leaves_the_old_one_alone(
    tmp_path, monkeypatch
):
    path = tmp_path / "summary.json"
    write_summary(path, GOOD)
    order = []

    def refuse(source, target):
        order.append("replace")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", lambda fd: order.append("fsync"))
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="make room"):
        write_summary(path, {**GOOD, "seed": 1})
    assert order == ["fsync", "replace"]
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]
    assert read_summary(path) == GOOD


def test_peak_memory_and_commit_are_facts(tmp_path, monkeypatch):
    status = Path("/proc/self/status").read_text()
    kernel_kb = int(status.split("VmHWM:")[1].split()[0])
    assert abs(peak_rss_bytes() - kernel_kb * 1024) < 16 * 2**20
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    (tmp_path / "code.py").touch()
    subprocess.run([*git, "add", "code.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    subprocess.run([*git, "tag", "-a", "-m", "t", "v1"], check=True)
    assert git_commit(tmp_path) == (tmp_path / ".git/refs/heads/main").read_text().strip()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # another user runs the same code
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "code.py").touch()
    subprocess.run([*git, "-c", f"safe.directory={tmp_path}", "add", "inside/code.py"], check=True)
    commit = (tmp_path / ".git/refs/heads/main").read_text().strip()
    assert git_commit(tmp_path) == f"{commit}-dirty"
    assert git_commit(inside) is None, "a stranger's settings could make git run programs"
    monkeypatch.delenv("GIT_TEST_ASSUME_DIFFERENT_OWNER")
    installed = tmp_path / ".venv" / "site-packages"  # a wheel of ours, in somebody's project
    installed.mkdir(parents=True)
    (installed / "ours.py").touch()
    assert git_commit(installed) is None
