"""`--env NAME` of an installed package, and the package that `nanorl new --package` writes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanorl
from nanorl.cli import main
from nanorl.envs.catalog import ENVIRONMENTS, load_kind
from nanorl.options.run_kind import num_env_workers
from nanorl.run.parse import parse_arguments

GAME = """
import nanorl


class Toss(nanorl.Env):
    defaults = {"agent.max_turns": 7}

    def tasks(self, rng):
        return nanorl.Task(f"Toss {rng.randint(1, 999)}", answer=1)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and name.startswith("toss"):
            del sys.modules[name]


def install(site: Path, package: str, **entries: str) -> None:
    """What pip leaves of a package that has these entry points."""
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[nanorl.environments]\n{lines}")


def test_an_installed_environment_is_found_by_its_name_with_its_defaults(site: Path) -> None:
    (site / "toss_module.py").write_text(GAME)
    install(site, "toss-games", toss="toss_module:Toss")
    assert load_kind("toss", {}).name == "toss"
    config = parse_arguments(["--env", "toss", "--preset", "tiny"])
    assert config.agent.max_turns == 7
    assert num_env_workers(config) > 0, "it is somebody's code, as a file is"
    assert nanorl.rehearse("toss", turns=["1"]).reward == 1.0


def test_a_name_that_two_have_is_refused_and_both_are_named(site: Path) -> None:
    (site / "toss_module.py").write_text(GAME)
    install(site, "toss-games", guess="toss_module:Toss", toss="toss_module:Toss")
    install(site, "other-games", toss="other:Toss")
    with pytest.raises(ValueError) as of_ours:
        load_kind("guess", {})
    assert ENVIRONMENTS["guess"] in str(of_ours.value)
    assert "toss_module:Toss (of toss-games)" in str(of_ours.value)
    with pytest.raises(ValueError) as of_two:
        load_kind("toss", {})
    assert "other:Toss (of other-games)" in str(of_two.value)
    assert "toss_module:Toss (of toss-games)" in str(of_two.value)
    assert load_kind("wordle", {}).name == "wordle", "nobody else's name is touched"
    assert load_kind("toss_module:Toss", {}).name == "toss", "the way out that the message names"


def test_an_unknown_name_is_told_what_is_installed_and_a_broken_package_is_named(
    site: Path,
) -> None:
    install(site, "toss-games", toss="toss_gone:Toss")
    with pytest.raises(ValueError, match=r"no env is called that.*search, toss, verifiers"):
        load_kind("tos", {})
    with pytest.raises(ValueError, match="toss_gone"):
        load_kind("toss", {})


def test_what_new_writes_as_a_package_has_the_entry_point_and_passes_its_test(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(site)]
    assert main(["new", "toss_game", "--package", *folder]) == 0
    said = capsys.readouterr().out
    home = site / "toss_game"
    assert f"pip install --no-build-isolation -e {home}" in said
    assert {path.name for path in home.iterdir()} == {
        *("pyproject.toml", "README.md", "toss_game.py", "test_toss_game.py"),
    }
    project = tomllib.loads((home / "pyproject.toml").read_text())
    assert project["project"]["name"] == "toss-game"
    entry = project["project"]["entry-points"]["nanorl.environments"]
    assert entry == {"toss_game": "toss_game:TossGame"}
    sys.path.insert(0, str(home))
    try:
        install(site, "toss-game", **entry)
        assert nanorl.rehearse("toss_game").is_done
    finally:
        sys.path.remove(str(home))
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(home)]
    done = subprocess.run(tested, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["guess", "--package"], "comes with nanorl"),
        (["pytest", "--package"], "there is a module of that name already"),
        (["random"], "Python's own module random"),
        (["my-game", "--package"], "small letters"),
    ],
)
def test_names_that_would_hide_or_be_hidden_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", *words, "--folder", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
