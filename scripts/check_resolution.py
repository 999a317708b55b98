"""Asks pip whether the plain package index, and nothing that this machine has besides, gives what
locks/start.txt and locks/torch.txt hold: for each Python that is tested, from
setup.py's lists.

    .venv/bin/python scripts/check_resolution.py [PROCESSOR ...]     by default x86_64; also aarch64

pip resolves without installing or downloading; its settings, its cache and the environment are left
out. Fails where it finds no solution, another version than the lock has, or a file that the lock
does not know. Without an index it says so and succeeds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from make_locks import CONSTRAINTS, FOLDER, GLIBC
from requirements import requirements

PYTHONS = ("3.11", "3.12", "3.13")
_LINE = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:\w+)+)", re.MULTILINE)


def read_locks(*names: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Of each package in these locks the version and the hashes."""
    text = "".join((FOLDER / f"{name}.txt").read_text() for name in names)
    return {
        name: (version, frozenset(re.findall(r"sha256:(\w+)", hashes)))
        for name, version, hashes in _LINE.findall(text)
    }


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """pip with no settings but its own; a certificate is how a machine gets out at all."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k == "PIP_CERT"}
    return subprocess.run(
        [sys.executable, "-m", "pip", *words],
        env={**plain, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )


def why_no_index() -> str | None:
    """Why nothing can be asked of the index; None: it answers."""
    done = pip("index", "versions", "--timeout", "10", "--retries", "1", "pip")
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def resolve(python: str, processor: str, wanted: Path) -> list[Any]:
    """What pip would install of that list, or ValueError with its words."""
    folder = Path(tempfile.mkdtemp(dir=wanted.parent))
    report = folder / "report.json"
    newest = int(GLIBC["start"].split("_")[1])
    places = [f"manylinux_2_{n}_{processor}" for n in range(newest, 4, -1)]
    places += [f"manylinux2014_{processor}", f"linux_{processor}"]
    done = pip(
        *("install", "--dry-run", "--quiet", "--ignore-installed", "--use-feature=fast-deps"),
        *("--report", str(report), "--python-version", python, "--only-binary=:all:"),
        *("--target", str(folder / "target"), "-c", str(CONSTRAINTS), "-r", str(wanted)),
        *(word for place in places for word in ("--platform", place)),
    )
    if done.returncode:
        raise ValueError(f"Python {python} on {processor}: {done.stderr.strip()}")
    return json.loads(report.read_text())["install"]


def check(python: str, processor: str, wanted: Path) -> int:
    """Compare with the locks; the number of packages."""
    locked = read_locks("start", "torch", "build")
    found = resolve(python, processor, wanted)
    for one in found:
        name = re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower()
        version, hashes = locked.get(name, ("nothing", frozenset()))
        if one["metadata"]["version"] != version:
            raise ValueError(
                f"Python {python} on {processor}: {name} {one['metadata']['version']}, the locks "
                f"have {version}: run scripts/make_locks.py"
            )
        if one["download_info"]["archive_info"]["hashes"]["sha256"] not in hashes:
            raise ValueError(f"{one['download_info']['url']}: its hash is not in the locks")
    return len(found)


def main(processors: Sequence[str]) -> None:
    reason = why_no_index()
    if reason is not None:
        print(f"skipped: there is no package index ({reason})")
        return
    places = list(product(PYTHONS, processors))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text("\n".join(requirements(["start"])) + "\n")
        # pip waits for the index most of the time.
        counts = pool.map(lambda place: check(*place, wanted), places)
        for (python, processor), count in zip(places, counts, strict=True):
            print(f"Python {python} on {processor}: {count} packages, as the locks have them")


if __name__ == "__main__":
    try:
        main(sys.argv[1:] or ["x86_64"])
    except ValueError as error:
        sys.exit(f"error: {error}")
