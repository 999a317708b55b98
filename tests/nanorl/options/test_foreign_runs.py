"""The run folder of somebody else: whatever its config.json names, reading it imports no code,
starts no program and asks no other machine, until its user has looked at it and said so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import small_run

from nanorl import cli
from nanorl.inspection.viewer.runs import find_runs
from nanorl.options.parts import model_folder
from nanorl.options.presets import tiny
from nanorl.options.trust import remember, unknown

EVIL = """
from pathlib import Path
import nanorl
Path({marker!r}).touch()
class Evil(nanorl.Env):
    def tasks(self, rng):
        return nanorl.Task("x")
    def step(self, text):
        return self.done(reward=1.0)
async def loop(episode):
    pass
def loss(logp_T, batch):
    return logp_T
def reward(task, transcript):
    return 1.0
"""


@pytest.fixture(autouse=True)
def nothing_named_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def evil(tmp_path: Path, marker: Path) -> Path:
    file = tmp_path / "evil.py"
    file.write_text(EVIL.format(marker=str(marker)))
    return file


def foreign_run(folder: Path, **named: Any) -> Path:
    """A run as `nanorl train` leaves it, with options changed by hand, by their dotted names."""
    run = small_run(folder)
    options = json.loads((run / "config.json").read_text())
    for name, value in named.items():
        *sections, last = name.split("__")
        place = options
        for section in sections:
            place = place[section]
        place[last] = value
    (run / "config.json").write_text(json.dumps(options))
    return run


def naming(evil: Path) -> dict[str, dict[str, Any]]:
    return {
        "an environment": {"env": f"{evil}:Evil"},
        "a file of one": {"env": str(evil)},
        "one of Gymnasium": {"env": f"gymnasium:{evil}:Evil"},
        "a reward": {"env": "guess", "reward": f"{evil}:reward"},
        "a library's class": {"env": "guess", "reward": "subprocess:Popen",
                              "reward_args": [f'args=["touch", "{evil}"]']},
        "an agent loop": {"env": "guess", "agent__loop": f"{evil}:loop"},
        "a program": {"env": "guess", "agent__loop": "command", "agent__command": "touch x"},
        "a loss": {"env": "guess", "rl__algorithm__loss": f"{evil}:loss"},
        "an advantage": {"env": "guess", "rl__algorithm__advantage": f"{evil}:loss"},
        "a curriculum": {"env": "guess", "rl__curriculum": f"{evil}:Evil"},
        "no sandbox": {"tool__sandbox": "rlimits", "tool__allow_unsafe_sandbox": True},
        "a cluster": {"env": "guess", "cluster__backend": "ray", "cluster__address": "127.0.0.1:1"},
        "a server": {"env": "http://127.0.0.1:1"},
        "a judge with somebody's key": {
            "env": "guess", "reward": "judge",
            "reward_args": ["address=http://127.0.0.1:1", "api_key_file=/etc/passwd"]},
    }  # fmt: skip


KINDS = list(naming(Path("evil.py")))


def read_all(run: Path) -> None:
    """What the page of `nanorl view` asks for."""
    viewed = find_runs([run])[run.name]
    for phase in viewed.phases():
        with viewed.open(phase) as store:
            for entry in store.entries():
                viewed.trajectory(store.get(entry.rollout_id), step=0, phase=phase)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_somebody_else_is_read_and_runs_nothing(
    tmp_path: Path, evil: Path, marker: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign_run(tmp_path / "theirs", **naming(evil)[kind])
    read_all(run)
    assert cli.main(["view", str(run), "--worst"]) == 0
    assert cli.main(["export", str(run), "--to", "jsonl", "--out", str(tmp_path / "x.jsonl")]) == 0
    assert cli.main(["store", str(run)]) == 0
    assert not marker.exists()
    assert not list(run.glob("*.pyc")) and not (tmp_path / "state").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_to_play_a_run_of_somebody_else_is_refused_until_it_is_trusted(
    tmp_path: Path, evil: Path, marker: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign_run(tmp_path / "theirs", **naming(evil)[kind])
    plays: list[list[str]] = [
        ["replay", str(run)],
        ["train", "--out", str(run), "--resume"],
    ]
    is_asked = "algorithm" not in str(naming(evil)[kind])
    if is_asked and kind not in ("a curriculum", "a cluster"):  # what an evaluation never asks
        plays.append(["eval", str(run), "--out", str(tmp_path / "eval")])
    for words in plays:
        assert cli.main(words) == 2, words
        error = capsys.readouterr().err
        assert f"nanorl trust {run}" in error and error.count("\n") == 1, (words, error)
    assert not marker.exists() and not (tmp_path / "eval").exists()
    assert cli.main(["trust", str(run)]) == 0
    said = capsys.readouterr().out
    options = json.loads((run / "config.json").read_text())
    assert unknown(options) == [] and any(str(v) in said for v in naming(evil)[kind].values())
    assert not marker.exists(), "to trust is not to run"


def test_a_run_of_ones_own_needs_no_word(tmp_path: Path, evil: Path, marker: Path) -> None:
    run = foreign_run(tmp_path / "mine", env=f"{evil}:Evil")
    options = json.loads((run / "config.json").read_text())
    assert unknown(options)
    remember(options)
    assert unknown(options) == []
    read_all(run)
    assert marker.exists(), "its own environment says how its tools are called"


def test_what_was_named_is_neither_another_argument_nor_another_file_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    options = tiny().to_json() | {"env": "mine.py", "env_args": ["level=1"]}
    remember(options)
    assert unknown(options) == [] and unknown(options | {"env": str(tmp_path / "mine.py")}) == []
    assert unknown(options | {"env_args": ["level=2"]}) == ["--env mine.py --env-args level=2"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert unknown(options) == ["--env mine.py --env-args level=1"]
    file = tmp_path / "state" / "nanorl" / "named"
    assert file.stat().st_mode & 0o077 == 0 and file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("address", ["postgresql://127.0.0.1:1/x?run=x", "sqlite:///etc/passwd"])
def test_a_run_does_not_lead_its_reader_to_another_store(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = foreign_run(tmp_path / "theirs", store=address)
    commands: list[Callable[[], int]] = [
        lambda: cli.main(["view", str(run), "--worst"]),
        lambda: cli.main(["store", str(run)]),
        lambda: cli.main(["export", str(run), "--to", "jsonl"]),
    ]
    for command in commands:
        assert command() == 2
        assert f"nanorl trust {run}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="nanorl trust"):
        read_all(run)


def test_a_plain_run_names_nothing_and_is_played_as_ever(tmp_path: Path) -> None:
    assert unknown(tiny().to_json()) == []
    assert unknown(tiny().to_json() | {"env": "guess", "reward": "rule"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"preset": ' + "[" * 100_000,
        '{"preset": "tiny", "rl": []}',
        '{"preset": "tiny", "rl": {"algorithm": [1]}}',
        '{"preset": "tiny", "env": ["x"], "agent": 3}',
        "\xff",
    ],
    ids=["deep", "deep below", "a list", "a list below", "another type", "bytes"],
)
def test_a_config_of_anything_is_one_error(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "theirs")
    (run / "config.json").write_text(text, encoding="latin-1")
    for words in (["view", str(run)], ["eval", str(run)], ["store", str(run)]):
        assert cli.main(words) == 2
        error = capsys.readouterr().err
        assert "config.json" in error and error.count("\n") == 1 and len(error) < 600


def test_without_a_home_nothing_is_remembered(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number: HOME is not set, and no user has that number."""
    monkeypatch.setenv("XDG_STATE_HOME", "~no_such_user_here/state")
    named = tiny().to_json() | {"env": str(evil)}
    assert unknown(tiny().to_json()) == [] and unknown(named) == [f"--env {evil}"]
    assert remember(named) == [] and unknown(named) == [f"--env {evil}"]


def test_a_model_that_is_made_on_the_spot_needs_no_home(tmp_path: Path) -> None:
    config = replace(tiny(), out=tmp_path / "run", cache_dir=Path("~no_such_user_here/cache"))
    assert (model_folder(config) / "config.json").is_file()
