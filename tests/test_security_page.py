"""docs/security.md names a test for each promise, and the tests are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")


def rows():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_promise_names_who_holds_it():
    """A row that says what somebody cannot do names a file of tests."""
    assert len(rows()) >= 15
    for who, _, cannot, held_by in rows():
        assert bool(cannot) == ("tests/" in held_by), (who, held_by)


def test_the_tests_that_the_page_names_are_there_and_assert():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) >= 15
    for name in named:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "def test_" in text and "assert" in text, name


def test_the_page_is_a_page():
    """What grows longer is read by nobody: the rest belongs to the pages of each part."""
    assert len(PAGE.split()) < 1200
