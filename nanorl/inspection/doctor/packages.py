"""The Python that runs, the versions of what it has, and the extras that are whole."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nanorl.inspection.doctor.section import Section
from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.observability.report.summary import git_commit

DISTRIBUTION = "nanorl-stack"
LEAST_PYTHON = (3, 11)
TOLD_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
    *("HF_HUB_OFFLINE", "TMPDIR"),
)
"""Environment variables that change what runs. None of them holds a secret."""
_REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+).*extra == ['"]([^'"]+)['"]""")
_SHOWN = ("numpy", "safetensors", "tokenizers", "transformers", "huggingface_hub")


def python_section() -> Section:
    """The interpreter, where `nanorl` comes from, and what its environment changes."""
    package = Path(__file__).resolve().parents[2]
    facts = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "is_virtual_environment": sys.prefix != sys.base_prefix,
        "system": _system(),
        "nanorl": _version(DISTRIBUTION) or "not installed, run from its folder",
        "nanorl_folder": str(package),
        "commit": git_commit(package.parent),
        "variables": [
            f"{name}={os.environ[name]}" for name in TOLD_VARIABLES if name in os.environ
        ],
    }
    found = (python_finding(sys.version_info[:2]), path_finding(shutil.which("nanorl")))
    return Section(
        title="python", facts=facts, findings=tuple(one for one in found if one is not None)
    )


def python_finding(version: tuple[int, ...]) -> Finding | None:
    """A Python that is too old."""
    if version >= LEAST_PYTHON:
        return None
    return Finding(
        name="old_python",
        severity=Severity.ERROR,
        seen=f"this is Python {'.'.join(map(str, version))}",
        why=f"nanorl needs {'.'.join(map(str, LEAST_PYTHON))} or newer",
        remedy="make the environment again with a newer Python",
    )


def path_finding(command: str | None) -> Finding | None:
    """A `nanorl` that the shell does not find, or that belongs to another environment."""
    own = Path(sys.executable).parent / "nanorl"
    if command is not None and Path(command).parent.resolve() == own.parent.resolve():
        return None
    seen = "the shell finds no command nanorl" if command is None else f"the shell runs {command}"
    if own.exists():
        remedy = f"source {own.parent / 'activate'}, or call {own}"
    else:
        remedy = f"{sys.executable} -m nanorl does the same from the project's folder"
    return Finding(
        name="not_on_path",
        severity=Severity.NOTE,
        seen=seen,
        why="this environment is not the active one, and messages of a run say nanorl ...",
        remedy=remedy,
    )


def packages_section() -> Section:
    """Versions of the packages that matter most, and the extras by what they lack."""
    requirements = _requirements()
    missing = missing_of_extras(requirements)
    return Section(
        title="packages",
        facts={
            **{name: _version(name) for name in _SHOWN},
            "extras_installed": sorted(name for name, lack in missing.items() if not lack),
            "extras_missing": {name: lack for name, lack in sorted(missing.items()) if lack},
        },
    )


def missing_of_extras(requirements: Sequence[str]) -> Mapping[str, list[str]]:
    """For each extra of a distribution's requirements, the packages of it that are not there."""
    missing: dict[str, list[str]] = {}
    for one in requirements:
        if (match := _REQUIREMENT.match(one)) is not None:
            name, extra = match.groups()
            lack = missing.setdefault(extra, [])
            if _version(name) is None:
                lack.append(name)
    return missing


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system() -> str:
    """The distribution's name where it says one, the kernel, and the C library."""
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    kernel = f"{platform.system()} {platform.release()}"
    return ", ".join(part for part in (name, kernel, " ".join(platform.libc_ver())) if part.strip())
