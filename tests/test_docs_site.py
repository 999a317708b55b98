"""The site of the documentation: it is built without a broken link, and has search and the API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_site_has_every_page_and_the_api_and_no_broken_link(tmp_path: Path) -> None:
    for package in ("mkdocs", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} builds the site: the extra `docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))
    found = {one["location"].partition("#")[0] for one in index["docs"]}
    pages = {f"{page.stem}/" for page in ROOT.glob("docs/*.md")}
    assert found >= pages | {"", "for_assistants/", "api/nanorl/", "api/options/"}
    api = (tmp_path / "api" / "nanorl" / "index.html").read_text("utf-8")
    for name in ("nanorl.Env", "nanorl.train", "nanorl.rehearse"):
        assert f'id="{name}"' in api
    assert "tasks_per_step" in (tmp_path / "api" / "options" / "index.html").read_text("utf-8")
