"""panel, album and the example of screenshots: what they draw, who wins, and that gaps are zero."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from seer import Seer

import nanorl
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.fenced import FencedParser
from nanorl.envs.base import Services
from nanorl.envs.catalog import load_kind
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.shipped.album import Album
from nanorl.envs.shipped.panel import BUTTON, LETTERS, SIDE, Panel, drawn
from nanorl.envs.shipped.recall import Recall
from nanorl.envs.shipped.room import drawn as drawn_room
from nanorl.envs.shipped.segment_digits import draw_number, number_picture, number_width
from nanorl.task import Task

ROOT = Path(__file__).resolve().parents[3]
WHITE = (255, 255, 255)
TWELVE = """
....   .##.
...#   ...#
...#   ...#
....   .##.
...#   #...
...#   #...
....   .##.
"""
DIGITS = {
    "3": ".##. ...# ...# .##. ...# ...# .##.",
    "4": ".... #..# #..# .##. ...# ...# ....",
    "5": ".##. #... #... .##. ...# ...# .##.",
    "6": ".##. #... #... .##. #..# #..# .##.",
    "7": ".##. ...# ...# .... ...# ...# ....",
    "8": ".##. #..# #..# .##. #..# #..# .##.",
    "9": ".##. #..# #..# .##. ...# ...# .##.",
    "0": ".##. #..# #..# .... #..# #..# .##.",
}


def by_hand(rows: Sequence[str]) -> np.ndarray:
    return np.array([[255 if one == "#" else 0 for one in row] for row in rows], np.uint8)


def glyph(number: int, scale: int = 1) -> np.ndarray:
    pixels = np.zeros((7 * scale, number_width(number, scale), 3), np.uint8)
    draw_number(pixels, number, (0, 0), WHITE, scale)
    assert (pixels[..., 0] == pixels[..., 1]).all()
    return pixels[..., 0]


def test_digits_are_drawn_segment_by_segment() -> None:
    rows = [f"{row[:4]}..{row[7:]}" for row in TWELVE.strip("\n").split("\n")]
    assert (glyph(12) == by_hand(rows)).all()
    for digit, drawing in DIGITS.items():
        assert (glyph(int(digit)) == by_hand(drawing.split())).all(), digit
    assert (glyph(12, 3) == np.kron(glyph(12), np.ones((3, 3), np.uint8))).all()
    picture = number_picture(12, 48, WHITE, 2)
    assert (picture[17:31, 14:34, 1] == glyph(12, 2)).all() and picture.sum() == 3 * glyph(
        12, 2
    ).astype(int).sum()


# -- panel -----------------------------------------------------------------------------------------


def panel(order: int, *panels: Sequence[int], **options: Any) -> tuple[Any, list[Any]]:
    env = Panel(num_panels=len(panels), **options)
    env.task = Task("Press.", kind="panel", data={"order": order, "panels": list(panels)})
    return env, env.reset()


FIRST = [50, 31, 77, 12, 90, 45, 63, 28, 15, 99, 84, 36, 70, 22, 58, 41]  # 12 15 22 28 31 ...
SECOND = FIRST[::-1]


def pixels_of(image: Any) -> np.ndarray:
    assert isinstance(image, nanorl.Image) and isinstance(image.source, np.ndarray)
    return image.source


def test_the_right_button_is_the_kth_smallest_of_the_newest_panel() -> None:
    env, shown = panel(2, FIRST, SECOND)
    assert [pixels_of(one).shape for one in shown] == [(48, 48, 3)] * 2
    assert LETTERS[FIRST.index(15)] == "I" and LETTERS[SECOND.index(15)] == "H"
    (second,) = env.step(" I.")
    assert (pixels_of(second) == drawn(SECOND)).all()
    assert env.step("H").reward == 1.0
    for wrong in ("D", "IH", "i", "", "the button I or J"):
        env, _ = panel(2, FIRST, SECOND)
        assert env.step(wrong).reward == 0.0, wrong


def read_number(pixels: np.ndarray, place: int) -> int:
    """The number of a button, from its pixels."""
    top, left = (BUTTON * at for at in divmod(place, SIDE))
    face = pixels[top + 2 : top + 9, left + 1 : left + 11, 0]
    (number,) = (one for one in range(10, 100) if (glyph(one) == face).all())
    return number


def read_order(pixels: np.ndarray) -> int:
    (order,) = (k for k in range(1, 10) if (number_picture(k, 48, (0, 255, 0), 6) == pixels).all())
    return order


def test_whoever_reads_the_pictures_wins_and_the_teacher_too() -> None:
    kind = load_kind("panel", {"num_panels": 2})
    for task in kind.tasks(0).batch(0, 12):
        env: Any = Panel(num_panels=2)
        env.task = task
        first, shown = env.reset()
        order = read_order(pixels_of(first))
        for _ in range(2):
            numbers = [read_number(pixels_of(shown), place) for place in range(16)]
            right = LETTERS[numbers.index(sorted(numbers)[order - 1])]
            assert env.teacher([], random.Random(0)) == right
            reply = env.step(right)
            shown = reply[0] if isinstance(reply, list) else None
        assert reply.reward == 1.0


# -- recall ----------------------------------------------------------------------------------------


def test_the_ring_is_shown_first_and_asked_for_last() -> None:
    env = Recall(size=6, num_pictures=3)
    env.task = Task("Where?", data={"places": [[1, 2], [5, 0], [4, 3]]})
    shown = [env.reset(), env.step("b3"), env.step(" f1\n")]
    pictures = [pixels_of(one) for (one,) in shown]
    assert (pictures[0] == drawn_room(6, (1, 2), (4, 3))).all(), "a red square and a green ring"
    assert (pictures[1] == drawn_room(6, (5, 0))).all()
    assert not pictures[2].any(), "nothing to see: look back"
    assert env.step("e4").reward == 1.0


@pytest.mark.parametrize("said", ["f1", "b3 b3", "B3", ""])
def test_a_wrong_name_ends_the_episode(said: str) -> None:
    env = Recall(num_pictures=2)
    env.task = Task("Where?", data={"places": [[1, 2], [5, 0]]})
    env.reset()
    assert env.step(said).reward == 0.0


def test_recall_is_won_by_its_teacher() -> None:
    for seed in range(8):
        played = nanorl.rehearse("recall", seed=seed)
        assert played.reward == 1.0 and len(set(played.turns)) == 4, "no two squares are one"


def test_a_teacher_that_remembers_ten_squares_names_one_of_half_a_row_for_a_later_ring() -> None:
    rng = random.Random(0)

    def names_of(ring: list[int], num_named: int) -> Counter[str]:
        env = Recall(size=6, num_pictures=2, teacher_squares=10)
        env.task = Task("Where?", data={"places": [[1, 4], ring]})
        env.reset()
        if num_named:
            env.step("b5")
        return Counter(env.teacher([], rng) for _ in range(400))

    assert set(names_of([3, 5], 0)) == {"b5"}, "of the red square it says what is right"
    assert set(names_of([1, 3], 1)) == {"b4"}
    vague = names_of([3, 2], 1)
    assert set(vague) == {"d1", "d2", "d3"}, "the half of its row"
    assert all(100 < number < 170 for number in vague.values()), "each as often as another"


# -- album -----------------------------------------------------------------------------------------


class Asks(FencedParser):
    """Reads every turn as a call for page 1, then 2, ..., whatever it says."""

    asked: ClassVar[list[int]] = []

    def read(self, text: str) -> list[ToolCall | ToolCallError]:
        self.asked.append(len(self.asked) + 1)
        return [ToolCall("page", {"number": self.asked[-1]})]


class AskedAlbum(Album):
    parser: Any = Asks()


def test_pages_are_shown_and_the_sum_is_what_counts() -> None:
    env = Album()
    env.task = Task("Sum?", answer=14, data={"numbers": [2, 5, 7]})
    for number, value in ((1, 2), (3, 7)):
        assert (pixels_of(env.page(number)) == number_picture(value, 48, WHITE, 4)).all()
    with pytest.raises(nanorl.ToolError, match="there are the pages 1 to 3"):
        env.page(4)
    played = nanorl.rehearse("album")
    assert played.reward == 1.0 and len(played.turns) == 4
    assert played.turns[0] == "[page(number=1)]"
    assert played.turns[3] == str(sum(played.task.data["numbers"]))
    wrong = str(1 + played.task.answer)
    assert nanorl.rehearse("album", played.task, turns=[wrong]).reward == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "wrong"),
    [
        ("panel", {"orders": 10}, "orders=10: must be a number from 1 to 9"),
        ("panel", {"num_panels": 0}, "num_panels=0"),
        ("recall", {"size": 5}, "size=5: must be even"),
        ("recall", {"num_pictures": 1}, "num_pictures=1: must be a number from 2 to 36"),
        ("recall", {"teacher_squares": 37}, "teacher_squares=37: must be a number from 0 to 36"),
        ("album", {"pages": "x"}, "pages=x"),
        ("album", {"most": 100}, "most=100: must be a number from 1 to 99"),
    ],
)
def test_arguments_that_make_no_game_are_refused(
    name: str, arguments: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        load_kind(name, arguments)


# -- all of them -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.make(tmp_path_factory.mktemp("seer"))


def test_the_example_is_played_by_its_teacher() -> None:
    for seed in range(4):
        played = nanorl.rehearse(str(ROOT / "examples" / "screenshots.py"), seed=seed)
        assert played.reward == 1.0
        presses = abs(played.task.data["mark"] - 3)
        assert [len(one) for one in played.observations] == [1] * presses, "a picture each"


@pytest.mark.parametrize(("name", "num_images"), [("panel", 2), ("album", 3), ("bar", 4)])
def test_rollouts_of_the_games_have_no_gap(seer: Seer, name: str, num_images: int) -> None:
    services = Services(tokenizer=seer.tokenizer, sandbox=None, timeout_s=5.0)
    kind: Any = {
        "panel": lambda: load_kind("panel", {}),
        "album": lambda: EnvClassKind(AskedAlbum),
        "bar": lambda: load_kind(str(ROOT / "examples" / "screenshots.py"), {}),
    }[name]()
    (task,) = kind.tasks(0).batch(0, 1)
    turns = {"panel": 1, "album": 4, "bar": 4}[name]
    rollout = seer.play(kind.open(services), task, max_turns=turns, max_context_tokens=1500)
    assert len(rollout.images) == num_images
    assert seer.gap(rollout) == 0.0
