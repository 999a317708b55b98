"""Pictures that an environment or one of its tools shows, as the messages that the policy reads."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

import numpy as np
import pytest
from agent_doubles import tiny_tokenizer
from test_env_methods import call

import nanorl
from nanoengine.extras import missing
from nanoengine.vision.png import read_png, write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.images import with_results
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.types import InfrastructureError


def square(level: int) -> np.ndarray:
    return np.full((8, 8, 3), level, np.uint8)


class Album(nanorl.Env):
    """Its opening has a text and a picture; its tool shows another, or says there is none."""

    odd: Any = None
    """Page 0."""

    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task("look")

    def reset(self) -> list[Any]:
        return ["An album:", nanorl.Image(square(10)), "What is in it?"]

    def step(self, text: str) -> Any:
        return nanorl.Image(write_png(square(30)))

    def page(self, number: int) -> Any:
        """Show a page.

        Args:
            number: Which one.
        """
        if number == 0:
            return ["here", nanorl.Image(self.odd)]
        if number > 2:
            return "there is no such page"
        return [f"page {number}", nanorl.Image(square(number))]

    tools = (page,)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SeeingTokenizer:
    folder = tmp_path_factory.mktemp("seeing")
    return seeing_tokenizer(build_tiny_vision_model(folder / "model"), folder / "pictures")


def sha(level: int) -> str:
    return hashlib.sha256(write_png(square(level))).hexdigest()


def part(level: int) -> dict[str, str]:
    return {"type": "image", "sha256": sha(level)}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def played(tokenizer: Any, *turns: str) -> list[Any]:
    async def play() -> list[Any]:
        episode = EnvClassKind(Album).open(
            Services(tokenizer=tokenizer, sandbox=None, timeout_s=5.0)
        )
        opening = await episode.reset(nanorl.Task("look"))
        steps = [await episode.step(turn) for turn in turns]
        return [
            opening.messages,
            *(episode.format_observation(step.observation) for step in steps),
        ]

    return asyncio.run(play())


def test_an_opening_and_a_reply_with_pictures(tokenizer: SeeingTokenizer) -> None:
    opening, reply = played(tokenizer, "hm")
    assert opening[-1]["content"] == [said("An album:"), part(10), said("What is in it?")]
    assert reply == [{"role": "user", "content": [part(30)]}]
    assert (read_png(tokenizer.store.data(sha(30))).pixels == 30).all()


def test_a_tool_shows_a_picture_beside_its_text(tokenizer: SeeingTokenizer) -> None:
    _, shown, told = played(tokenizer, call("page", number=1), call("page", number=7))
    (message,) = shown
    text, picture = message["content"]
    assert "page 1" in text["text"]
    assert picture == part(1)
    assert "there is no such page" in told[0]["content"]


THIN = np.zeros((1, 400, 3), np.uint8)  # the model takes sides of up to 200 times the other
EMPTY = np.zeros((0, 8, 3), np.uint8)
UNSHOWN = [
    (THIN, "a picture of 400x1 pixels: one side may be at most 200 times"),
    (EMPTY, r"pixels are uint8 \[0, 8, 3\]"),
    (write_png(square(1))[:-20], "this PNG ends"),
    ("nowhere.png", "the picture nowhere.png does not exist"),
]


@pytest.mark.parametrize(("source", "why"), UNSHOWN)
def test_a_tools_picture_that_cannot_be_shown_is_a_line_to_the_model(
    tokenizer: SeeingTokenizer, source: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy asked for it, such as for a part of another: that ends no rollout, and no run."""
    monkeypatch.setattr(Album, "odd", source)
    _, told = played(tokenizer, call("page", number=0))
    text, line = told[0]["content"]
    assert "here" in text["text"]
    assert re.match(rf"\n\(a picture is not shown: {why}.*\)$", line["text"])


@pytest.mark.parametrize(("source", "why"), UNSHOWN)
def test_an_environments_picture_that_cannot_be_shown_fails_the_rollout(
    tokenizer: SeeingTokenizer, source: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Album, "step", lambda self, text: nanorl.Image(source))
    with pytest.raises(InfrastructureError, match=rf"of Album cannot be shown: {why}"):
        played(tokenizer, "hm")


def test_what_is_not_installed_is_no_fault_of_a_picture(
    tokenizer: SeeingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would go on whose policy is shown nothing."""

    def add(data: bytes) -> str:
        raise missing("a JPEG picture", "pillow", extra="vision")

    monkeypatch.setattr(tokenizer.store, "holds", lambda sha256: False)
    monkeypatch.setattr(tokenizer.store, "add", add)
    with pytest.raises(ValueError, match="a JPEG picture needs the package pillow"):
        played(tokenizer)


def test_pictures_of_several_calls_stand_with_their_own_message_or_in_one() -> None:
    one, two = nanorl.Image(b"1"), nanorl.Image(b"2")
    apart = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    assert with_results(apart, [[], [two]])[0] == apart[0]
    assert with_results(apart, [[], [two]])[1]["content"] == ["b", two]
    (together,) = with_results([{"role": "tool", "content": "a\nb"}], [[one], [two]])
    assert together["content"] == ["a\nb", one, two]


def test_a_model_that_reads_text_is_shown_nothing() -> None:
    with pytest.raises(ValueError, match="Album shows a picture, and the model reads text alone"):
        played(tiny_tokenizer())
