"""Prints what an installation with some extras asks for, a requirement a line, as setup.py says it.

    python scripts/requirements.py [EXTRA ...]     e.g. start   or   dev

setup.py is run with a setup() that keeps its arguments, so that this needs no setuptools.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def read_setup(path: Path = ROOT / "setup.py") -> dict[str, Any]:
    """The arguments that setup.py gives to setuptools."""
    given: dict[str, Any] = {}
    stand_in = ModuleType("setuptools")
    stand_in.setup = given.update  # type: ignore[attr-defined]
    kept = sys.modules.get("setuptools")
    sys.modules["setuptools"] = stand_in
    try:
        runpy.run_path(str(path))
    finally:
        del sys.modules["setuptools"]
        if kept is not None:
            sys.modules["setuptools"] = kept
    return given


def requirements(extras: Sequence[str] = ()) -> list[str]:
    """What the project and these extras need, each requirement once."""
    given = read_setup()
    unknown = [extra for extra in extras if extra not in given["extras_require"]]
    if unknown:
        raise ValueError(
            f"extra {', '.join(unknown)}: setup.py has no such extra; "
            f"there are {', '.join(sorted(given['extras_require']))}"
        )
    lists = [given["install_requires"], *(given["extras_require"][extra] for extra in extras)]
    return list(dict.fromkeys(line for some in lists for line in some))


if __name__ == "__main__":
    try:
        print("\n".join(requirements(sys.argv[1:])))
    except ValueError as error:
        sys.exit(f"error: {error}")
