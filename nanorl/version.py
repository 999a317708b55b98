"""Which nanorl-stack this is."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def own_version() -> str:
    """The version that is installed; "unknown" where the code runs from its folder uninstalled."""
    try:
        return version("nanorl-stack")
    except PackageNotFoundError:
        return "unknown"


def version_line() -> str:
    """The line that `nanorl --version` prints; its folder tells several installations apart."""
    folder = Path(__file__).resolve().parent
    return f"nanorl-stack {own_version()} (Python {platform.python_version()}, {folder})"
