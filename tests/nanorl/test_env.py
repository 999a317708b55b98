"""The helpers that an environment of the short form calls."""

from __future__ import annotations

from pathlib import Path

import pytest

import nanorl

GUESS = Path(__file__).resolve().parents[2] / "examples" / "guess.py"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("I guess 7.", 7),
        ("between 3 and 12", 12),
        ("-4", -4),
        ("it is 3.50", 3.5),
        ("0", 0),
        ("no idea", None),
        ("", None),
        ("9" * 5000, None),
        ("1" + "0" * 400 + ".5", None),
    ],
)
def test_the_last_number_is_a_number_whatever_was_said(text: str, number: float | None) -> None:
    found = nanorl.last_number(text)
    assert found == number and type(found) is type(number)
    assert nanorl.last_number(text, default=-1) == (-1 if number is None else number)


def test_what_the_first_example_is_told_never_raises() -> None:
    for said in ("3.5", "9" * 5000, "\u0663", "NaN", "-", "1e999"):
        task = nanorl.Task("First guess?", answer=7)
        played = nanorl.rehearse(str(GUESS), task, turns=[said, "7"])
        assert played.reward == 1.0, said
