"""The loops that come with the project, by name."""

from __future__ import annotations

from types import MappingProxyType

from nanorl.agents import single_turn, tool
from nanorl.agents.loop import AgentLoops


def default_loops() -> AgentLoops:
    """A fresh immutable table: "tool" and "single_turn"."""
    return AgentLoops(MappingProxyType({"tool": tool.run, "single_turn": single_turn.run}))
