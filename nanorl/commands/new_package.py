"""The files of an environment that can be installed: what `nanorl new NAME --package` writes beside
the environment and its test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nanorl.envs.catalog import ENVIRONMENTS

PYPROJECT = """[build-system]
requires = ["setuptools>=69"]
build-backend = "setuptools.build_meta"

[project]
name = "DASHED"
version = "0.1.0"
description = "An environment for nanorl."
readme = "README.md"
requires-python = ">=3.11"

# nanorl finds it by this name: nanorl train --env NAME
[project.entry-points."nanorl.environments"]
NAME = "NAME:CLASS"

[tool.setuptools]
py-modules = ["NAME"]
"""

README = """# DASHED

An environment for nanorl: say how many letters a word has, which a tool can
count.

Install it beside nanorl-stack, into the same Python. In this folder:

```bash
python -m pip install --no-build-isolation -e .
python -m pytest
nanorl check --env NAME
nanorl train --env NAME
```

`NAME.py` is the environment, `test_NAME.py` its test. Both are yours to change; `nanorl check`
says what will go wrong with a run before it is begun.
"""


def check_package_name(name: str) -> None:
    """ValueError for a name under which the environment would not be found once installed."""
    if name in ENVIRONMENTS:
        raise ValueError(
            f"nanorl new {name} --package: {name} is the name of an environment that comes with "
            "nanorl; choose another one"
        )
    found = importlib.util.find_spec(name)
    if found is not None:
        raise ValueError(
            f"nanorl new {name} --package: there is a module of that name already "
            f"({found.origin}), and one would hide the other; choose another name"
        )


def write_package_files(name: str, title: str, folder: Path) -> list[Path]:
    """Write pyproject.toml and README.md. `title` is the name of the class."""
    written = []
    for file, text in (("pyproject.toml", PYPROJECT), ("README.md", README)):
        text = text.replace("CLASS", title).replace("DASHED", name.replace("_", "-"))
        (folder / file).write_text(text.replace("NAME", name), encoding="utf-8")
        written.append(folder / file)
    return written
