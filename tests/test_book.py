"""The book stays small: ceilings of what a default step enters and imports, which only fall.

A figure above its ceiling fails: what is new belongs into a wing (docs/core.md). A figure well
below fails too, until the ceiling is lowered to it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import book  # noqa: E402
from book import Walk  # noqa: E402
from core_steps import Entered, trace_rollout, trace_steps  # noqa: E402
from house import House  # noqa: E402

from nanorl.sandbox.base import SandboxUnavailable  # noqa: E402

CEILINGS: dict[str, float] = {
    "core: files": 40,
    "core: lines": 8060,
    "core: names imported from wings": 0,
    "core: files with all that they import": 45,
    "core: lines with all that they import": 8590,
    "core: lines of the longest class": 251,
    "nanorl: rooms": 15,
    "nanorl: arrows between rooms": 63,
    "nanorl: arrows up": 0,
    "file names used twice": 35,
    "bare docstrings, %": 0.5,
    "rollout: files with all that they import": 36,
    "rollout: lines with all that they import": 4900,
}
FLOORS: dict[str, float] = {
    "core: share that runs, %": 47,
    "core: comments per 100 lines of code": 5.5,
}
SLACK = 0.03  # processors enter a few functions more or fewer
PLACES = 4  # of a figure as small as a count of rooms


@pytest.fixture(scope="module")
def steps() -> dict[str, Entered]:
    return trace_steps()


@pytest.fixture(scope="module")
def figures(steps: dict[str, Entered]) -> dict[str, float]:
    try:
        walks = {**steps, "rollout": trace_rollout()}
    except SandboxUnavailable:
        walks = steps
    return {one.name: one.value for one in book.measures(House(), walks)}


@pytest.mark.parametrize("name", CEILINGS)
def test_no_figure_is_above_its_ceiling(native: None, figures: dict[str, float], name: str) -> None:
    if name not in figures:
        pytest.skip("no sandbox here: no rollout to trace")
    most, value = CEILINGS[name], figures[name]
    assert value <= most, f"{name}: {value}, and the ceiling is {most}; put what is new in a wing"
    assert value >= most * (1 - SLACK) - PLACES, f"{name}: {value}; lower the ceiling from {most}"


@pytest.mark.parametrize("name", FLOORS)
def test_no_figure_is_below_its_floor(native: None, figures: dict[str, float], name: str) -> None:
    assert figures[name] >= FLOORS[name]


def test_the_page_says_the_figures(native: None, steps: dict[str, Entered]) -> None:
    """To one in a hundred: processors differ by a few functions."""
    core = Walk.of(House(), [steps[name] for name in book.CORE])
    text = book.PAGE.read_text().split(book.PART.begin)[1]
    said = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)[:3]]
    measured = [len(core.entered), core.num_lines, core.num_lines_that_run]
    for claim, figure in zip(said, measured, strict=True):
        assert claim == pytest.approx(figure, rel=0.01), "python scripts/book.py --write"


def test_nanorls_first_page_names_every_file_and_room_of_its_root() -> None:
    text = (ROOT / "nanorl" / "__init__.py").read_text().split('"""')[1]
    for path in (ROOT / "nanorl").iterdir():
        if not path.name.startswith(("_", ".")) and path.name != "py.typed":
            name = f"{path.name}/" if path.is_dir() else path.name
            assert name in text, f"nanorl/__init__.py does not name {name}"


# -- the measures, on a house built on purpose -----------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> House:
    """Two files of a book, a wing of three, of which one is imported in a function."""
    files = {
        "nanorl/one.py": '"""One."""\nfrom nanorl.two import g\n\n\ndef f():\n    return g()\n',
        "nanorl/two.py": '"""Two."""\n\n\ndef g():\n    # Why.\n    from nanorl.far.a import h\n\n'
        "    return h\n\n\ndef idle():\n    return 2\n",
        "nanorl/far/a.py": '"""A."""\nfrom nanorl import one\nfrom nanorl.far import b\n\n'
        "h = b, one\n",
        "nanorl/far/b.py": '"""B."""\n',
        "nanorl/far/__init__.py": '"""Far."""\n',
        "nanorl/__init__.py": '"""Root."""\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root=tmp_path, packages=("nanorl",))


def test_a_book_is_counted_by_hand(small: House) -> None:
    walk = Walk.of(small, [{"nanorl/one.py": ["f"]}, {"nanorl/two.py": ["g"]}])
    assert (walk.num_lines, walk.num_lines_that_run) == (6 + 12, 2 + 5)
    assert walk.imports_out == ["nanorl/two.py -> nanorl/far/a.py: h"]
    assert [one for one in sorted(walk.closure) if book.is_of_the_book(one)] == sorted(walk.entered)
    assert walk.closure == {
        *("nanorl/one.py", "nanorl/two.py", "nanorl/far/a.py", "nanorl/far/b.py"),
    }
    assert walk.comments_per_100 == round(100 * 1 / (3 + 5), 1)


def test_rooms_and_arrows_are_counted_by_hand(small: House) -> None:
    arrows = book.rooms(small)
    assert arrows == {"root": {"far"}, "far": {"root"}}
    assert book.arrows_up(arrows) == 1
    assert book.arrows_up({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 0
    assert book.arrows_up({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == 1
