"""The commands that messages print for what is not installed, and what they may name."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from nanoengine import extras
from nanoengine.extras import install_command, missing, pip_install

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "nanosched", "nanoengine", "nanoinfer", "nanorl", "scripts")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def known_extras() -> set[str]:
    """The names in setup.py, read without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    [found] = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "extras_require"
    ]
    assert isinstance(found, ast.Dict)
    return {ast.literal_eval(key) for key in found.keys if key is not None}


def test_every_extra_that_a_message_names_is_one() -> None:
    named = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "install_command":
                named |= {one.value: file for one in node.args if isinstance(one, ast.Constant)}
            if node.func.id == "missing":
                given = [one.value for one in node.keywords if one.arg == "extra"]
                assert given, f"{file}:{node.lineno}: name the extra"
                named |= {one.value: file for one in given if isinstance(one, ast.Constant)}
    assert len(named) > 12, "the test does not find them any more"
    assert named.keys() <= known_extras(), named


def test_no_message_spells_what_cannot_work() -> None:
    """The project is on no index by its name, and `pip` may be another Python's."""
    wrong = re.compile(r"pip install ['\"]?(nanorl-stack|-e|\.\[)")
    allowed = {ROOT / "nanoengine" / "extras.py", ROOT / "nanoengine" / "our_kernels.py"}
    for file in SOURCES:
        if file not in allowed:
            assert not wrong.search(file.read_text()), f"{file}: use nanoengine.extras.missing"


def test_in_a_checkout_its_folder_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(install_command("serve"))
    assert words[1:] == ["-m", "pip", "install", "-e", ".[serve]"]
    assert Path(words[0]).absolute() == Path(sys.executable).absolute()
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_command("serve"))[-1] == f"{ROOT}[serve]"


def test_of_a_wheel_the_extra_is_named_by_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "ROOT", tmp_path)  # no setup.py there
    asked = ['uvicorn>=0.30; extra == "serve"', "numpy>=1", "h11 ; extra == 'http'"]
    asked.append("pydantic-ai-slim[openai]>=1; python_version > '3' and extra == \"serve\"")
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    words = shlex.split(install_command("serve"))
    assert words[3:] == ["install", "uvicorn>=0.30", "pydantic-ai-slim[openai]>=1"]
    assert install_command("http").endswith("pip install h11")
    with pytest.raises(ValueError, match="no extra 'nope'"):
        install_command("nope")


def test_a_package_that_is_missing_is_one_message() -> None:
    said = str(missing("the server", "uvicorn", extra="serve"))
    assert said.startswith("the server needs the package uvicorn; run: ") and "[serve]" in said
    assert pip_install("h11>=0.14").endswith("pip install 'h11>=0.14'")
