"""docs/core.md lists what a decode step, a GRPO step and a rollout enter: every file, no other."""

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
from core_steps import Entered, files_entered, trace_rollout, trace_steps  # noqa: E402

from nanorl.sandbox.base import SandboxUnavailable  # noqa: E402

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
ROLLOUT = entries("One rollout with a tool call")


@pytest.fixture(scope="module")
def steps() -> dict[str, Entered]:
    return trace_steps()


def problems(entered: Entered, listed: list[Entry], known: Iterable[str] = ()) -> set[str]:
    """How a section and the files that were entered differ; `known` files need no entry."""
    files = {entry.file for entry in listed}
    found = {
        f"add {file} to the page: {', '.join(functions[:4])}"
        for file, functions in entered.items()
        if file not in files and file not in known
    }
    for entry in listed:
        if entry.file not in entered and not entry.is_optional:
            found.add(f"take {entry.file} off the page: no function of it runs")
        for function in entry.functions:
            if entry.file in entered and function not in entered[entry.file]:
                found.add(f"{entry.file}: {function} does not run")
    return found


def test_the_page_lists_what_a_decode_step_enters(native: None, steps: dict[str, Entered]) -> None:
    assert not problems(steps["decode"], DECODE)


def test_the_page_lists_what_a_grpo_step_enters(native: None, steps: dict[str, Entered]) -> None:
    """What a decode step has entered before need not be told again, but may."""
    told = {entry.file for entry in DECODE}
    assert not problems(steps["grpo"], GRPO, told)


def test_the_page_lists_what_a_rollout_with_a_tool_call_enters() -> None:
    try:
        entered = trace_rollout()
    except SandboxUnavailable as refusal:
        pytest.skip(f"this machine isolates no programs: {refusal.reason}")
    told = {entry.file for entry in (*DECODE, *GRPO)}
    assert not problems(entered, ROLLOUT, told)


def test_entries_are_numbered_and_no_file_is_listed_twice_in_a_section() -> None:
    for section in (DECODE, GRPO, ROLLOUT):
        assert [entry.number for entry in section] == list(range(1, len(section) + 1))
        assert len({entry.file for entry in section}) == len(section)


def test_a_file_too_few_or_too_many_is_noticed() -> None:
    """On pages that are spoilt on purpose."""
    one = Entry(1, "a/one.py", ["f"], is_optional=False)
    two = Entry(2, "a/two.py", ["g"], is_optional=False)
    entered = {"a/one.py": ["f", "h"], "a/two.py": ["g"]}
    assert not problems(entered, [one, two])
    assert problems(entered, [two]) == {"add a/one.py to the page: f, h"}
    assert not problems(entered, [two], known=["a/one.py"])
    idle = {"take a/two.py off the page: no function of it runs"}
    assert problems({"a/one.py": ["f"]}, [one, two]) == idle
    assert not problems({"a/one.py": ["f"]}, [one, two._replace(is_optional=True)])
    wrong = one._replace(functions=["f", "gone"])
    assert problems(entered, [wrong, two]) == {"a/one.py: gone does not run"}


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
