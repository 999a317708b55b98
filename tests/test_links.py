"""Links in the pages: every file and heading that one names is there; llms.txt has all pages."""

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


def test_llms_txt_has_every_page_once_with_a_line_about_it() -> None:
    text = (ROOT / "llms.txt").read_text("utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([\w/.]+)\): [A-Z].{20,}\.$", text, re.MULTILINE)
    pages = [f"docs/{page.name}" for page in ROOT.glob("docs/*.md")]
    assert sorted(listed) == sorted(["README.md", "AGENTS.md", *pages])
    assert text.startswith("# nanorl-stack\n\n> ")
