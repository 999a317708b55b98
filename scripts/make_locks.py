"""Makes locks/*.txt anew: every third-party package, its version and the hashes of its files.

    .venv/bin/python -m pip install -c constraints.txt uv
    .venv/bin/python scripts/make_locks.py

The versions are those of constraints.txt, whatever it does not name is the newest that fits; they
are resolved against the plain package index once for each Python and processor. Hashes are of all
wheels that fit one of these, and of the source where a package has no wheel. torch and what only
its CUDA build brings stand in a file of their own, since a CPU build from elsewhere goes without.

    build.txt          pip, setuptools, wheel: what installs the others
    start.txt          what scripts/train_agent.sh installs, but torch
    dev.txt            the same for scripts/test.sh
    torch.txt          torch as the plain index has it, with CUDA: it goes with either
    triton-X.txt       the two of the compile gate; the newer one goes with a CPU build's dev.txt
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from requirements import ROOT, requirements

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROCESSORS = ("x86_64", "aarch64")
FOLDER = ROOT / "locks"
CONSTRAINTS = ROOT / "constraints.txt"
TRITONS = ("3.6.0", "3.9.0")  # of the compile gate, scripts/kernel_gate.sh
# The oldest C library that all wheels run on: torch's own bound, and the one of llguidance.
GLIBC: Mapping[str, str] = {"start": "2_28", "dev": "2_31"}
OF_TORCH = ("torch", "triton", "cuda-", "nvidia-")  # how the names of torch's packages begin
HEAD = "# Made by scripts/make_locks.py from setup.py and constraints.txt; do not edit.\n"


@dataclass
class Lock:
    """Packages by name: one version each, and the hashes of all their files that fit."""

    versions: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, package: Mapping[str, Any]) -> None:
        name, version = package["name"], package["version"]
        known = self.versions.setdefault(name, version)
        if known != version:
            raise ValueError(
                f"{name}: {known} on one Python or processor and {version} on another; "
                "pin one that fits all in constraints.txt"
            )
        files = package.get("wheels") or [package["sdist"]]
        self.hashes[name] |= {file["hashes"]["sha256"] for file in files}

    def text(self, names: Iterable[str]) -> str:
        """The lines that pip reads with --require-hashes."""
        lines = [HEAD]
        for name in sorted(names):
            marks = "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(self.hashes[name]))
            lines.append(f"{name}=={self.versions[name]}{marks}\n")
        return "".join(lines)


def resolve(wanted: Sequence[str], python: str, platform: str) -> list[dict[str, Any]]:
    """The packages of an installation on that Python and platform."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
        source.write_text("\n".join(wanted) + "\n")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet"]
        command += ["--python-version", python, "--python-platform", platform]
        command += ["-c", str(CONSTRAINTS), "--format", "pylock.toml"]
        done = subprocess.run(
            [*command, str(source), "-o", str(target)],
            # What this machine has at hand must not decide.
            env={k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))},
            stdout=subprocess.DEVNULL,
        )
        if done.returncode:
            raise ValueError(f"Python {python} on {platform}: uv's lines above say what is wrong")
        return tomllib.loads(target.read_text())["packages"]


def lock(wanted: Sequence[str], glibc: str = "2_28") -> Lock:
    """What `wanted` comes to on every Python and processor."""
    made: list[frozenset[str]] = []
    whole = Lock()
    for python, processor in product(PYTHONS, PROCESSORS):
        packages = resolve(wanted, python, f"{processor}-manylinux_{glibc}")
        for package in packages:
            whole.add(package)
        made.append(frozenset(package["name"] for package in packages))
    uneven = set[str]().union(*made) - frozenset.intersection(*made)
    if uneven:  # a line for some Pythons only would need a marker
        raise ValueError(
            f"not needed everywhere: {', '.join(sorted(uneven))}; name them in setup.py"
        )
    return whole


def pins() -> list[str]:
    """The requirements of constraints.txt."""
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return [line for line in lines if line]


def write(name: str, whole: Lock, names: Collection[str]) -> None:
    path = FOLDER / f"{name}.txt"
    path.write_text(whole.text(names))
    print(f"{path.relative_to(ROOT)}: {len(names)} packages")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    tools = [line for line in pins() if line.split("==")[0] in ("pip", "setuptools", "wheel")]
    build = lock(tools)
    write("build", build, build.versions)
    for version in TRITONS:
        write(f"triton-{version}", lock([f"triton=={version}"]), ["triton"])
    for extra in ("start", "dev"):
        whole = lock(requirements([extra]), GLIBC[extra])
        of_torch = {name for name in whole.versions if name.startswith(OF_TORCH)}
        write(extra, whole, whole.versions.keys() - of_torch)
    write("torch", whole, of_torch)  # dev's: it asks for all that start asks for


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
