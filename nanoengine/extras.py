"""What installs a package that is not there: the commands that error messages print.

    raise missing("the server", error.name, extra="serve") from None

A checkout is installed with the extra's name; a wheel that came from a folder is on no index by its
name, so there the extra's own requirements are named.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nanoengine.command_line import python, short_path

DISTRIBUTION = "nanorl-stack"
ROOT = Path(__file__).resolve().parent.parent


class MissingPackageError(ValueError):
    """A package is not installed, whatever the input was."""


def missing(what: str, package: str | None, *, extra: str) -> MissingPackageError:
    """The error of something that needs a package of an extra."""
    return MissingPackageError(f"{what} needs the package {package}; run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that installs what an extra of setup.py names."""
    if (ROOT / "setup.py").is_file():
        place = "." if Path.cwd() == ROOT else short_path(ROOT)
        return f"{python()} -m pip install -e {shlex.quote(f'{place}[{extra}]')}"
    return pip_install(*requirements(extra))


def pip_install(*requirements: str) -> str:
    """The command that installs these packages beside us."""
    return " ".join([python(), "-m", "pip", "install", *map(_quoted, requirements)])


def requirements(extra: str) -> list[str]:
    """The packages that an extra asks for, as the installed package says. ValueError for one that
    it has not."""
    from importlib import metadata  # here: seldom needed, and not free

    marker = re.compile(rf"\s*;.*extra == ['\"]{re.escape(extra)}['\"].*")
    asked = metadata.requires(DISTRIBUTION) or []
    found = [marker.sub("", one) for one in asked if marker.search(one)]
    if not found:
        raise ValueError(f"{DISTRIBUTION} has no extra {extra!r}")
    return found


def _quoted(requirement: str) -> str:
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f"'{requirement}'"
