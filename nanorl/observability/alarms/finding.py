"""`Finding`: what was seen, why it matters and what mends it; and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

MOST_SHOWN = 5
"""Findings on a screen, two lines each; errors are all shown."""
MOST_CHARS = 160  # of what a model or somebody's code wrote


class Severity(IntEnum):
    """The severity of a finding: the run cannot work, will probably disappoint, or has something
    that its user should know."""

    ERROR = 0
    WARNING = 1
    NOTE = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is, or may be, wrong.

    Finding(name="no_signal", severity=Severity.WARNING, seen="all rewards were 0",
            why="groups of equal rewards teach nothing", remedy="raise --rl.group-size")
    """

    name: str
    severity: Severity
    seen: str
    why: str
    remedy: str

    def text(self) -> str:
        """Two lines."""
        label = self.severity.name.lower()
        return f"{label:<8} {self.seen}: {self.why}\n         -> {self.remedy}"

    def to_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "severity": self.severity.name.lower(),
            "seen": self.seen,
            "why": self.why,
            "remedy": self.remedy,
        }


def in_order(findings: Iterable[Finding | None]) -> list[Finding]:
    """Those that there are, the worst first."""
    return sorted((one for one in findings if one is not None), key=lambda one: one.severity)


def verdict(findings: Sequence[Finding]) -> str:
    """`fine`, `fine, but ...` or `cannot work`, with the counts."""
    errors, warnings = (
        sum(one.severity is severity for one in findings)
        for severity in (Severity.ERROR, Severity.WARNING)
    )
    if errors:
        return f"cannot work: {_count(errors, 'error')}"
    return f"fine, but mind {_count(warnings, 'warning')}" if warnings else "fine"


def findings_text(findings: Sequence[Finding], most: int = MOST_SHOWN) -> str:
    """The worst ones, and how many are left out."""
    num_errors = sum(one.severity is Severity.ERROR for one in findings)
    shown = findings[: max(num_errors, most)]
    lines = [one.text() for one in shown]
    if left := len(findings) - len(shown):
        lines.append(f"         and {left} more: --as-json has them all")
    return "\n".join(lines)


def quoted(text: str) -> str:
    """Somebody's text in one line, its middle left out where it is long."""
    half = MOST_CHARS // 2
    short = text if len(text) <= MOST_CHARS else f"{text[:half]} ... {text[-half:]}"
    return repr(short)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
