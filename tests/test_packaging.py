"""How the project gets onto a machine: the locks, the set-up's decisions and its words, the wheel.

The set-up is played against a stand-in of Python, which notes what pip is asked for; a real
installation is scripts/test_pythons.sh, and CI asks the plain index (scripts/check_resolution.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from check_resolution import read_locks  # noqa: E402
from make_locks import Lock, pins  # noqa: E402
from requirements import requirements  # noqa: E402

TORCH = read_locks("torch")["torch"][0]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(lines: Iterable[str]) -> set[str]:
    return {plain(re.split(r"[\[<>=;! ]", line)[0]) for line in lines}


# The locks


def test_constraints_leave_triton_to_the_builds_of_torch() -> None:
    assert not {name for name in names(pins()) if name.startswith(("triton", "nvidia", "cuda"))}


@pytest.mark.parametrize("extra", ["start", "dev"])
def test_a_lock_has_what_its_extra_asks_for_in_the_pinned_versions(extra: str) -> None:
    locked = read_locks(extra, "torch", "build")
    assert names(requirements([extra])) <= set(locked)
    pinned = {plain(name): version for name, version in (line.split("==") for line in pins())}
    assert {n: v for n, (v, _) in locked.items() if pinned.get(n, v) != v} == {}
    assert all(hashes for _, hashes in locked.values())
    assert not any(name.startswith(("torch", "triton", "nvidia")) for name in read_locks(extra))


def test_development_holds_all_that_a_first_run_installs() -> None:
    start, dev = read_locks("start"), read_locks("dev")
    assert {name: start[name][0] for name in start} == {name: dev[name][0] for name in start}


def test_a_lock_takes_one_version_for_all_machines() -> None:
    lock = Lock()
    lock.add({"name": "a", "version": "1", "wheels": [{"hashes": {"sha256": "f1"}}]})
    lock.add({"name": "a", "version": "1", "sdist": {"hashes": {"sha256": "f2"}}})
    assert lock.text(["a"]).endswith("a==1 \\\n    --hash=sha256:f1 \\\n    --hash=sha256:f2\n")
    with pytest.raises(ValueError, match=r"a: 1 on one Python .* and 2 on another"):
        lock.add({"name": "a", "version": "2", "wheels": []})


# The set-up, against a stand-in of Python

STAND_IN = r"""#!/usr/bin/env bash
# It says that it is Python $VERSION of its folder's file "version", and notes what pip gets.
here="$(cd "$(dirname "$0")" && pwd)"
version="$(cat "$here/version")"
case "$1 $2 $3" in
"-c  ") ;;
-c*%d*) echo "$version" ;;
-c*version_info*) [[ "$version" =~ ^3\.1[1-4]$ ]] ;;
-c*triton*) exit 1 ;;
--version*) echo "Python $version" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$here/version" "$3/bin/" ;;
"-m pip index") echo "torch (9)"; echo "Available versions: 9, ${TORCHES:-}" ;;
"-m pip show") [ -n "${INSTALLED:-}" ] && echo "Version: $INSTALLED" ;;
"-m pip install")
    echo "${*:4}" >>"$LOG"
    [ -z "${FAILS:-}" ] || { echo "$FAILS" >&2; exit 1; } ;;
*) echo "stand-in of Python: $*" >&2; exit 3 ;;
esac
"""


class SetUp:
    """A project with our set-up, and Pythons that only note what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log = folder / "project", folder / "bin", folder / "log"
        shutil.copytree(ROOT / "locks", self.root / "locks")
        (self.root / "scripts").mkdir()
        for name in ("scripts/setup_env.sh", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)

    def add_python(self, version: str) -> str:
        path = self.bin / version / f"python{version}"
        path.parent.mkdir(parents=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
        (path.parent / "version").write_text(version)
        return str(path)

    def run(self, extras: str = "start", **variables: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        kept = {"PATH": os.environ["PATH"], "HOME": str(self.root), "LOG": str(self.log)}
        return subprocess.run(
            ["bash", "-c", f"set -euo pipefail; source scripts/setup_env.sh; setup_env {extras}"],
            cwd=self.root,
            env={**kept, **variables},
            capture_output=True,
            text=True,
        )

    def installs(self) -> list[str]:
        """What pip was asked for, without the constraints that are always given."""
        words = f"--quiet --disable-pip-version-check -c {self.root}/constraints.txt "
        lines = self.log.read_text().replace(words, "").splitlines()
        return [line.replace(f"{self.root}/", "") for line in lines]


@pytest.fixture
def project(tmp_path: Path) -> SetUp:
    return SetUp(tmp_path)


HASHED = "--require-hashes --no-deps"


def test_the_plain_index_gives_every_package_by_its_hash(project: SetUp) -> None:
    python = project.add_python("3.12")
    done = project.run(NANORL_PYTHON=python, TORCHES=f"{TORCH}, 2.0")
    assert done.returncode == 0, done.stderr
    assert project.installs() == [
        f"{HASHED} -r locks/build.txt",
        f"{HASHED} --no-build-isolation -r locks/start.txt",
        f"{HASHED} -r locks/torch.txt",
        f"--no-deps --no-build-isolation -e {project.root}",
    ]
    assert project.run(NANORL_PYTHON=python).stdout == ""
    assert project.installs() == []  # it is finished


def test_a_build_of_torch_from_elsewhere_goes_unhashed_and_that_is_said(project: SetUp) -> None:
    python = project.add_python("3.11")
    done = project.run("dev", NANORL_PYTHON=python, TORCHES=f"{TORCH}+cpu, {TORCH}")
    assert "its hash is not checked" in done.stdout
    assert project.installs()[1:4] == [
        f"{HASHED} --no-build-isolation -r locks/dev.txt",
        f"torch=={TORCH}+cpu",
        f"{HASHED} -r locks/triton-3.9.0.txt",  # the tests run it, and a CPU build has none
    ]
    assert project.run("start").stdout == ""  # dev holds all of it
    assert project.installs() == []
    project.run("start,ray")
    assert project.installs() == [f"--no-build-isolation -e {project.root}[start,ray]"]


def test_a_build_from_elsewhere_stays_where_it_is_no_longer_at_hand(project: SetUp) -> None:
    """The second command must not replace it by 2.7 GB of CUDA."""
    python = project.add_python("3.11")
    project.run("dev", NANORL_PYTHON=python, INSTALLED=f"{TORCH}+cpu", TORCHES=TORCH)
    asked = project.installs()
    assert f"torch=={TORCH}+cpu" in asked and not any("locks/torch.txt" in one for one in asked)


@pytest.mark.parametrize("is_folder", [True, False])
def test_the_index_that_is_named_is_the_one_of_torch_alone(
    project: SetUp, tmp_path: Path, is_folder: bool
) -> None:
    place = str(tmp_path) if is_folder else "https://torch.example/cpu"
    python = project.add_python("3.13")
    options = {"NANORL_PYTHON": python, "NANORL_TORCH_INDEX": place}
    done = project.run(**options, TORCHES=f"{TORCH}, 2.0")
    assert done.returncode == 1
    assert f"NANORL_TORCH_INDEX={place}: no build of torch {TORCH} for Python 3.13" in done.stderr
    assert project.run(**options, TORCHES=f"{TORCH}+cpu").returncode == 0
    flag = "--find-links" if is_folder else "--extra-index-url"
    assert [line for line in project.installs() if place in line and "-e" not in line.split()] == [
        f"{flag} {place} torch=={TORCH}+cpu"
    ]


def test_extras_that_no_lock_holds_come_in_the_versions_of_constraints(project: SetUp) -> None:
    project.run("start,ray", NANORL_PYTHON=project.add_python("3.12"), TORCHES=TORCH)
    assert project.installs()[-1] == f"--no-build-isolation -e {project.root}[start,ray]"


def test_a_python_that_is_not_there_is_one_clear_error(project: SetUp) -> None:
    done = project.run(NANORL_PYTHON="python9.9")
    assert done.returncode == 1 and done.stdout == ""
    assert "error: NANORL_PYTHON=python9.9: no such Python (" in done.stderr
    old = project.add_python("3.10")
    assert (
        f"NANORL_PYTHON={old} is Python 3.10; 3.11 to 3.14" in project.run(NANORL_PYTHON=old).stderr
    )


def test_an_environment_of_another_python_is_not_taken_for_the_one_that_is_named(
    project: SetUp,
) -> None:
    assert project.run(NANORL_PYTHON=project.add_python("3.11"), TORCHES=TORCH).returncode == 0
    other = project.add_python("3.12")
    done = project.run(NANORL_PYTHON=other)
    assert done.returncode == 1
    assert f".venv is of Python 3.11, NANORL_PYTHON={other} of 3.12" in done.stderr
    assert project.run().returncode == 0  # unnamed, it is kept


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("ERROR: ResolutionImpossible: for help visit ...", "no versions that fit together"),
        ("ERROR: No matching distribution found for torch==2", "no versions that fit together"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM ...", "not the one of locks/"),
        (
            "WARNING: Retrying ... NewConnectionError('...')\nERROR: No matching",
            "Check the connection",
        ),
        ("ERROR: [Errno 28] No space left on device", "The disk is full"),
        ("ERROR: Failed to build pycosat", "The lines above say why"),
    ],
)
def test_a_failure_of_pip_is_not_blamed_on_the_connection(
    project: SetUp, words: str, remedy: str
) -> None:
    done = project.run(NANORL_PYTHON=project.add_python("3.12"), FAILS=words)
    assert done.returncode == 1
    assert words in done.stderr and remedy in done.stderr
    assert ("connection" in done.stderr) == (remedy == "Check the connection")


# The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from what git has, so that leftovers here cannot fill its gaps."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def tracked() -> list[str]:
    places = ("kernels", "nanosched", "nanoengine", "nanoinfer", "nanorl")
    listed = subprocess.run(
        ["git", "ls-files", *places, "setup.py", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: what belongs into the wheel is not known")
    return [name for name in listed.stdout.split() if (ROOT / name).exists()]


def test_the_wheel_has_every_file_of_every_package(wheel: zipfile.ZipFile) -> None:
    ours = {name for name in tracked() if "/" in name}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == ours
    assert sum(name.endswith("/py.typed") for name in ours) == 5


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    (path,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    about = HeaderParser().parsestr(wheel.read(path).decode())
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()
    assert about["License"] == "Apache-2.0"
    assert path.replace("METADATA", "licenses/LICENSE") in wheel.namelist()
    pythons = {c.rsplit(" ", 1)[1] for c in about.get_all("Classifier") if "Python :: 3." in c}
    assert pythons == {"3.11", "3.12", "3.13"}
    core = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    assert names(core) == names(requirements())


# The command


def test_the_version_is_told_without_torch() -> None:
    program = """import sys; from nanorl.cli import main; main(["--version"])
print("torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    line, has_torch = done.stdout.splitlines()
    assert re.fullmatch(
        r"nanorl-stack (\d+\.\d+\.\d+|unknown) \(Python 3\.\d+\.\d+, .*nanorl\)", line
    )
    assert has_torch == "False"


def test_a_shell_completes_verbs_and_their_flags() -> None:
    program = """
    nanorl() { "$PYTHON" -m nanorl "$@"; }
    source <(nanorl completion)
    COMP_WORDS=(nanorl serve-); COMP_CWORD=1; _nanorl; echo "${COMPREPLY[@]}"
    COMP_WORDS=(nanorl new --fo); COMP_CWORD=2; _nanorl; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["serve-training serve-env", "--folder"], done.stderr
