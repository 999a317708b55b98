"""Writes the table of docs/sandbox.md: which hostile programs each back end held.

    python scripts/sandbox_table.py benchmarks/sandbox_hostile_*.json     # prints it
    python scripts/sandbox_table.py --write benchmarks/sandbox_hostile_*.json

Each file is what `tests/nanorl/sandbox/sandbox_driver.py --json` wrote for one back end. A program
is held if the host saw nothing that it must not see; "got through" names those that got something.
What ended otherwise than it does in bubblewrap, without getting anything, is only counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generated_part import GeneratedPart

PAGE = Path(__file__).parents[1] / "docs" / "sandbox.md"
PART = GeneratedPart("table", "sandbox_table.py")
ORDER = (
    *("bwrap", "oci podman", "oci docker", "gvisor", "microvm", "wasm"),
    *("landlock", "rlimits"),
)
KINDS = (
    *("memory", "cpu", "processes", "files", "network", "results", "output", "interpreter"),
    *("state", "kernel", "server"),
)


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown, and below it what got through, by name."""
    reports = sorted(reports, key=lambda report: ORDER.index(report["sandbox"]))
    names = [report["sandbox"] for report in reports]
    lines = [f"| held of tried | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kind in KINDS:
        lines.append(f"| {kind} | {' | '.join(_held(report, {kind}) for report in reports)} |")
    lines.append(f"| **all** | {' | '.join(_held(report, set(KINDS)) for report in reports)} |")
    otherwise = [str(len(_named(report, "ended otherwise", set(KINDS)))) for report in reports]
    lines.append(f"| of the held: ended otherwise | {' | '.join(otherwise)} |")
    lines += ["", "What got through:", ""]
    for report in reports:
        through = _named(report, "got through", set(KINDS))
        listed = ", ".join(through[:12]) + (f" and {len(through) - 12} more" * (len(through) > 12))
        lines.append(f"- **{report['sandbox']}**: {listed or 'nothing'}.")
    return "\n".join(lines) + "\n"


def _named(report: dict[str, Any], answer: str, kinds: set[str]) -> list[str]:
    rows = report["programs"]
    return [name for name, kind, said in rows if said == answer and kind in kinds]


def _held(report: dict[str, Any], kinds: set[str]) -> str:
    tried = [row for row in report["programs"] if row[1] in kinds]
    return f"{len(tried) - len(_named(report, 'got through', kinds))} of {len(tried)}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="put it into docs/sandbox.md")
    parser.add_argument("reports", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    text = table([json.loads(path.read_text()) for path in options.reports])
    if options.write:
        PAGE.write_text(PART.put(PAGE.read_text(), text))
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
