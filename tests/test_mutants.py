"""scripts/mutations.py and mutants.py: what may be changed, a draw that a seed decides, a bug that
is put in and taken out, one whose lines are gone, and the list that the figures are of."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import mutants
from mutations import KINDS, GoneError, Mutation, apply, candidates, draw, places

LISTS = sorted(mutants.LIST.parent.glob("mutants*.json"))
SOURCE = '''"""A module's docstring, 1 < 2."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsewhere import Thing

LIMIT = 3


class Box:
    def fits(self, one: "Thing", other: int = 7, wait_s: float = 5.0) -> bool:
        """Whether 1 < 2."""
        print("looking", 1)
        assert other != 8
        if other < LIMIT and not one.is_closed:
            raise ValueError(f"{other + 1} is", "too", 4)
        self.note(one, other, kept=True)
        return other in one.sizes

    def __repr__(self) -> str:
        return "Box" + "!"
'''


def changes(text: str) -> set[tuple[str, str, str]]:
    return {(one.kind, one.before.strip(), one.after.strip()) for one in candidates("a.py", text)}


def test_all_changes_of_a_text_are_these() -> None:
    head = 'def fits(self, one: "Thing", other: int = {}, wait_s: float = 5.0) -> bool:'
    test = "if other {} LIMIT {} {}one.is_closed:"
    test_as_is = test.format("<", "and", "not ")
    error = 'raise ValueError(f"{other + 1} is", "too", {})'.replace("{}", "%s")
    note = "self.note(one, other, kept=True)"
    assert changes(SOURCE) == {
        ("constant", "LIMIT = 3", "LIMIT = (3 + 1)"),
        ("constant", "LIMIT = 3", "LIMIT = (3 - 1)"),
        ("dropped", "LIMIT = 3", "pass"),
        ("constant", head.format(7), head.format("(7 + 1)")),
        ("constant", head.format(7), head.format("(7 - 1)")),
        ("compare", test_as_is, test.format("<=", "and", "not ")),
        ("boolean", test_as_is, test.format("<", "or", "not ")),
        ("not", test_as_is, test.format("<", "and", "(").replace("closed:", "closed):")),
        ("dropped", error % 4, "pass"),
        ("constant", error % 4, error % "(4 + 1)"),
        ("constant", error % 4, error % "(4 - 1)"),
        ("dropped", note, "pass"),
        ("arguments", note, "self.note(other, one, kept=True)"),
        ("arguments", note, "self.note(one, other, )"),
        ("constant", note, note.replace("True", "False")),
        ("compare", "return other in one.sizes", "return other not in one.sizes"),
        ("returned", "return other in one.sizes", "return not (other in one.sizes)"),
    }


def test_a_seed_and_the_source_decide_the_draw_and_a_longer_one_begins_with_the_shorter() -> None:
    sources = {"a.py": SOURCE, "b.py": SOURCE.replace("LIMIT", "MOST")}
    long = draw(sources, seed=5, count=12)
    assert draw(dict(reversed(sources.items())), seed=5, count=12) == long
    assert draw(sources, seed=5, count=4) == long[:4]
    assert draw(sources, seed=6, count=12) != long
    places = [(one.file, one.before) for one in long]
    assert len(set(places)) == len(places)  # no line twice
    assert {one.kind for one in draw(sources, seed=5, count=99)} <= set(KINDS)


def test_every_change_can_be_put_in_and_taken_out_again() -> None:
    for one in candidates("a.py", SOURCE):
        planted = apply(one, SOURCE)
        assert planted != SOURCE
        back = Mutation(
            file="a.py", function=one.function, kind="", before=one.after, after=one.before
        )
        if one.after.strip() != "pass":  # which does not say what stood there
            assert apply(back, planted) == SOURCE


def test_a_place_is_found_in_a_later_text_by_its_function_and_words() -> None:
    text = "def a():\n    x = 1\n\n\ndef b():\n    x = 1\n    x = 1\n"
    in_b = [one for one in candidates("a.py", text) if one.function == "b" and "+" in one.after]
    assert [one.nth for one in in_b] == [0, 1]
    later = "import os\n\n\n" + text
    assert apply(in_b[1], later) == later[: -len("1\n")] + "(1 + 1)\n"


@pytest.mark.parametrize("old, new", [("def fits", "def holds"), ("LIMIT", "MOST")])
def test_a_bug_whose_place_is_gone_says_so(old: str, new: str) -> None:
    [one] = [one for one in candidates("a.py", SOURCE) if one.kind == "boolean"]
    with pytest.raises(GoneError, match=r"has no Box\.fits|does not say any more"):
        apply(one, SOURCE.replace(old, new))


def test_the_list_has_sixty_bugs_of_eight_areas_beside_equivalents_with_a_reason() -> None:
    listed = json.loads(mutants.LIST.read_text())
    real = Counter(row["area"] for row in listed["mutants"] if not row["equivalent"])
    assert real == mutants.shares(60) and sum(real.values()) == listed["count"] == 60
    assert sorted(real.values()) == [7] * 4 + [8] * 4
    for row in listed["mutants"]:
        assert row["equivalent"] is None or len(row["equivalent"].split()) > 5
        area = mutants.AREAS[row["area"]]
        assert any(Path(row["file"]).match(glob) for glob in area.files)
        for test in mutants.tests_of(mutants.Mutant.of(row)):
            assert (mutants.ROOT / test).is_file(), test


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_bug_has_one_place_in_the_code_as_it_is_now(path: Path) -> None:
    """One whose lines were rewritten is written anew, with the same idea."""
    bugs = [one.mutation for one in mutants.read_list(path)]
    found = {one.before: len(places(one, (mutants.ROOT / one.file).read_text())) for one in bugs}
    assert [before for before, count in found.items() if count != 1] == []


def test_the_figures_are_of_the_last_line_on_each_bug(tmp_path: Path) -> None:
    listed = mutants.read_list(mutants.LIST)
    real = [one.id for one in listed if not one.equivalent]
    rows, out = tmp_path / "rows.jsonl", tmp_path / "figures.json"
    told = [
        {"id": real[0], "round": "before", "outcome": "survived", "killed_by": None},
        {"id": real[1], "round": "before", "outcome": "killed", "killed_by": "a.py::test_a"},
        {"id": real[2], "round": "before", "outcome": "doubted", "killed_by": "a.py::test_b"},
        {"id": real[0], "round": "after", "outcome": "killed", "killed_by": "a.py::test_c"},
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in told))
    mutants.write_figures(listed, rows, out)
    figures = json.loads(out.read_text())
    assert figures["bugs"] == len(figures["rows"]) == 60
    assert figures["killed_in_round"] == {"after": 1, "before": 1}
    assert figures["survived"] == real[2:]  # doubted and not run are not killed
    assert all(figures["equivalent"][one.id] for one in listed if one.equivalent)
