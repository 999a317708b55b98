"""The folder of a server's pictures stays small, and keeps what requests are running with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from seeing_server import png

from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.processor import PictureProcessor
from nanoinfer.http.api_error import ApiError
from nanoinfer.vision.brought_results import brought
from nanoinfer.vision.served_pictures import ServedPictures
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

FILES = [png(seed) for seed in range(5)]
ROOM = sum(map(len, FILES[:2]))  # for two


@pytest.fixture
def processor(tmp_path: Path) -> PictureProcessor:
    return PictureProcessor.from_folder(build_tiny_vision_model(tmp_path / "model"))


@pytest.fixture
def store(processor: PictureProcessor) -> Iterator[ServedPictures]:
    yield ServedPictures(processor, max_folder_bytes=ROOM)


def names(store: ServedPictures) -> set[str]:
    return {file.name for file in store.folder.iterdir()}


def test_the_files_that_came_first_go_first_and_those_in_use_stay(store: ServedPictures) -> None:
    shas = [store.add(data) for data in FILES[:2]]
    with store.held(store.spans(shas[0], range(9))):
        shas += [store.add(data) for data in FILES[2:4]]
        assert names(store) == {shas[0], shas[3]}
        with store.held(store.spans(shas[0], range(9))):
            pass
        assert shas[0] in names(store), "one of two requests is still running"
    assert store.add(FILES[4]) in names(store)
    assert shas[0] not in names(store)
    store._ready.clear()
    with pytest.raises(ValueError, match=r"is not kept .* send the conversation with its pictures"):
        store.spans(shas[0], range(9))
    assert store.add(FILES[0]) == shas[0], "it comes again, and is there again"
    assert store.spans(shas[0], range(9))[0].sha256 == shas[0]


def test_a_picture_that_went_before_its_request_began_is_its_error(store: ServedPictures) -> None:
    """Not that of the engine's step, which is of other requests as well."""
    spans = store.spans(store.add(FILES[0]), range(9))
    for data in FILES[1:]:
        store.add(data)
    with pytest.raises(ApiError, match="is not kept") as caught, store.held(spans):
        raise AssertionError("it is not there")
    assert caught.value.status == 400
    store.add(FILES[0])
    with store.held(spans):
        for data in FILES[1:]:
            store.add(data)
        assert spans[0].sha256 in names(store)
    store.add(FILES[1])
    assert spans[0].sha256 not in names(store), "nobody holds it"


def test_no_file_outside_of_the_folder_is_read(store: ServedPictures, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(FILES[0])
    for name in (str(tmp_path / "secret"), "../secret", "/dev/zero", "", "A" * 64):
        with pytest.raises(KeyError, match="must be 64 hexadecimal digits"):
            store.data(name)


def test_who_wants_a_ready_picture_does_not_wait_for_one_that_is_decoded(
    processor: PictureProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a large file of one client would hold up the engine's step of all others."""
    store = PictureStore(tmp_path / "pictures", processor)
    known = store.add(FILES[0])
    is_decoding, may_end = threading.Event(), threading.Event()

    def slow(data: bytes) -> Any:
        is_decoding.set()
        assert may_end.wait(30)
        raise ValueError("damaged")

    monkeypatch.setattr("nanoengine.vision.picture_store.read_picture", slow)
    faults: list[str] = []

    def add() -> None:
        with pytest.raises(ValueError, match="damaged") as caught:
            store.add(FILES[1])
        faults.append(str(caught.value))

    thread = threading.Thread(target=add)
    thread.start()
    assert is_decoding.wait(30)
    assert store.ready(known).num_tokens == 9, "at once"
    may_end.set()
    thread.join(30)
    assert faults == ["damaged"]


def test_pictures_stand_among_the_texts_that_a_parser_writes() -> None:
    one, two = ({"type": "image", "sha256": name * 64} for name in "ab")
    words = [{"type": "text", "text": text} for text in ("x ", " y")]
    contents: list[Any] = [[words[0], one, words[1], two], "z"]

    def together(results: Any) -> Any:
        return [{"role": "user", "content": "Results: " + "; ".join(results) + "."}]

    (message,) = brought(together, contents)
    assert message["content"] == [
        {"type": "text", "text": "Results: x "}, one,
        {"type": "text", "text": " y"}, two, {"type": "text", "text": "; z."},
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"of 2 pictures .* shows 0"):
        brought(lambda results: [{"role": "user", "content": "none"}], contents)
