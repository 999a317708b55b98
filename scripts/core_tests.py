"""Lists the test files of the book, which `bash scripts/test.sh core` runs in a minute.

    python scripts/core_tests.py

They are found, not listed: the tests of the roots of both engines and of nanorl, where the book
stands, those that bear the name of another file that docs/core.md walks through, and those of that
page. Left out: the kernels' own (`bash scripts/test.sh tests/kernels`), what takes more than ten
seconds, which is marked `slow`, and what goes over families, machines or loads that the tiny preset
does not have, marked `sweep`.
"""

from __future__ import annotations

import re
from pathlib import Path

from book import PAGE
from house import ROOT

LINK = re.compile(r"\]\(\.\./([\w/]+\.py)\)")


def core_tests(page: str, root: Path = ROOT) -> list[str]:
    """The files, from `root` on, in the order of their names."""
    walked = [Path(file) for file in LINK.findall(page) if not file.startswith("kernels/")]
    globs = {f"tests/{file.parts[0]}/test_*.py" for file in walked}
    globs |= {f"tests/{file.parent}/test_{file.name}" for file in walked}
    globs |= {"tests/test_core_*.py"}
    return sorted({str(path.relative_to(root)) for glob in globs for path in root.glob(glob)})


if __name__ == "__main__":
    print("\n".join(core_tests(PAGE.read_text())))
