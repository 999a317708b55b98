"""A part of a page that a script writes, between two marks, from the newest figures.

<!-- reuse: scripts/algorithms_page.py -->

what the script says

<!-- end -->
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_output import ROOT

BENCHMARKS = ROOT / "benchmarks"
_END = "<!-- end -->\n"


@dataclass(frozen=True)
class GeneratedPart:
    """One part: its name, which no other part of the page has, and who writes it."""

    name: str
    script: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: scripts/{self.script} -->\n"

    @property
    def place(self) -> str:
        """Both marks with nothing between, for a page that has no such part yet."""
        return self.begin + _END

    def put(self, page: str, text: str) -> str:
        """The page with `text` between the marks. ValueError without them."""
        before, begin, rest = page.partition(self.begin)
        _, end, after = rest.partition(_END)
        if not begin or not end:
            raise ValueError(f"the page has no place for {self.name!r}; write {self.place!r} there")
        return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def newest(kind: str, folder: Path = BENCHMARKS) -> dict[str, Any] | None:
    """The latest benchmark of that kind by the date in its name, with its `file`; None without."""
    found = sorted(folder.glob(f"{kind}_2*.json"))
    return {"file": found[-1].name, **json.loads(found[-1].read_text("utf-8"))} if found else None
