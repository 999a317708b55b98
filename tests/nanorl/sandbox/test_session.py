"""A session keeps files and names for its episode, and nothing else, for nobody else."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_programs import ATTACK_MODULE, BENIGN, CARRIERS, HOSTILE
from sandbox_driver import SPEC, Examiner, applicable, children
from waiting import eventually, until

from nanorl.sandbox import (
    ExecResult,
    ExecStatus,
    SandboxFailure,
    SandboxPool,
    SandboxSpec,
    canary,
)
from nanorl.sandbox.dispatch import State
from nanorl.sandbox.jobs import _inside
from nanorl.sandbox.session import Session, WorkspaceError

pytestmark = pytest.mark.sandbox
SOON_S = 60.0  # far more than anything here takes
LIMITS = SandboxSpec(timeout_s=SOON_S, memory_bytes=192 << 20, tmp_bytes=16 << 20, tmp_inodes=1024)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(LIMITS) as pool:
        yield pool


def play(pool: SandboxPool, script: Callable[[Session], Awaitable[Any]], files: Any = None) -> Any:
    """Runs one episode from opening to closing."""

    async def main() -> Any:
        async with await pool.open_session(files) as session:
            return await script(session)

    return asyncio.run(main())


def workers(session: Session) -> list[int]:
    """The process of bubblewrap of an open session."""
    places = session._dispatcher._places
    return [place.worker.pid for place in places if place.worker and place.lease is session._lease]


def states(session: Session) -> list[State]:
    places = session._dispatcher._places
    return [place.state for place in places if place.lease is session._lease]


def alive_in(session: Session) -> list[int]:
    """All processes inside of an open session: the one that bubblewrap started, the server, and
    what programs left."""
    return [pid for worker in workers(session) for pid in children(worker)]


def cgroups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob(f"**/nanorl-sandbox-{os.getpid()}-*"))


# What stays.


def test_files_stay_from_one_operation_to_the_next(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        code = "import lib.calc as c; open('out.txt', 'w').write(str(c.X)); print(__name__)"
        ran = await session.run(code, SOON_S)
        assert (ran.status, ran.stdout) == ("ok", b"__main__\n"), ran
        assert (await session.shell("cat out.txt; pwd; ./go", SOON_S)).stdout == b"3/work\nwent\n"
        assert (await session.repl("open('out.txt').read()", SOON_S)).stdout == b"'3'\n"
        await session.write("new/deep/file.bin", bytes(range(256)))
        assert await session.read("new/deep/file.bin") == bytes(range(256))
        assert (await session.shell("python -c 'import lib.calc'; ls /tmp", SOON_S)).stdout == b""

    play(pool, script, {"lib/calc.py": "X = 3\n", "go": "#!/bin/sh\necho went\n"})


def test_the_interpreter_keeps_its_names_and_shows_values(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        assert (
            await session.repl("import math\ndef f(x): return x * 2\ny = 4", SOON_S)
        ).stdout == b""
        assert (await session.repl("print('a')\nf(y)", SOON_S)).stdout == b"a\n8\n"
        failed = await session.repl("f(1) / 0", SOON_S)
        assert failed.status is ExecStatus.ERROR and failed.exit_code == 1 and not failed.notice
        assert b"f(1) / 0" in failed.stderr and failed.stderr.endswith(b"division by zero\n")
        assert (await session.repl("f(", SOON_S)).stderr.endswith(
            b"SyntaxError: '(' was never closed\n"
        )
        assert (await session.repl("_ + y", SOON_S)).stdout == b"12\n"

    play(pool, script)


ENDS = (
    ("while True: pass", "timeout"),
    ("import time; time.sleep(60)", "timeout"),
    ("import os; os.kill(os.getpid(), 9)", "signal"),
    ("exit(3)", "error"),
    ("import os; os._exit(0)", "ok"),
    ("x = [b'x' * (1 << 20) for _ in range(4096)]", "oom error"),
    ("while True: print('x' * 4096)", "output_limit"),
    ("import os; os.closerange(3, 99); x = 1", "ok error"),
    ("import os\nwhile True: os.write(3, b'garbage')", "signal"),
    ("import os\nfor _ in range(9): os.write(3, bytes(17))\nwhile True: pass", "signal"),
)


def test_an_interpreter_that_ends_is_told_and_replaced(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.write("kept", "1")
        for code, status in ENDS:
            await session.repl("before = 1", SOON_S)
            ended = await session.repl(code, 0.7 if status == "timeout" else SOON_S)
            if ended.status == "error" and not ended.notice:
                continue  # MemoryError is an exception like any other
            assert ended.status in status.split() and "names are gone" in ended.notice, ended
            after = await session.repl("before", SOON_S)
            assert b"NameError" in after.stderr and not after.notice, after
        assert await session.read("kept") == b"1"

    play(pool, script)


def test_the_interpreter_stands_still_between_its_calls(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        code = """
import os, subprocess, threading, time
def tick():
    for n in range(10 ** 9):
        open('ticks', 'a').write(str(n) + '.')
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
child = subprocess.Popen(['sh', '-c', 'while true; do date +%N >> child; sleep 0.01; done'])
def until_both_write():
    before = [os.path.getsize(name) if os.path.exists(name) else 0 for name in ('ticks', 'child')]
    while not all(os.path.exists(name) and os.path.getsize(name) > size
                  for name, size in zip(('ticks', 'child'), before)):
        time.sleep(0.01)
until_both_write()
"""
        assert (await session.repl(code, SOON_S)).status is ExecStatus.OK
        states = []
        for _ in range(2):
            files = await session.shell("cat ticks child; sleep 0.2; cat ticks child", SOON_S)
            half = len(files.stdout) // 2
            assert files.stdout[:half] == files.stdout[half:] != b"", files
            states.append(files.stdout)
            going = await session.repl("until_both_write(); child.poll() is None", SOON_S)
            assert going.stdout == b"True\n"
        assert states[0] != states[1], "it goes on with its next call"

    play(pool, script)


def test_a_snapshot_brings_the_folder_back(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.shell("mkdir -p d/e; echo 1 > d/e/f; ln -s f d/e/l; chmod 700 d/e/f", SOON_S)
        await session.shell("mkdir d/shut; echo 2 > d/shut/g; ln d/e/f hard", SOON_S)
        listing = "find . | sort; stat -c '%n %a %h %s' d/e/f hard; readlink d/e/l"
        before, name = (await session.shell(listing, SOON_S)).stdout, await session.snapshot()
        await session.repl("x = 1", SOON_S)
        await session.shell("rm -rf d; echo 3 > more; touch /tmp/t; chmod 0 /work", SOON_S)
        await session.restore(name)
        assert (await session.shell(listing, SOON_S)).stdout == before
        assert (await session.shell("ls /tmp", SOON_S)).stdout == b""
        assert b"NameError" in (await session.repl("x", SOON_S)).stderr
        with pytest.raises(WorkspaceError, match=r"no snapshot 'other' \(snapshot-1\)"):
            await session.restore("other")
        for _ in range(LIMITS.max_snapshots - 1):
            await session.snapshot()
        with pytest.raises(WorkspaceError, match="at most 8"):
            await session.snapshot()

    play(pool, script, {"a": "1"})


def test_two_sessions_share_nothing(pool: SandboxPool) -> None:
    async def main() -> None:
        one = await pool.open_session({"a": "1"})
        async with one, await pool.open_session({"b": "2"}, folder="/app") as two:
            await one.shell("touch /tmp/one", SOON_S)
            await one.repl("x = 1", SOON_S)
            assert (await two.shell("pwd; ls . /tmp /work", SOON_S)).stdout == b"/app\n.:\nb\n" + (
                b"\n/tmp:\n\n/work:\n"
            )
            assert b"NameError" in (await two.repl("x", SOON_S)).stderr
            both = [session.run("import time; time.sleep(0.5)", SOON_S) for session in (one, two)]
            slept = await asyncio.gather(*both)
            assert all(each.status is ExecStatus.OK for each in slept)

    asyncio.run(main())


# What does not.


@pytest.mark.parametrize(
    "leave",
    [
        "(while true; do echo x >> stays; sleep 0.01; done) & disown",
        "setsid nohup sh -c 'while true; do echo x >> stays; sleep 0.01; done' > /dev/null 2>&1 &",
        "python -c 'import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        '  while True: open("stays", "a").write("x"); time.sleep(0.01)\'',
    ],
    ids=["background", "nohup", "daemon"],
)
def test_no_process_outlives_its_command(pool: SandboxPool, leave: str) -> None:
    async def script(session: Session) -> None:
        until_it_writes = "while [ ! -s stays ]; do sleep 0.01; done"
        assert (await session.shell(f"{leave}\n{until_it_writes}", 60)).status is ExecStatus.OK
        assert len(alive_in(session)) == 2, "the server alone"
        before = await session.read("stays")
        assert before
        await session.shell("sleep 0.2; ps aux > /dev/null", SOON_S)
        assert await session.read("stays") == before

    play(pool, script)


def test_programs_that_go_too_far_are_answered_and_the_files_stay(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.write("kept", "1")
        shell, run = session.shell, session.run
        assert (await shell("sleep 60", 0.3)).status is ExecStatus.TIMEOUT
        assert (await shell("yes", SOON_S)).status is ExecStatus.OUTPUT_LIMIT
        assert (await shell("kill -9 $$", SOON_S)).status is ExecStatus.SIGNAL
        assert (await shell("kill -9 -1; exit 3", SOON_S)).exit_code in (3, -9)
        assert (await shell(":(){ :|:& };:; sleep 60", 0.7)).status is ExecStatus.TIMEOUT
        grow = "x = []\nwhile True: x.append(b'x' * (1 << 20))"
        assert (
            await run(f"import os\nfor _ in range(3): os.fork()\n{grow}", SOON_S)
        ).status in "oom error"
        assert (await shell("a" * (1 << 18), SOON_S)).exit_code == 126
        full = await shell("cat /dev/zero > big", SOON_S)
        assert (
            full.status in (ExecStatus.ERROR, ExecStatus.SIGNAL)
            and b"kept" in (await shell("ls; rm big", SOON_S)).stdout
        )
        many = await shell("for i in $(seq 2000); do : > f$i || exit 9; done", SOON_S)
        assert many.exit_code == 9, "the number of files is limited"
        assert await session.read("kept") == b"1"

    play(pool, script)


def test_memory_that_the_interpreter_holds_counts(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        held = await session.repl("x = b'x' * (150 << 20)", SOON_S)
        assert held.status is ExecStatus.OK
        over = await session.run("y = b'y' * (150 << 20)\nimport time; time.sleep(1)", SOON_S)
        if over.status is not ExecStatus.OOM:  # the kernel may have taken the interpreter instead
            assert b"NameError" in (await session.repl("x", SOON_S)).stderr
        after = await session.run("y = b'y' * (50 << 20)\nprint(1)", SOON_S)
        assert after.stdout == b"1\n", "what was taken is given back"

    play(pool, script)


def test_paths_stay_inside_of_the_folder(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.shell(
            "ln -s / root; ln -s /etc/passwd p; ln -s a inside; mkfifo fifo", SOON_S
        )
        for path in ("../etc/passwd", "/etc/passwd", "root/etc/passwd", "p", "/proc/self/environ"):
            with pytest.raises(WorkspaceError, match="outside of the working folder"):
                await session.read(path)
            with pytest.raises(WorkspaceError, match="outside of the working folder"):
                await session.write(path, "x")
        for path, reason in (
            ("fifo", "regular file"),
            (".", "Is a directory|folder"),
            ("no", "No"),
        ):
            with pytest.raises(WorkspaceError, match=reason):
                await session.read(path)
        with pytest.raises(WorkspaceError, match="fifo"):
            await session.write("fifo", "x")
        assert await session.read("inside") == await session.read("/work/a") == b"1"
        with pytest.raises(WorkspaceError, match="larger than 4 bytes"):
            await session.write("long", "12345")
            await session.read("long", max_bytes=4)
        with pytest.raises(WorkspaceError, match="more than the folder"):
            await session.write("long", bytes((16 << 20) + 1))
        with pytest.raises(WorkspaceError, match="null"):
            await session.read("a\0b")

    play(pool, script, {"a": "1"})


def test_planted_modules_run_in_nothing_but_the_programs_own_processes(pool: SandboxPool) -> None:
    names = ("tarfile", "linecache", "traceback", "os", "io", "struct", "encodings", "nanorl",
             "sitecustomize", "usercustomize")  # fmt: skip
    files = {f"{name}.py": "print('planted')" for name in names}
    files |= {"json.py": "print('planted', end=' ')", "pwd.py": "print('planted')"}

    async def script(session: Session) -> None:
        name = await session.snapshot()
        await session.write("b", "2")
        await session.restore(name)
        assert (await session.read("a")) == b"1"
        assert (await session.run("1 / 0", SOON_S)).stdout == b""
        assert (await session.repl("1 / 0", SOON_S)).stdout == b""
        assert (await session.shell("true", SOON_S)).stdout == b""
        assert (await session.run("import queue; print(1)", SOON_S)).stdout == b"1\n"

    play(pool, script, {"a": "1", **files})


def test_a_folder_too_large_for_a_snapshot_is_refused(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.shell("for i in 1 2 3 4; do truncate -s 15M sparse$i; done", SOON_S)
        with pytest.raises(WorkspaceError, match="as an archive"):
            await session.snapshot()
        assert (await session.shell("echo 1", SOON_S)).stdout == b"1\n"

    play(pool, script)


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a\0", "x" * 256, "."])
def test_opening_paths_that_lead_out_are_refused(pool: SandboxPool, name: str) -> None:
    with pytest.raises(ValueError, match="files"):
        play(pool, lambda session: session.snapshot(), {name: "x"})


def test_impossible_openings_are_refused(pool: SandboxPool) -> None:
    async def nothing(session: Session) -> None: ...

    with pytest.raises(ValueError, match="tmp_bytes"):
        play(pool, nothing, {"a": bytes(9 << 20)})
    with pytest.raises(ValueError, match="tmp_inodes"):
        play(pool, nothing, {str(n): "" for n in range(300)})
    with pytest.raises(ValueError, match="folder='/etc'"):
        asyncio.run(pool.open_session(folder="/etc"))
    with pytest.raises(ValueError, match="timeout_s=0"):
        play(pool, lambda session: session.shell("true", 0))


# The walls, the bounds, the end.


def test_the_canary_sees_walls_in_every_kind_of_execution(pool: SandboxPool) -> None:
    async def script(session: Session) -> list[ExecResult]:
        await session.write("canary.py", canary.CODE)
        return [
            await session.run(canary.CODE, SOON_S),
            await session.repl(canary.CODE, SOON_S),
            await session.shell("exec python -s -S canary.py", SOON_S),
        ]

    for result in play(pool, script):
        assert canary.find_leak(result, files_in_tmp=[]) == ""


class SessionExaminer(Examiner):
    most_at_rest = most_that_stay = 2  # as in `alive_in`: programs are forked when they come

    def alive(self) -> list[int]:
        pool: Any = self.pool
        return alive_in(pool.session)


class InASession:
    """A pool as Examiner knows it, whose runs are those of one session in its opening state."""

    def __init__(
        self, pool: SandboxPool, session: Session, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.spec, self.session, self.loop = pool.spec, session, loop

    def run_sync(
        self, code: str, *, files: Any = None, timeout_s: float | None = None
    ) -> ExecResult:
        async def main() -> ExecResult:
            await self.session.lay()
            return await self.session.run(code, timeout_s or self.spec.timeout_s)

        return self.loop.run_until_complete(main())


QUICK = ("memory_of_children_summed", "daemon_double_fork", "planted_modules", "odd_families",
         "memfd", "udp", "kill_everything", "fork_bomb")  # fmt: skip


@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_hostile_programs_are_held_in_a_session(is_whole: bool) -> None:
    everything = applicable((*HOSTILE, *BENIGN, *CARRIERS))
    # Some print the file and the folder of a stateless run.
    shown = {program.name: program.stdout or program.stderr_part for program in everything}
    programs = [p for p in everything if not re.search(rb"program.py|/tmp/", shown[p.name])]
    chosen = [p for p in programs if is_whole or p.name in QUICK]
    assert len(chosen) >= 4
    found: list[str] = []
    with SandboxPool(SPEC) as pool, asyncio.Runner() as runner:
        loop = runner.get_loop()
        session = runner.run(pool.open_session({"attack.py": ATTACK_MODULE}))
        examiner = SessionExaminer(InASession(pool, session, loop))  # type: ignore[arg-type]
        try:
            for program in chosen:
                found += examiner.violations(program)
        finally:
            examiner.host.close()
            runner.run(session.close())
    assert found == [], found


def test_no_more_sessions_than_allowed_are_open_at_once() -> None:
    async def main(pool: SandboxPool) -> None:
        first = await pool.open_session()
        second = await pool.open_session()
        third = asyncio.create_task(pool.open_session())
        await asyncio.sleep(0.5)
        assert not third.done()
        await first.close()
        opened = await asyncio.wait_for(third, 60)
        assert (await opened.shell("echo 1", SOON_S)).stdout == b"1\n"
        waiting = asyncio.create_task(pool.open_session())
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await second.close()
        await opened.close()
        with pytest.raises(SandboxFailure, match="closed"):
            await second.shell("true", SOON_S)
        await second.close()

    with SandboxPool(replace(LIMITS, max_sessions=2)) as pool:
        asyncio.run(main(pool))


def test_nothing_is_left_of_closed_sessions() -> None:
    async def episode(pool: SandboxPool) -> None:
        async with await pool.open_session({"a": "1"}) as session:
            await session.repl("import subprocess; subprocess.Popen(['sleep', '99'])", SOON_S)
            await session.snapshot()
            task = asyncio.create_task(session.shell("sleep 60", 60))
            await asyncio.sleep(0.1)
            task.cancel()

    async def main(pool: SandboxPool) -> None:
        await asyncio.gather(*(episode(pool) for _ in range(3)))

    before, groups = children(os.getpid()), cgroups()
    with SandboxPool(replace(LIMITS, warm_sessions=0)) as pool:
        asyncio.run(episode(pool))
        fds, alive = len(os.listdir("/proc/self/fd")), len(children(os.getpid()))
        asyncio.run(main(pool))
        assert len(os.listdir("/proc/self/fd")) <= fds
        assert eventually(lambda: len(children(os.getpid())) <= alive)
        forgotten = asyncio.run(pool.open_session())  # and never closed
        assert forgotten
    assert eventually(lambda: set(children(os.getpid())) <= set(before))
    assert cgroups() <= groups


def test_a_session_that_is_broken_starts_anew_with_its_first_files(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.write("later", "1")
        pids = workers(session)
        task = asyncio.create_task(session.shell("sleep 60", 60))
        await until(lambda: State.BUSY in states(session))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        broken = await task
        assert broken.status is ExecStatus.ERROR and "those of the beginning" in broken.notice
        assert (await session.shell("ls", SOON_S)).stdout == b"a\n"

    play(pool, script, {"a": "1"})


def test_a_worker_that_dies_idle_is_a_failure_of_the_machinery(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        for pid in workers(session):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: session._lease.error)
        with pytest.raises(SandboxFailure, match="ended while nothing ran"):
            await session.shell("true", SOON_S)

    play(pool, script)
    play(pool, lambda session: session.shell("true", SOON_S))


def test_a_worker_that_does_not_start_is_a_failure_of_the_machinery(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise SandboxFailure("no more processes")

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(pool._session_dispatcher(), "_new_worker", refuse)
            with pytest.raises(SandboxFailure, match="no more processes"):
                for _ in range(3):  # the first may still get the warm one
                    await pool.open_session()
        await (await pool.open_session()).close()

    asyncio.run(main())


def test_a_worker_that_is_killed_while_it_starts_ends_its_session_alone(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = pool._session_dispatcher()
    start = sessions._new_worker

    def strike(index: int) -> object:
        worker = start(index)
        os.kill(worker.pid, signal.SIGKILL)
        return worker

    async def main() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "_new_worker", strike)
            with pytest.raises(SandboxFailure, match="does not start"):
                for _ in range(3):  # the first may still get the warm one
                    await pool.open_session()
        await (await pool.open_session()).close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_neighbour_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work-of-others").mkdir()
    root = os.fsencode(os.path.realpath(tmp_path / "work"))
    assert _inside({"root": root, "path": b"a/b.txt"}).endswith("/work/a/b.txt")
    for path in (b"../work-of-others/x", b"../work-of-others", b"..", b"/etc/passwd"):
        with pytest.raises(ValueError, match="outside of the working folder"):
            _inside({"root": root, "path": path})
