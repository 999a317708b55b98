"""docs/core.md lists what a decode step and a GRPO step enter: every file, and no other."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import core_steps  # noqa: E402
from core_steps import Entered, files_entered, trace_steps  # noqa: E402

ENTRY = re.compile(
    r"^(?P<number>\d+)\. \[(?P<file>[\w/.]+)\]\(\.\./(?P=file)\)\s+"
    r"(?P<functions>`[\w.]+`(?:,\s+`[\w.]+`)*)(?P<mark> †)?:\s+\w",
    re.MULTILINE,
)


class Entry(NamedTuple):
    """One line of the page."""

    number: int
    file: str
    functions: list[str]
    is_optional: bool  # marked †: entered on some processors only


def entries(title: str) -> list[Entry]:
    """Of the section with that title."""
    text = (ROOT / "docs" / "core.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    numbered = re.findall(r"^(\d+)\.", text, re.MULTILINE)
    found = [
        Entry(
            int(match["number"]),
            match["file"],
            re.findall(r"`([\w.]+)`", match["functions"]),
            match["mark"] is not None,
        )
        for match in ENTRY.finditer(text)
    ]
    spoilt = set(map(int, numbered)) - {entry.number for entry in found}
    assert not spoilt, f"{title}, entries {spoilt}: write `1. [file](../file) `function`: sentence`"
    return found


DECODE, GRPO = entries("One decode step"), entries("One GRPO step")


@pytest.fixture(scope="module")
def steps() -> dict[str, Entered]:
    return trace_steps()


def missing_and_idle(
    entered: Entered, listed: list[Entry], known: Iterable[str] = ()
) -> tuple[set[str], set[str]]:
    """Files that run and are not listed (nor `known`), and files that are listed and do not run."""
    required = {entry.file for entry in listed if not entry.is_optional}
    missing = entered.keys() - {entry.file for entry in listed} - set(known)
    return set(missing), required - entered.keys()


def unknown_functions(entered: Entered, listed: list[Entry]) -> set[str]:
    """Functions of entered files that are on the page and do not run."""
    return {
        f"{entry.file}: {function}"
        for entry in listed
        for function in entry.functions
        if entry.file in entered and function not in entered[entry.file]
    }


def test_the_page_lists_what_a_decode_step_enters(native: None, steps: dict[str, Entered]) -> None:
    assert missing_and_idle(steps["decode"], DECODE) == (set(), set())
    assert not unknown_functions(steps["decode"], DECODE)


def test_the_page_lists_what_a_grpo_step_enters(native: None, steps: dict[str, Entered]) -> None:
    """What a decode step has entered before need not be told again, but may."""
    told = {entry.file for entry in DECODE}
    assert missing_and_idle(steps["grpo"], GRPO, told) == (set(), set())
    assert not unknown_functions(steps["grpo"], GRPO)


def test_entries_are_numbered_and_no_file_is_listed_twice_in_a_section() -> None:
    for section in (DECODE, GRPO):
        assert [entry.number for entry in section] == list(range(1, len(section) + 1))
        assert len({entry.file for entry in section}) == len(section)


def test_a_file_too_few_or_too_many_is_noticed() -> None:
    """On a page that was spoilt on purpose."""
    entered = {entry.file: entry.functions for entry in DECODE}
    assert missing_and_idle(entered, DECODE) == (set(), set())
    assert missing_and_idle(entered, DECODE[1:]) == ({DECODE[0].file}, set())
    del entered[DECODE[0].file]
    assert missing_and_idle(entered, DECODE) == (set(), {DECODE[0].file})
    optional = DECODE[0]._replace(is_optional=True)
    assert missing_and_idle(entered, [optional, *DECODE[1:]]) == (set(), set())
    entered[DECODE[1].file] = ["another"]
    assert unknown_functions(entered, DECODE[1:2])


def test_the_trace_sees_our_functions_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_steps, "ROOT", ROOT)
    monkeypatch.setattr(core_steps, "PACKAGES", ("tests",))

    def work() -> None:
        re.compile("a")
        [inner() for _ in range(2)]

    def inner() -> None: ...

    prefix = "test_the_trace_sees_our_functions_and_no_others.<locals>"
    assert files_entered(work) == {"tests/test_core_page.py": [f"{prefix}.work", f"{prefix}.inner"]}
    assert sys.getprofile() is None
