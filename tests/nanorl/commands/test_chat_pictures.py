"""`nanorl chat` with pictures: the model is shown the file, and says otherwise without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_doubles import tiny_tokenizer
from seeing_runs import BLUE, RED, coloured, sha_of

from nanorl import cli
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    build_tiny_vision_model(folder / "sees")
    for name, colour in (("red", RED), ("blue", BLUE)):
        (folder / f"{name}.png").write_bytes(coloured(colour).data())
    (folder / "text.png").write_text("no picture")
    return folder


def saved(place: Path, *words: str) -> dict:
    file = place / "chat.json"
    options = ["--temperature", "2", "--max-tokens", "12"]
    lines = [*words, f"/save {file}"]
    before = sorted(one for one in place.rglob("*"))
    assert cli.main(["chat", str(place / "sees"), *options, *lines]) == 0
    assert sorted(one for one in place.rglob("*") if one != file) == [
        one for one in before if one != file
    ], "a chat leaves no pictures behind"
    return json.loads(file.read_text())


def test_a_picture_goes_with_the_first_message(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    red = saved(place, "--image", str(place / "red.png"), "--say", "Which colour?")
    shown = capsys.readouterr().out
    line = f"[picture 1: 48 x 48, 9 tokens, sha256 {sha_of(coloured(RED))[:12]}]"
    assert f"{line} goes with the next message" in shown
    [span] = red["images"]
    assert span["sha256"] == sha_of(coloured(RED)) and span["length"] == 9
    # <usr>, the mark before the picture, and the picture
    assert span["start"] == 2 and len(set(red["tokens"][2:11])) == 1
    blue = saved(place, "--image", str(place / "blue.png"), "--say", "Which colour?")
    assert red["tokens"][: len("Which")] == blue["tokens"][: len("Which")]
    assert red["replies"][0]["turns"] != blue["replies"][0]["turns"], "it was looked at"


def test_pictures_are_shown_inside_of_a_chat_and_asked_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "hi",
        f"/image {place / 'red.png'}",
        f"/image {place / 'blue.png'}",
        "And?",
        "/compare",
    ]
    data = saved(place, "--base", str(place / "sees"), "--say", *lines, "plain")
    shown = capsys.readouterr().out
    assert [span["sha256"] for span in data["images"]] == [
        sha_of(coloured(RED)),
        sha_of(coloured(BLUE)),
    ], "once each: the last message shows none"
    trained, base = shown.split("--- trained ---")[1].split("--- base ---")
    said = shown.split("--- trained ---")[0].rsplit("agent  ", 1)[1].splitlines()[0]
    assert trained.splitlines()[1] == base.splitlines()[1] == f"agent  {said}"


def test_a_picture_can_be_taken_back(place: Path) -> None:
    data = saved(place, "--say", f"/image {place / 'red.png'}", "/image", "hi")
    assert data["images"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("PLACE/sees --image PLACE/none.png --say x", "/image PLACE/none.png: "),
        ("PLACE/sees --image PLACE/text.png --say x", "PNG, JPEG, WebP and GIF are read"),
        ("PLACE/reads --image PLACE/red.png --say x", "reads text alone; talk to a model with"),
        ("PLACE/reads --say x /image\tPLACE/red.png", "reads text alone"),
    ],
)
def test_mistakes_are_said_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    if not (place / "reads").is_dir():
        build_tiny_model(place / "reads", seed=0)
    given = [one.replace("PLACE", str(place)).replace("\t", " ") for one in words.split(" ")]
    assert cli.main(["chat", *given]) == 2
    error = capsys.readouterr().err
    assert message.replace("PLACE", str(place)) in error and "Traceback" not in error


def test_text_models_have_no_store_to_mistake() -> None:
    assert not hasattr(tiny_tokenizer(), "store")


def test_a_game_that_needs_its_own_tasks_says_so(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and the way on: its held-out tasks."""
    options = ["--env", "recall", "--temperature", "0", "--max-tokens", "4"]
    assert cli.main(["chat", str(place / "sees"), *options, "--say", "hi"]) != 0
    said = capsys.readouterr()
    assert "is given one by /task" in said.err and "Traceback" not in said.err + said.out
