"""What mkdocs has to be told: the README is the first page, llms.txt orders the others, the API
reference comes from the docstrings, and links to files that are no page lose their link.

mkdocs.yml names this file; scripts/docs_site.sh builds the site. Left out: the notebooks, which a
site of plain pages cannot run.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([\w/.]+)\)", re.MULTILINE)
OUTSIDE = {"README.md": "index.md", "AGENTS.md": "for_assistants.md"}
"""Pages that do not lie in docs/, and where they are in the site."""
STYLE = """.wy-nav-content { max-width: 70rem }
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal }
"""
"""The theme's columns are too narrow for tables of four."""
API = {
    "api/nanorl.md": ("nanorl", "The library: what `import nanorl` offers."),
    "api/options.md": ("nanorl.options", "Every option of a run. Flags have the same names."),
    "api/nanoinfer.md": ("nanoinfer", "The inference engine as a library."),
}

SECTIONS = {
    "nanorl.options": ("run", "phase", "agent", "engine", "cluster"),
}
"""The modules NAME_config of a package, in whose place they are on the page."""


def on_config(config: Any) -> Any:
    """The order of the pages is that of llms.txt."""
    sections = re.split(r"^## ", (ROOT / "llms.txt").read_text("utf-8"), flags=re.MULTILINE)[1:]
    config.nav = [
        {section.splitlines()[0]: [{title: _place(file)} for title, file in ENTRY.findall(section)]}
        for section in sections
    ]
    config.nav.append({"API": [{name: place} for place, (name, _) in API.items()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, those of the API, and a style."""
    for name, place in OUTSIDE.items():
        content = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, place, content=content))
    files.append(File.generated(config, "site.css", content=STYLE))
    for place, (module, about) in API.items():
        files.append(File.generated(config, place, content=_reference(module, about)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links as the repository has them into links of the site."""
    outside = {place: name for name, place in OUTSIDE.items()}.get(page.file.src_uri)
    folder = ROOT if outside else (DOCS / page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        place = _place((folder / path).resolve().relative_to(ROOT).as_posix())
        return text if place is None else f"[{text}]({place}{mark}{anchor})"

    markdown = re.sub(r"\]\(docs/([\w.]+\.(?:svg|png))\)", r"](\1)", markdown)
    return LINK.sub(replaced, markdown)


def _place(file: str) -> str | None:
    """Where a file of the repository is in the site; None: it is no page of it."""
    if file in OUTSIDE:
        return OUTSIDE[file]
    is_page = file.startswith("docs/") and file.endswith((".md", ".svg", ".png"))
    return file.removeprefix("docs/") if is_page else None


def _reference(module: str, about: str) -> str:
    """A page that mkdocstrings fills with the docstrings of a module's public names."""
    names = getattr(importlib.import_module(module), "__all__", None)
    if names is None:
        sections = [f"{module}.{name}_config" for name in SECTIONS.get(module, ())]
        shown = [
            f"::: {one}\n    options:\n      show_root_heading: false\n"
            for one in sections or [module]
        ]
        return f"# {module}\n\n{about}\n\n" + "\n".join(shown)
    return f"# {module}\n\n{about}\n\n" + "\n".join(f"::: {module}.{name}\n" for name in names)
