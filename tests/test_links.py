"""Links in the pages: every file and heading that one names is there; llms.txt has all pages, and
prose is not wider than an editor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^<!-- [^\n]*: scripts/.*?^<!-- end -->", re.MULTILINE | re.DOTALL)
UNBREAKABLE = re.compile(r"`[^`]*`|\[(?:[^\]\[]|\[[^\]]*\])*\]\([^)\s]*\)")
"""A span of code or a link, in which a line of prose is not broken."""
MOST_COLUMNS = 130
DIARIES = {ROOT / "docs" / "log.md", ROOT / "CHANGELOG.md"}  # what is past is not rewritten


def text_of(page: Path) -> str:
    """What is prose in it: of a notebook, its cells of Markdown."""
    text = page.read_text("utf-8")
    if page.suffix == ".ipynb":
        cells = [one for one in json.loads(text)["cells"] if one["cell_type"] == "markdown"]
        text = "\n\n".join("".join(one["source"]) for one in cells)
    return FENCED.sub("", text)


@cache
def anchors(page: Path) -> set[str]:
    """The names of its headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ +(.+?)\s*$", text_of(page), re.MULTILINE)
    return {slug(head) for head in heads}


def slug(head: str) -> str:
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def links(page: Path) -> Iterator[str]:
    """Those that stay in the repository."""
    for found in LINK.finditer(re.sub(r"`[^`\n]*`", "", text_of(page))):
        target = found[1] or found[2]
        if not re.match(r"[a-z]+:", target):
            yield target


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """The links of the page that lead nowhere."""
    found = []
    for target in links(page):
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        is_there = file.exists() and file.is_relative_to(root)
        if not is_there or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "figures.md").write_text("# Figures\n\n## How the cost grows\n")
    page = tmp_path / "page.md"
    there = "[a](figures.md) [b](figures.md#how-the-cost-grows) [c](https://example.org/x)\n"
    gone = "[d](nowhere.md) [e](figures.md#no-such-heading) ![f](gone.svg) [g](../outside.md)\n"
    page.write_text(f"{there}{gone}`[h](code.md)`\n```\n[i](code.md)\n```\n")
    assert broken(page, tmp_path) == re.findall(r"\((.*?)\)", gone)
    assert slug("Your `nanorl check`: before [it](x.md)?") == "your-nanorl-check-before-it"


def wide(text: str) -> list[str]:
    """The lines of prose that could be broken and are too wide. Tables, code, headings and what a
    script writes may be as wide as they are."""
    lines = GENERATED.sub("", FENCED.sub("", text)).splitlines()
    prose = [one.strip() for one in lines if not one.lstrip().startswith(("|", "#"))]
    too_wide = [one for one in prose if len(one) > MOST_COLUMNS]
    return [one for one in too_wide if " " in UNBREAKABLE.sub("x", one)]


@pytest.mark.parametrize(
    "page",
    [one for one in PAGES if one.suffix == ".md" and one not in DIARIES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_no_line_of_prose_is_wider_than_an_editor(page: Path) -> None:
    assert not wide(page.read_text("utf-8"))


def test_a_wide_line_is_found() -> None:
    long = "word " * 30
    link = f"[{long}](https://example.org/{'x' * 130})"
    free = f"| {long} |\n# {long}\n```\n{long}\n```\n{link}\n"
    made = f"<!-- size: scripts/book.py -->\n\n{long}\n\n<!-- end -->\n"
    assert wide(f"{free}{made}short\n- {long}\n{link} {long}\n") == [
        f"- {long}".strip(),
        f"{link} {long}".strip(),
    ]


def test_llms_txt_has_every_page_once_with_a_line_about_it() -> None:
    text = (ROOT / "llms.txt").read_text("utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([\w/.]+)\): [A-Z].{20,}\.$", text, re.MULTILINE)
    pages = [f"docs/{page.name}" for page in ROOT.glob("docs/*.md")]
    assert sorted(listed) == sorted(["README.md", "AGENTS.md", *pages])
    assert text.startswith("# nanorl-stack\n\n> ")
