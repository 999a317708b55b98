"""Environments of installed packages, which announce them by the entry point `nanorl.environments`.

    [project.entry-points."nanorl.environments"]
    my_game = "my_game:MyGame"

A package that says so in its pyproject.toml is found by that name: `nanorl train --env my_game`.
`nanorl new NAME --package` writes one. Names that come with the project stay ours: a package that
takes one is an error, and so are two packages that take the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

GROUP = "nanorl.environments"


def with_installed(shipped: Mapping[str, str], spec: str) -> dict[str, str]:
    """The environments by name, shipped ones and installed ones. ValueError where `spec` is a name
    that two of them have; both are named."""
    offered: dict[str, list[EntryPoint]] = {}
    for one in entry_points(group=GROUP):
        if one not in offered.setdefault(one.name, []):  # a folder that is on the path twice
            offered[one.name].append(one)
    found = offered.get(spec, [])
    places = [f"{shipped[spec]} (nanorl's own)"] if spec in shipped and found else []
    places += [f"{one.value} (of {_package(one)})" for one in found]
    if len(places) > 1:
        raise ValueError(
            f"--env {spec}: there are {len(places)} of that name: {', '.join(places)}; say which "
            f"with --env {found[-1].value}, or uninstall one"
        )
    return {name: ones[0].value for name, ones in offered.items()} | dict(shipped)


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unnamed package"
