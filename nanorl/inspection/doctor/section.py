"""`Section`: facts of one kind about a machine, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanorl.observability.alarms.finding import Finding

_WIDTH = 24


@dataclass(frozen=True, kw_only=True)
class Section:
    """Facts under one title, JSON values by their names, and what is wrong with them.

    Section(title="memory", facts={"free_bytes": 1 << 30})
    """

    title: str
    facts: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()

    def text(self) -> str:
        """The title, and a line for each fact. Bytes are shown as GB."""
        return "\n".join([self.title, *(_line(name, one) for name, one in self.facts.items())])


def _line(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        name = name.removesuffix("_bytes")
        value = None if value is None else f"{value / 1e9:.1f} GB"
    return f"  {name.replace('_', ' '):<{_WIDTH}}{_shown(value)}"


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} ({_shown(one)})" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)
