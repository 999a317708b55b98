"""Pictures of rollouts in a real browser: seen where they stand, told by name, never obeyed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from seeing_runs import HTML, SPELLED, coloured, filled_run, sha_of
from test_viewer_browser import CHROMIUM, DRIVER, Page
from viewer_runs import served

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and its driver: scripts/install_test_tools.sh"
)
LOADED = (
    "[...document.querySelectorAll('.picture img')].map((one) => one.complete && one.naturalWidth)"
)
COLOUR = """
(() => {{
  const image = document.querySelectorAll('{}')[{}];
  const canvas = Object.assign(document.createElement('canvas'), {{width: 1, height: 1}});
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run, _ = filled_run(tmp_path_factory.mktemp("runs") / "seeing")
    with served(run) as (address, _):
        yield address


def colour(page: Page, selector: str, place: int) -> list[int]:
    return page.run(COLOUR.format(selector, place).strip())


def test_a_picture_stands_between_its_texts_and_opens_at_its_own_size(
    page: Page, address: str
) -> None:
    page.errors  # noqa: B018 - those of an earlier page
    page.open(address, view="rollouts", run="seeing", id="right")
    page.wait(lambda: page.run(LOADED) == [40, 40])
    assert colour(page, ".picture img", 0) == [255, 0, 0]
    assert colour(page, ".picture img", 1) == [0, 255, 0]
    assert page.all(".picture figcaption") == [
        "picture 1, 9 tokens, 48 x 48",
        "picture 2, 9 tokens, 48 x 48",
    ]
    tops = page.run(
        "[...document.querySelectorAll('.step.from-prompt .parts > *')]"
        ".map((one) => one.getBoundingClientRect().top)"
    )
    assert len(tops) == 3 and tops == sorted(tops), "a text, the picture, a text"
    height = "document.querySelector('.picture img').clientHeight"
    assert page.run(height) == 72
    page.click(".picture button")
    assert page.run(height) == 40
    assert page.run("document.querySelector('.picture button').ariaExpanded") == "true"
    told = page.text(".picture figcaption")
    assert "the file: 40 x 40" in told and sha_of(coloured((255, 0, 0)))[:12] in told
    page.click(".picture button")
    assert page.run(height) == 72 and "the file" not in page.text(".picture figcaption")
    assert page.errors == [], "the policy allows what is shown"


def test_tokens_of_a_picture_are_one_picture(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="seeing", id="right", mode="tokens")
    page.wait(lambda: page.run(LOADED) == [40, 40])
    flow = page.text(".flow")
    assert "picture 2, 9 tokens, 48 x 48" in flow and "image_pad" not in flow
    assert flow.index("picture 1,") < flow.index("agent, turn 1") < flow.index("picture 2,")
    tokens = page.run("document.querySelectorAll('.tk').length")
    known = page.run("[...document.querySelectorAll('.tk')].map((one) => Number(one.dataset.n))")
    assert known == list(range(tokens)), "every other token can be stepped through"


def test_a_group_shows_the_pictures_of_its_rollouts_side_by_side(page: Page, address: str) -> None:
    page.open(address, view="group", run="seeing", phase="rl", group="g")
    page.wait(lambda: page.run(LOADED) == [40] * 4)
    seen = {
        tuple(colour(page, f".column:nth-child({column}) .picture img", 1)) for column in (1, 2)
    }
    assert seen == {(0, 255, 0), (0, 0, 255)}
    boxes = page.run(
        "[...document.querySelectorAll('.column')].map((one) =>"
        " one.querySelectorAll('.picture')[0].getBoundingClientRect().toJSON())"
    )
    assert boxes[0]["left"] < boxes[1]["left"] and boxes[0]["top"] == boxes[1]["top"]


def test_a_missing_picture_is_a_line_that_names_its_hash(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="seeing", id="missing")
    page.wait_for(".picture figcaption", "not there: no picture")
    assert sha_of(coloured((9, 9, 9)))[:12] in page.text(".picture figcaption")
    assert page.run("document.querySelectorAll('.picture img').length") == 0


def test_hostile_pictures_and_texts_are_lines(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="seeing", id="hostile")
    page.wait(lambda: "100000x100000 pixels" in " ".join(page.all(".picture figcaption")))
    page.run("[...document.querySelectorAll('.picture')].at(-1).scrollIntoView()")
    page.wait(lambda: page.run(LOADED) == [40])
    lines = page.all(".picture figcaption")
    assert "sha256 ../config.js: " in lines[0] and "64 hexadecimal digits" in lines[0]
    assert "PNG, JPEG, WebP and GIF are read" in lines[1]
    assert len(lines) == 5, "what spells a picture is none"
    said = page.text("#reader .body")
    assert HTML in said and SPELLED in said
    names = page.run("[...document.querySelectorAll('.picture')].map((one) => one.dataset.sha256)")
    assert names[3] == HTML
    assert page.run("window.canary ?? 'unset'") == "unset"
    assert page.run("document.querySelectorAll('[onerror], svg').length") == 0
    assert json.loads(page.run("JSON.stringify(document.scripts.length)")) == 1
