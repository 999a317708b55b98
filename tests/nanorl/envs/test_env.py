"""The helpers that an environment of the short form calls."""

from __future__ import annotations

from pathlib import Path

import pytest

import nanorl
from nanorl.envs.catalog import as_kind, load_kind

MAZE = Path(__file__).resolve().parents[3] / "examples" / "maze.py"


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


def test_the_first_example_is_walked_by_its_rules_and_whatever_it_is_told() -> None:
    walls = ["left", "right", "right", "left", "left", "right", "left", "right", "left"]
    task = nanorl.Task("wall on the left", data={"walls": walls})
    way = ["left" if wall == "right" else "right" for wall in walls]
    out = nanorl.rehearse(str(MAZE), task, turns=way)
    assert out.reward == 1.0 and out.observations == [f"wall on the {one}" for one in walls[1:]]
    bumped = nanorl.rehearse(str(MAZE), task, turns=["right", "left", "right"])
    assert bumped.is_done and bumped.reward == pytest.approx(2 / 9)
    for said in ("", "Left", "\u0663", "left right", "9" * 5000):
        assert nanorl.rehearse(str(MAZE), task, turns=[said]).reward == 0.0, said


def test_a_rehearsal_has_as_many_turns_as_a_run() -> None:
    class Never(nanorl.Env):
        defaults = {"agent.max_turns": 3}  # noqa: RUF012

        def tasks(self, rng):
            return nanorl.Task("Guess.", answer=rng.randint(1, 9))

        def step(self, text):
            return "No."

        def teacher(self, observations, rng):
            return "5"

    for played in (nanorl.rehearse(Never), nanorl.rehearse(Never, turns=["5"] * 9)):
        assert len(played.turns) == len(played.observations) == 3 and not played.is_done
    Never.defaults = {}
    assert len(nanorl.rehearse(Never).turns) == 4, "the default preset's"


# -- objects that serve as they are ----------------------------------------------------------------

KIND = """
class Kind:
    def open(self, services): ...
    def tasks(self, seed): ...
    def demonstrator(self, seed): ...

class NoTeacher:
    def open(self, services): ...
    def tasks(self, seed): ...

half = NoTeacher()
mine = Kind()
"""


def test_a_file_may_define_an_environment_as_an_object_with_the_three_methods(
    tmp_path: Path,
) -> None:
    (tmp_path / "one.py").write_text(KIND)
    (tmp_path / "two.py").write_text(KIND + "yours = Kind()\n")
    mine = load_kind(str(tmp_path / "one.py"), {})
    assert type(mine).__name__ == "Kind", "not the class, and not the object without a teacher"
    with pytest.raises(ValueError, match=r"more than one; name the one, .*two\.py:mine or "):
        load_kind(str(tmp_path / "two.py"), {})
    for given in (type(mine), nanorl, object()):
        with pytest.raises(ValueError, match=r"is no environment: derive a class from nanorl\.Env"):
            as_kind(given)
