"""report.html with pictures: each file once, where it was seen, or a line that says why not."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from seeing_runs import BLUE, GREEN, HTML, RED, TASK, coloured, filled_run, sha_of
from test_report_html import Page, example, make_rollout, render

from nanoengine.vision.seeing_tokenizer import SeeingTokenizer
from nanorl.observability.report import embedded_pictures
from nanorl.observability.report.examples import Example, Part
from nanorl.observability.store import RolloutStore
from nanorl.shown_pictures import RunPictures, SeeingDecode

URL = re.compile(r"url\(data:([\w/]+);base64,([\w+/=]+)\)")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SeeingTokenizer]:
    return filled_run(tmp_path_factory.mktemp("runs") / "seeing")


def rendered(
    run: tuple[Path, SeeingTokenizer], folder: Path, *names: str, part: Part = ""
) -> tuple[str, Page]:
    place, tokenizer = run
    with RolloutStore(place / "rollouts.sqlite", is_read_only=True) as store:
        examples = [
            Example(rollout=store.get(name), task=TASK, when="step 0", part=part) for name in names
        ]
    decode = SeeingDecode(tokenizer.decode, RunPictures.of(tokenizer))
    return render(folder, examples=examples, decode=decode)


def test_each_file_is_in_the_page_once_and_shown_wherever_it_was_seen(
    run: tuple[Path, SeeingTokenizer], tmp_path: Path
) -> None:
    html, page = rendered(run, tmp_path, "right", "wrong", part="group")
    embedded = [base64.b64decode(data) for _, data in URL.findall(html)]
    assert sorted(embedded) == sorted(coloured(one).data() for one in (RED, GREEN, BLUE))
    assert {kind for kind, _ in URL.findall(html)} == {"image/png"}
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert labels.count("picture 1, 9 tokens, 48 x 48") == 2, "of both rollouts"
    assert labels.count("picture 2, 9 tokens, 48 x 48") == 2
    assert "image_pad" not in html and "img-src data:" in html
    assert "Look:" in page.text and "Which?" in page.text
    group = html[html.index('<section id="group">') :]
    columns = group.split("<article")[1:3]
    shown = [re.findall(r'class="small shown (px\d+)"', one) for one in columns]
    assert shown[0][0] == shown[1][0] and shown[0][1] != shown[1][1]


def test_a_page_takes_so_many_bytes_of_pictures(
    run: tuple[Path, SeeingTokenizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red, green = (len(coloured(one).data()) for one in (RED, GREEN))
    monkeypatch.setattr(embedded_pictures, "MOST_BYTES", red + green - 1)
    html, page = rendered(run, tmp_path, "right")
    assert len(URL.findall(html)) == 1
    line = f"picture 2, 9 tokens, 48 x 48, sha256 {sha_of(coloured(GREEN))[:12]}: not in this page"
    assert line in page.text and f"this one has {green:,}: see nanorl view" in page.text


def test_missing_and_hostile_pictures_are_lines(
    run: tuple[Path, SeeingTokenizer], tmp_path: Path
) -> None:
    html, page = rendered(run, tmp_path, "missing", "hostile")
    assert f"sha256 {sha_of(coloured((9, 9, 9)))[:12]}: no picture" in page.text
    assert "its name must be 64 hexadecimal digits" in page.text
    assert "PNG, JPEG, WebP and GIF are read" in page.text
    assert "100000x100000 pixels" in page.text
    assert len(URL.findall(html)) == 1, "the red one"
    assert not {"script", "img"} & set(page.tags)
    assert HTML in page.text and not any(name.startswith("on") for name, _ in page.attributes)


def test_a_page_without_pictures_has_no_place_for_any(tmp_path: Path) -> None:
    html, _ = render(tmp_path, examples=[example(make_rollout([("x", "")]))])
    assert "img-src" not in html and "url(" not in html
