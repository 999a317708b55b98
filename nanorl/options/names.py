"""Which options a run has, by their dotted names, and the short names of some."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from nanorl.options.run_config import RunConfig
from nanorl.options.values import option_kinds

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "agent": "agent.loop",
        "agent_args": "agent.loop_args",
        "sandbox": "tool.sandbox",
        "sandbox_image": "tool.image",
        "allow_unsafe_sandbox": "tool.allow_unsafe_sandbox",
    }
)
"""Short names, in flags, files and Python alike."""


@cache
def known_options() -> Mapping[str, Any]:
    """Every option by its dotted name, and its type."""
    return MappingProxyType(option_kinds(RunConfig))
