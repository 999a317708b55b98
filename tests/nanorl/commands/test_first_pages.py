"""docs/first_environment.md, docs/coming_from.md, AGENTS.md: their code runs, and the commands,
options and columns that they name are there."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nanorl.cli import main
from nanorl.commands.new import write_files
from nanorl.options.run_config import RunConfig
from nanorl.plugins import load_object

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("docs/first_environment.md", "docs/coming_from.md", "AGENTS.md")
PAGES = {name: (ROOT / name).read_text("utf-8") for name in NAMES}
SHORT_NAMES = {"agent", "env", "sandbox"}
"""Options that --help names by a longer name."""


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page, without the indentation of a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", PAGES[page], re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def options(record: type[Any] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every option by its name as a flag."""
    hints = get_type_hints(record)
    for one in dataclasses.fields(record):
        name = prefix + one.name.replace("_", "-")
        kind = hints[one.name]
        if dataclasses.is_dataclass(kind):
            yield from options(kind, f"{name}.")  # type: ignore[arg-type]
        else:
            yield name


@pytest.mark.parametrize("page", NAMES)
def test_every_option_that_a_page_names_is_one_of_a_run(page: str) -> None:
    named = set(re.findall(r"`?(?:nanorl train[^`\n]*?|^\| `|`)--([a-z][a-z.-]+)", PAGES[page]))
    of_other_verbs = {"config", "json", "package", "write", "help"}
    unknown = named - set(options()) - SHORT_NAMES - of_other_verbs
    assert not unknown and ("rl.group-size" in named or page != "docs/coming_from.md")


@pytest.mark.parametrize("page", NAMES)
def test_every_command_of_a_page_is_there(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    verbs = set(re.findall(r"^  ([a-z-]+) ", capsys.readouterr().out, re.MULTILINE))
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line]
    for line in lines:
        words = line.split()
        if words[0] == "nanorl":
            assert words[1] in verbs, line
        if words[0] == "bash":
            assert (ROOT / words[1]).is_file(), line
    assert lines


def test_a_table_has_the_same_columns_in_every_row() -> None:
    for name, page in PAGES.items():
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            assert len({line.count("|") for line in table.splitlines()}) == 1, (name, table)


def test_the_first_environment_is_played_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files("letters", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rehearsal, training = blocks("docs/first_environment.md", "python")
    exec(compile(rehearsal, "first_environment.md", "exec"), {})
    compile(training, "first_environment.md", "exec")
    sys.modules.pop("letters", None)


def test_the_environment_of_agents_md_is_played() -> None:
    (program,) = blocks("AGENTS.md", "python")
    exec(compile(program, "AGENTS.md", "exec"), {})


def test_rewards_of_other_libraries_are_scored_as_the_page_says(tmp_path: Path) -> None:
    import nanorl

    task = nanorl.Task("How many?", answer=7, data={"data_source": "x"})
    for block in blocks("docs/coming_from.md", "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
        attribute = "reward" if name[1] == "score.py" else "terse"
        place = f"{tmp_path / name[1]}:{attribute}"
        reward = load_object(place, what="reward", known={}, fits=callable)
        assert [reward("It is 7.", task), reward("8", task)] == [1.0, 0.0]
