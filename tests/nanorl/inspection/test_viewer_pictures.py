"""What the viewer's server gives away of pictures: by hash, with the key, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from seeing_runs import (
    BLUE,
    GREEN,
    HTML,
    RED,
    SPELLED,
    add_file,
    coloured,
    filled_run,
    lying_png,
    sha_of,
)
from starlette.testclient import TestClient
from viewer_runs import viewed

from nanoengine.vision.png import MAX_FILE_BYTES
from nanorl.observability.store import RolloutStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled_run(tmp_path_factory.mktemp("runs") / "seeing")[0]


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return viewed(run)


def whole(client: TestClient, name: str) -> dict[str, Any]:
    return client.get("/api/rollout", params={"run": "seeing", "phase": "rl", "id": name}).json()


def file(client: TestClient, sha256: str, run: str = "seeing") -> Any:
    return client.get("/api/picture", params={"run": run, "sha256": sha256})


def test_a_rollout_has_its_pictures_where_they_stand(client: TestClient) -> None:
    doc = whole(client, "right")
    assert "image_pad" not in json.dumps(doc) and "vision_start" not in json.dumps(doc)
    [sequence] = doc["sequences"]
    before, picture, after = sequence["prompt"][-1]["content"]["parts"]
    assert (before["text"], after["text"]) == ("Look:", "Which?")
    # 48 x 48 pixels in patches of 8 are 6 x 6, two by two of which are a token
    assert picture == {"sha256": sha_of(coloured(RED)), "title": "picture 1, 9 tokens, 48 x 48"}
    [reply] = sequence["turns"][0]["replies"]
    assert reply["content"]["parts"] == [
        {"sha256": sha_of(coloured(GREEN)), "title": "picture 2, 9 tokens, 48 x 48"}
    ]


def test_a_group_has_the_pictures_of_each_of_its_rollouts(client: TestClient) -> None:
    asked = {"run": "seeing", "phase": "rl", "group": "g"}
    docs = client.get("/api/group", params=asked).json()
    seen = [
        doc["sequences"][0]["turns"][0]["replies"][0]["content"]["parts"][0]["sha256"]
        for doc in docs
    ]
    assert sorted(seen) == sorted([sha_of(coloured(GREEN)), sha_of(coloured(BLUE))])


def test_what_changed_names_pictures_that_differ(client: TestClient) -> None:
    sides = {"a": "seeing", "a_phase": "rl", "b": "seeing", "b_phase": "rl"}
    found = client.get("/api/changes", params=sides | {"a_id": "right", "b_id": "wrong"}).json()
    text = json.dumps(found)
    assert sha_of(coloured(GREEN))[:12] in text and sha_of(coloured(BLUE))[:12] in text
    assert not found["is_same"] and "image_pad" not in text


def test_tokens_of_a_picture_are_one_picture(client: TestClient, run: Path) -> None:
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        rollout = store.get("right")
    first, second = rollout.images
    query = {"run": "seeing", "phase": "rl", "id": "right", "place": 0, "start": 0, "end": 4000}
    found = client.get("/api/tokens", params=query).json()
    assert [(one["start"], one["end"]) for one in found["pictures"]] == [
        (span.start, span.start + 9) for span in (first, second)
    ]
    assert found["pictures"][1]["title"] == "picture 2, 9 tokens, 48 x 48"
    assert found["id"] == rollout.tokens, "the tokens are all there"
    assert "image_pad" not in "".join(found["text"]) and "<|vision_start|>" in found["text"]
    cut = client.get(
        "/api/tokens", params=query | {"start": first.start + 4, "end": second.start + 2}
    ).json()
    assert [(one["start"], one["end"]) for one in cut["pictures"]] == [
        (span.start, span.start + 9) for span in (first, second)
    ]
    assert "image_pad" not in "".join(cut["text"])


def test_a_picture_comes_as_it_was_stored(client: TestClient) -> None:
    data = coloured(RED).data()
    answer = file(client, sha_of(coloured(RED)))
    assert (answer.status_code, answer.content) == (200, data)
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "img-src data: blob:" in answer.headers["content-security-policy"]
    sha256 = sha_of(coloured(RED))
    assert client.get("/api/picture", params={"run": "seeing"}).status_code == 404
    keyless = {"Authorization": "Bearer wrong"}
    asked = {"run": "seeing", "sha256": sha256}
    assert client.get("/api/picture", params=asked, headers=keyless).status_code == 401


def test_no_other_file_is_given_away(client: TestClient, run: Path, tmp_path: Path) -> None:
    secret = run / "config.json"
    there = hashlib.sha256(secret.read_bytes()).hexdigest()
    (run / "pictures" / there).symlink_to(secret)  # a name that fits leads to what is no picture
    assert file(client, there).status_code == 400
    link = "a" * 64
    (run / "pictures" / link).symlink_to(secret)
    os.mkfifo(run / "pictures" / ("b" * 64))  # would be waited for
    (run / "pictures" / ("c" * 64)).mkdir()
    names = ["../config.json", str(secret), "", ".", "A" * 64, link, "b" * 64, "c" * 64, "d" * 64]
    names += [f"{'e' * 64}\n", "\x00" * 64, "é" * 64]
    for name in names:
        answer = file(client, name)
        assert answer.status_code == 404, name
        assert secret.read_text()[:40] not in answer.text


def test_what_is_no_picture_is_refused_with_the_reason(client: TestClient, run: Path) -> None:
    for data, reason in (
        (b"<svg onload='alert(1)'/>", "PNG, JPEG, WebP and GIF are read"),
        (b"", "PNG, JPEG, WebP and GIF are read"),
        (coloured(RED).data()[:20], "within its header"),
        (lying_png(), "100000x100000 pixels"),
        (lying_png(0, 5), "0x5 pixels"),
    ):
        answer = file(client, add_file(run, data))
        assert answer.status_code == 400 and reason in answer.json()["error"], data[:30]
    damaged = sha_of(coloured(RED, 24))
    (run / "pictures" / damaged).write_bytes(coloured(RED).data())
    assert "is damaged" in file(client, damaged).json()["error"]
    large = coloured(RED).data() + bytes(MAX_FILE_BYTES)
    assert "is damaged" in file(client, add_file(run, large)).json()["error"], "never read whole"


def test_hostile_spans_and_texts_stay_text(client: TestClient) -> None:
    doc = whole(client, "hostile")
    [sequence] = doc["sequences"]
    parts = sequence["prompt"][-1]["content"]["parts"]
    assert parts[0]["text"] == HTML and parts[-1]["text"] == SPELLED
    assert parts[1]["sha256"] == "../config.json"
    assert parts[4]["title"].startswith("picture 4, 9 tokens")
    said, shown = sequence["turns"][0]["replies"][0]["content"]["parts"]
    assert said["text"] == SPELLED and shown["title"].startswith("picture 5,")
