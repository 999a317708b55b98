"""look_back: what it draws, what a walk finds that looks, does not look, or draws lots."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nanorl.envs.images import Image
from nanorl.envs.shipped.look_back import MOVES, LookBack, distance, moved
from nanorl.envs.shipped.room import drawn, named

GAMES = 2000
Player = Callable[[LookBack, random.Random, list[str]], str]


def pixels(said: list[Any]) -> np.ndarray:
    (image,) = said
    assert isinstance(image, Image)
    assert isinstance(image.source, np.ndarray)
    return image.source


def test_a_room_is_drawn_square_by_square() -> None:
    """The agent fills the middle 6 x 6 pixels of its square, the door a ring of two pixels."""
    room = drawn(2, (0, 1), (1, 0))
    assert room.shape == (16, 16, 3)
    expected = np.zeros((16, 16, 3), np.uint8)
    expected[1:7, 9:15] = (255, 0, 0)
    expected[9:15, 1:7] = (0, 255, 0)
    expected[11:13, 3:5] = 0
    assert (room == expected).all()


def test_the_door_is_in_the_first_picture_alone() -> None:
    env = LookBack(size=4, num_moves=6)
    env.task = env.tasks(random.Random(1))
    env.task.data.update(start=[0, 0], door=[2, 1])
    assert (pixels(env.reset()) == drawn(4, (0, 0), (2, 1))).all()
    assert (pixels(env.step("S")) == drawn(4, (1, 0), None)).all()
    assert (pixels(env.step("N and S")) == drawn(4, (1, 0), None)).all(), "no single letter"
    assert (pixels(env.step("W")) == drawn(4, (1, 0), None)).all(), "a wall"
    env.step(" S.")
    end = env.step("E")
    assert end.reward == 1.0


def test_the_last_move_ends_the_episode() -> None:
    env = LookBack(size=4, num_moves=2)
    env.task = env.tasks(random.Random(1))
    env.task.data.update(start=[0, 0], door=[1, 1])
    env.reset()
    env.step("W")
    assert env.step("W").reward == 0.0


def success(player: Player, **options: Any) -> float:
    rng, found = random.Random(3), 0.0
    for _ in range(GAMES):
        env = LookBack(**options)
        env.task = env.tasks(rng)
        env.reset()
        said: list[str] = []
        while True:
            said.append(player(env, rng, said))
            step = env.step(said[-1])
            if not isinstance(step, list):
                found += step.reward or 0.0
                break
    return found / GAMES


def lots(env: LookBack, rng: random.Random, said: list[str]) -> str:
    return rng.choice(list(MOVES))


def no_return(env: LookBack, rng: random.Random, said: list[str]) -> str:
    """A walk that does not know the door: never back, and not into a wall."""
    back = {"N": "S", "S": "N", "W": "E", "E": "W"}
    free = [w for w, m in MOVES.items() if moved(env._at, m, env.size) != env._at]
    onward = [word for word in free if not said or word != back[said[-1]]]
    return rng.choice(onward or free)


def best(env: LookBack, rng: random.Random, said: list[str]) -> str:
    here = distance(env._at, env._door)
    return next(
        word
        for word, move in MOVES.items()
        if distance(moved(env._at, move, env.size), env._door) < here
    )


def test_who_looks_always_arrives_and_who_does_not_seldom() -> None:
    assert success(best) == 1.0
    assert success(lots) < 0.12
    assert success(no_return) < 0.25


def test_the_teacher_shortens_the_way_on_slippery_ground() -> None:
    rng, slipped, moves = random.Random(4), 0, 0
    for _ in range(200):
        env = LookBack()
        env.task = env.tasks(rng)
        env.reset()
        while True:
            before, word = env._at, env.teacher([], rng)
            place, move = word[:2], MOVES[word[2]]
            assert place == named(before), "it says where it is"
            assert distance(moved(before, move, 6), env._door) < distance(before, env._door)
            step = env.step(word)
            moves += 1
            slipped += env._at != moved(before, move, 6)
            if not isinstance(step, list):
                break
    # four of ten slip, and a quarter of those by chance where they were to go
    assert 0.25 < slipped / moves < 0.35


def test_squares_have_the_names_of_a_chess_board_from_the_top() -> None:
    assert [named(place) for place in ((0, 0), (1, 2), (5, 5))] == ["a1", "b3", "f6"]


@pytest.mark.parametrize("options", [{"size": 5}, {"size": 0}, {"num_moves": 0}])
def test_rooms_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--env-args \w+="):
        LookBack(**options)


def test_tasks_of_a_seed_are_the_same_and_can_be_reached() -> None:
    tasks = [LookBack().tasks(random.Random(seed)) for seed in range(100)]
    again = [LookBack().tasks(random.Random(seed)) for seed in range(100)]
    assert tasks == again
    ways = [distance(tuple(t.data["start"]), tuple(t.data["door"])) for t in tasks]
    assert min(ways) >= 2
    assert max(ways) <= 5
