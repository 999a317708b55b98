"""The pool's contract: any loop, real overlap, one retry, machinery apart, nothing left."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_processes import is_running
from sandbox_driver import children
from waiting import LIMIT_S, eventually, until, wait_until

from nanorl.sandbox import (
    ExecResult,
    ExecStatus,
    SandboxFailure,
    SandboxPool,
    SandboxSpec,
    SandboxUnavailable,
    bwrap,
    dispatch,
    opening,
)
from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox.dispatch import State
from nanorl.sandbox.host_machine import find_bwrap
from nanorl.sandbox.interpreter import find_python
from nanorl.sandbox.outcome import Outcome
from nanorl.sandbox.protocol import FLAG_TIMEOUT, NO_STATUS
from nanorl.sandbox.worker import Server

pytestmark = pytest.mark.sandbox
SPEC = SandboxSpec(timeout_s=60.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SPEC, num_workers=2) as pool:
        yield pool


def wait_until_none(pids: list[int]) -> list[int]:
    """The processes of `pids` that do not end."""

    def alive() -> list[int]:
        return [pid for pid in pids if Path(f"/proc/{pid}/cwd").is_symlink() and is_running(pid)]

    eventually(lambda: not alive())
    return alive()


def processes_of(pool: SandboxPool) -> list[int]:
    """Those of its workers: bubblewrap and all below. Another pool forks its own at any time."""
    workers = [slot.worker for slot in pool._dispatcher._slots]
    tops = [worker.pid for worker in workers if isinstance(worker, bwrap.BwrapWorker)]
    return [pid for top in tops for pid in (top, *children(top))]


def are_busy(pool: SandboxPool) -> bool:
    return all(slot.state is State.BUSY for slot in pool._dispatcher._slots)


def cgroups() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/nanorl-sandbox-{os.getpid()}-*"))


def test_the_same_pool_serves_one_loop_after_another(pool: SandboxPool) -> None:
    for n in range(3):
        assert asyncio.run(pool.run(f"print({n})")).stdout == f"{n}\n".encode()


def test_two_workers_overlap_and_the_loop_stays_free(pool: SandboxPool) -> None:
    async def main() -> None:
        code = "import time; time.sleep(600)"
        tasks = [asyncio.create_task(pool.run(code, timeout_s=600)) for _ in range(2)]
        await until(lambda: are_busy(pool))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_programs_run_while_the_loop_is_busy(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than there are workers: those that waited begin as well."""
    submit, submitted = pool._submit, list[Future[ExecResult]]()

    def noted(*given: Any) -> Future[ExecResult]:
        submitted.append(submit(*given))
        return submitted[-1]

    async def main() -> None:
        tasks = [asyncio.create_task(pool.run("print(1)")) for _ in range(6)]
        await asyncio.sleep(0)
        done, late = wait(submitted, LIMIT_S)  # a decoding step: the loop answers nobody
        assert len(done) == 6 and not late and not any(task.done() for task in tasks)
        assert {run.stdout for run in await asyncio.gather(*tasks)} == {b"1\n"}

    monkeypatch.setattr(pool, "_submit", noted)
    asyncio.run(main())


def test_many_runs_from_many_threads(pool: SandboxPool) -> None:
    answers: dict[int, bytes] = {}

    def work(n: int) -> None:
        answers[n] = pool.run_sync(f"print({n} * {n})").stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"{n * n}\n".encode() for n in range(20)}


def test_files_and_stdin_reach_the_program(pool: SandboxPool) -> None:
    code = "import sys, helper; print(open('a b.txt').read(), helper.X, sys.stdin.read())"
    files = {"a b.txt": "täxt", "helper.py": "X = 3"}
    result = pool.run_sync(code, files=files, stdin=b"in\0put" * 20000)
    assert result.stdout == b"t\xc3\xa4xt 3 " + b"in\0put" * 20000 + b"\n" or result.truncated
    assert pool.run_sync(code, files=files, stdin=b"x").stdout == "täxt 3 x\n".encode()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/x", "a\0b", "program.py", "x" * 256])
def test_file_names_that_are_no_plain_names_are_refused(pool: SandboxPool, name: str) -> None:
    with pytest.raises(ValueError, match="files"):
        pool.run_sync("", files={name: "x"})


def test_files_too_large_for_the_folder_are_refused(pool: SandboxPool) -> None:
    with pytest.raises(ValueError, match="tmp_bytes"):
        pool.run_sync("", files={"a": "x" * (33 << 20)})


def test_more_files_than_the_folder_holds_are_refused(pool: SandboxPool) -> None:
    with pytest.raises(ValueError, match="tmp_inodes"):
        pool.run_sync("", files={f"f{n}": "" for n in range(2049)})


def test_a_program_cannot_make_its_input_grow(pool: SandboxPool) -> None:
    code = """
import os, sys
for change in (lambda fd: os.ftruncate(fd, 1 << 20), lambda fd: os.pwrite(fd, b"y", 0)):
    for fd in (0, os.open("/proc/self/fd/0", os.O_RDONLY)):
        try: change(fd); print("changed")
        except OSError: pass
print(sys.stdin.read())
"""
    assert pool.run_sync(code, stdin=b"input").stdout == b"input\n"


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_impossible_timeouts_are_refused(pool: SandboxPool, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        pool.run_sync("", timeout_s=timeout_s)


def test_impossible_limits_name_the_value() -> None:
    with pytest.raises(ValueError, match="memory_bytes=1 "):
        SandboxSpec(memory_bytes=1)
    with pytest.raises(ValueError, match="num_workers=0"):
        SandboxPool(SPEC, num_workers=0)
    with pytest.raises(ValueError, match="/nonexistent"):
        SandboxPool(SandboxSpec(python="/nonexistent"))
    with pytest.raises(ValueError, match="/nonexistent"):
        SandboxPool(SandboxSpec(bwrap="/nonexistent"))


def test_usage_is_reported(pool: SandboxPool) -> None:
    late = pool.run_sync("while True: pass", timeout_s=0.5)
    assert late.status is ExecStatus.TIMEOUT
    assert late.wall_s >= 0.5 and late.backend == "bwrap"
    busy = """
import time
x = b"x" * (100 << 20)
while time.process_time() < 0.2: pass
print("x" * (1 << 20), flush=True)
while True: pass
"""
    killed = pool.run_sync(busy, timeout_s=60)  # by its output, once it has used all that
    assert killed.status is ExecStatus.OUTPUT_LIMIT
    assert killed.maxrss_bytes >= 100 << 20 and killed.cpu_s > 0.05
    assert pool.run_sync("pass").cpu_s < 0.4


def test_output_up_to_the_limit_is_exact_and_beyond_it_is_cut(pool: SandboxPool) -> None:
    exact = pool.run_sync("print('x' * 65535)")
    assert (exact.status, len(exact.stdout), exact.truncated) == (ExecStatus.OK, 65536, False)
    over = pool.run_sync("print('x' * 65536)")
    assert (over.status, len(over.stdout), over.truncated) == (
        ExecStatus.OUTPUT_LIMIT,
        65536,
        True,
    )


def test_workers_give_identical_output() -> None:
    code = "import random, os\nprint(hash('a'), {'x', 'y', 'z'}, random.random(), id)"
    outputs = set()
    for _ in range(3):
        with SandboxPool(SPEC) as pool:
            outputs |= {pool.run_sync(code).stdout for _ in range(2)}
    assert len(outputs) == 1


def test_cancelling_kills_the_program(pool: SandboxPool) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(pool.run("while True: pass", timeout_s=600)) for _ in range(4)]
        await until(lambda: are_busy(pool))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await asyncio.wait_for(pool.run("print(1)"), LIMIT_S)).stdout == b"1\n"

    asyncio.run(main())


def break_workers(pool: SandboxPool, num_times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kills bubblewrap as soon as it has a program, so often, as one that broke its worker would;
    the list of the killed."""
    start, killed = dispatch.Attempt.start, list[int]()

    def strike(attempt: dispatch.Attempt, control: socket.socket) -> None:
        start(attempt, control)
        worker = pool._dispatcher._slots[0].worker
        if len(killed) < num_times and isinstance(worker, bwrap.BwrapWorker):
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    monkeypatch.setattr(dispatch.Attempt, "start", strike)
    return killed


def test_a_sandbox_error_is_retried_on_a_fresh_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxPool(SPEC) as pool:
        before = processes_of(pool)
        killed = break_workers(pool, 1, monkeypatch)
        result = pool.run_sync("import time; time.sleep(0.6); print('done')")
        assert (result.status, result.stdout) == (ExecStatus.OK, b"done\n")
        assert killed == before[:1] and wait_until_none(before) == []


def test_a_repeated_sandbox_error_is_the_programs_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxPool(SPEC) as pool:
        killed = break_workers(pool, 2, monkeypatch)
        result = pool.run_sync("import time; time.sleep(3); print('done')")
        assert result.status is ExecStatus.ERROR and result.exit_code != 0
        assert result.stdout == b"" and b"sandbox" in result.stderr
        assert len(set(killed)) == 2
        assert pool.run_sync("print(1)").stdout == b"1\n"


def test_a_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxPool(SPEC) as pool:
        first = pool._dispatcher._slots[0].worker
        assert isinstance(first, bwrap.BwrapWorker)
        for pid in children(first.pid):
            os.kill(pid, signal.SIGSTOP)
        # Half a second for the one that stands still; its successor may have a busy machine's time.
        backstops = iter((-19.5, 20.0))
        limit = property(lambda _: next(backstops))
        monkeypatch.setattr(dispatch.Dispatcher, "backstop_s", limit)
        assert pool.run_sync("print(1)", timeout_s=20).stdout == b"1\n"
        assert pool._dispatcher._slots[0].worker is not first


def test_a_dispatcher_that_stood_still_takes_no_worker_for_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks at something else, and then at the clock; the result has come meanwhile."""
    wake, begin, stood = dispatch.Dispatcher._on_wake, dispatch.Dispatcher._begin, list[bool]()

    def stand_still(dispatcher: dispatch.Dispatcher) -> None:
        wake(dispatcher)
        slot = dispatcher._slots[0]
        if slot.state is State.BUSY and slot.worker is not None:
            assert select.select([slot.worker.control], [], [], LIMIT_S)[0]
            slot.deadline = time.monotonic()
            stood.append(True)

    def begin_and_wake(dispatcher: dispatch.Dispatcher, *arguments: Any) -> None:
        begin(dispatcher, *arguments)
        dispatcher._poke()

    with SandboxPool(SPEC) as pool:
        first = pool._dispatcher._slots[0].worker
        monkeypatch.setattr(dispatch.Dispatcher, "_on_wake", stand_still)
        monkeypatch.setattr(dispatch.Dispatcher, "_begin", begin_and_wake)
        pool._dispatcher._handlers[pool._dispatcher._wake] = pool._dispatcher._on_wake
        while not stood:  # its result may have been as fast as the other thing
            assert pool.run_sync("import time; time.sleep(0.1); print(1)").stdout == b"1\n"
        assert pool._dispatcher._slots[0].worker is first


def test_a_program_that_ended_before_its_server_looked_at_the_clock_was_in_time() -> None:
    server: Any = Server.__new__(Server)
    ended, says = os.pipe()
    server.control, host = socket.socketpair()
    server.child, server.watch_bytes = SimpleNamespace(end=ended), 0
    with server.control, host:
        late = time.monotonic() - 5.0
        assert server._wait(bytes(16), late) == (FLAG_TIMEOUT, NO_STATUS)
        os.close(says)
        assert server._wait(bytes(16), late) == (0, None)
    os.close(ended)


def test_the_result_of_another_run_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = Outcome.unpack, []

    def forge(packet: bytes, *, is_oom: bool) -> Outcome:
        calls.append(honest(packet, is_oom=is_oom))
        return replace(calls[-1], run_id=bytes(16)) if len(calls) == 1 else calls[-1]

    with SandboxPool(SPEC) as pool:
        monkeypatch.setattr(dispatch.Outcome, "unpack", forge)
        assert pool.run_sync("print(1)").stdout == b"1\n"
    assert len(calls) == 2 and calls[0].run_id != calls[1].run_id


def test_a_job_cancelled_while_it_waits_is_never_run() -> None:
    with SandboxPool(SPEC) as pool:
        running = pool._submit("import time; time.sleep(600)", None, b"", 600)
        wait_until(lambda: are_busy(pool))
        waiting = [pool._submit("print(1)", None, b"", None) for _ in range(3)]
        assert all(future.cancel() for future in (*waiting, running))
        pool.run_sync("print(2)")
        assert pool._dispatcher._slots[0].num_runs == 3  # the canary, and two


def test_a_worker_that_died_idle_costs_the_next_program_nothing() -> None:
    with SandboxPool(SPEC) as pool:
        os.kill(processes_of(pool)[0], signal.SIGKILL)
        assert pool.run_sync("print(1)").stdout == b"1\n"


@pytest.mark.parametrize("num_deaths", [2, 3])
def test_a_worker_found_dead_when_a_program_comes_is_replaced_twice(
    monkeypatch: pytest.MonkeyPatch, num_deaths: int
) -> None:
    start, deaths = dispatch.Attempt.start, []

    def break_pipe(attempt: dispatch.Attempt, control: socket.socket) -> None:
        if len(deaths) < num_deaths:
            deaths.append(attempt)
            raise BrokenPipeError
        start(attempt, control)

    with SandboxPool(SPEC) as pool:
        monkeypatch.setattr(dispatch.Attempt, "start", break_pipe)
        if num_deaths < 3:
            assert pool.run_sync("print(1)").stdout == b"1\n"
        else:
            with pytest.raises(SandboxFailure, match="die while they wait"):
                pool.run_sync("print(1)")


def test_a_host_without_descriptors_is_a_failure_of_the_machinery() -> None:
    with SandboxPool(SPEC) as pool:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, limits[1]))
        try:
            with pytest.raises(SandboxFailure, match="host"):
                pool.run_sync("print(1)")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert pool.run_sync("print(1)").stdout == b"1\n"


def test_a_worker_is_replaced_after_its_runs() -> None:
    with SandboxPool(SandboxSpec(timeout_s=60.0, max_runs_per_worker=2)) as pool:
        first = processes_of(pool)
        counts = []
        for n in range(4):
            assert pool.run_sync(f"print({n})").stdout == f"{n}\n".encode()
            counts.append(pool._dispatcher._slots[0].num_runs)
        assert counts == [0, 1, 0, 1]  # the canary was the first run of the first worker
        assert wait_until_none(first) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the descriptors of a worker")
def test_the_server_keeps_no_descriptor_of_a_run() -> None:
    with SandboxPool(SPEC) as pool:
        worker = pool._dispatcher._slots[0].worker
        assert worker is not None
        server = children(worker.pid)[1]

        def descriptors() -> list[str]:
            places = Path(f"/proc/{server}/fd").iterdir()
            return [os.readlink(place) for place in places]

        def num_open() -> int:
            """Once the next child has been forked, and the server has all that it holds of it: the
            pidfd comes last."""
            wait_until(lambda: len(children(worker.pid)) == 4)
            wait_until(lambda: any("pidfd" in one for one in descriptors()))
            return len(descriptors())

        before = num_open()
        for _ in range(4):
            pool.run_sync("print(1)", stdin=b"x")
        assert eventually(lambda: num_open() <= before)


def test_groups_of_dead_processes_are_swept_and_those_of_the_living_stay() -> None:
    if (group := memory.create(64 << 20, 8)) is None:
        pytest.skip("no memory cgroup can be created")
    dead = 2**22 + 1  # above the largest process number
    folders = list(dict.fromkeys(group.folders.values()))
    stale = [folder.with_name(f"nanorl-sandbox-{dead}-0") for folder in folders]
    for folder in stale:
        folder.mkdir()
    memory.sweep()
    assert not any(folder.exists() for folder in stale)
    assert all(folder.exists() for folder in folders)
    group.remove()
    assert not any(folder.exists() for folder in folders)


def test_orphans_that_have_ended_count_against_no_limit(pool: SandboxPool) -> None:
    """Pid 1 waits for nobody: the kernel must take them. 80 are more than a program may have."""
    code = """
import os
for _ in range(80):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
print(sum(name.isdigit() for name in os.listdir("/proc")) < 20)
"""
    assert pool.run_sync(code, timeout_s=60).stdout == b"True\n"


def test_a_programs_own_forks_draw_other_numbers_than_it_does(pool: SandboxPool) -> None:
    """The hooks of `random` are held back from the server's forks, and not from a program's."""
    code = """
import os, random, sys
before = random.getstate()
if os.fork() == 0:
    print(random.getstate() != before)
    sys.stdout.flush()
    os._exit(0)
os.wait()
print(random.random())
"""
    results = [pool.run_sync(code).stdout for _ in range(4)]
    random.seed(0)
    assert results == [f"True\n{random.random()}\n".encode()] * 4


def test_hundreds_of_runs_leave_no_descriptor_and_no_process(pool: SandboxPool) -> None:
    pool.run_sync("pass")
    before = len(os.listdir("/proc/self/fd"))
    codes = ["print(1)", "1/0", "import os; os.fork()", "import os; os.kill(os.getpid(), 9)"]
    expected = ["ok", "error", "ok", "signal"]

    async def main() -> list[str]:
        runs = await asyncio.gather(*(pool.run(codes[n % 4]) for n in range(200)))
        return [run.status.value for run in runs]

    assert asyncio.run(main()) == expected * 50
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert eventually(lambda: len(children(os.getpid())) <= 10)


def test_close_ends_everything_and_may_be_called_again() -> None:
    groups = set(cgroups())
    pool = SandboxPool(SPEC, num_workers=2)
    pids = processes_of(pool)
    assert len(pids) >= 4
    waiting = [pool._submit("import time; time.sleep(600)", None, b"", 600) for _ in range(4)]
    time.sleep(0.1)
    pool.close()
    pool.close()
    assert wait_until_none(pids) == []
    for future in waiting:
        with pytest.raises(SandboxFailure, match="closed"):
            future.result(timeout=5)
    with pytest.raises(SandboxFailure, match="closed"):
        pool.run_sync("print(1)")
    assert set(cgroups()) == groups


def test_a_forgotten_pool_ends_with_its_last_reference() -> None:
    pool = SandboxPool(SPEC)
    pids = processes_of(pool)
    del pool
    assert wait_until_none(pids) == []


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_nothing_stays_when_the_host_is_killed(code: str) -> None:
    script = (
        "import time, threading\n"
        "from nanorl.sandbox import SandboxPool, SandboxSpec\n"
        "pool = SandboxPool(SandboxSpec(timeout_s=60), num_workers=2)\n"
        f"for _ in range(2): pool._submit({code!r}, None, b'', None)\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    host = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert host.stdout is not None and host.stdout.readline() == b"up\n"
    assert eventually(lambda: len(children(host.pid)) >= 8)
    pids = children(host.pid)
    host.kill()
    host.wait()
    host.stdout.close()
    assert wait_until_none(pids) == []


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("bwrap: No permissions to create new namespace", "seccomp=unconfined"),
        ("bwrap: No permissions to creating new namespace, likely because", "seccomp=unconfined"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "systempaths"),
        ("bwrap: Creating new namespace failed: max_user_namespaces exceeded", "sysctl user.max"),
        ("bwrap: setting up uid map: Permission denied", "AppArmor"),
    ],
)
def test_a_machine_that_cannot_isolate_is_refused_with_a_remedy(
    tmp_path: Path, message: str, remedy: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\necho "{message}" >&2\nexit 1\n')
    fake.chmod(0o755)
    with pytest.raises(SandboxUnavailable) as caught:
        SandboxPool(SandboxSpec(bwrap=str(fake)))
    assert caught.value.reason == message
    assert remedy in caught.value.remedy and remedy in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user id")
def test_bubblewrap_in_a_private_folder_still_starts(tmp_path: Path) -> None:
    source = find_bwrap(SPEC)[-1]
    if source.parent.name != "_bin":
        pytest.skip("not the wheel's layout")
    package = source.parents[1]
    shutil.copytree(package, tmp_path / package.name)
    shutil.copytree(f"{package}.libs", tmp_path / f"{package.name}.libs")
    tmp_path.chmod(0o700)
    spec = SandboxSpec(timeout_s=60.0, bwrap=str(tmp_path / package.name / "_bin" / "bwrap"))
    with SandboxPool(spec) as pool:
        assert pool.run_sync("print(1)").stdout == b"1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write to /opt")
def test_of_an_interpreter_elsewhere_only_what_it_loads_is_bound() -> None:
    system = find_python(SPEC).path
    version = system.name
    with tempfile.TemporaryDirectory(dir="/opt") as folder:
        os.chmod(folder, 0o755)
        library = Path(folder, "lib", version)
        ignored = shutil.ignore_patterns("__pycache__", "config-*", "pydoc_data", "dist-packages")
        shutil.copytree(f"/usr/lib/{version}", library, ignore=ignored, symlinks=True)
        Path(folder, "bin").mkdir()
        python = shutil.copy(system, Path(folder, "bin", "python3"))
        Path(folder, "secret").write_text("secret")
        Path(folder, "lib", "other").mkdir()
        code = """
import json, math, os, sqlite3, subprocess, sys
print(os.__file__, sys.executable, math.pi > 3)
print(subprocess.check_output([sys.executable, "-c", "print(6 * 7)"]))
home = sys.executable[:-len("/bin/python3")]
print([sorted(os.listdir(home + folder)) for folder in ("", "/bin", "/lib")])
"""
        with SandboxPool(SandboxSpec(timeout_s=60.0, python=str(python))) as pool:
            result = pool.run_sync(code)
    assert result.stdout.decode().splitlines() == [
        f"{library}/os.py {python} True",
        "b'42\\n'",
        f"[['bin', 'lib'], ['python3'], ['{version}']]",
    ], result.stderr


def test_an_interpreter_that_does_not_run_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        fake = Path(folder, "python3")
        fake.write_text("#!/bin/sh\nexit 3\n")
        fake.chmod(0o755)
        with pytest.raises(ValueError, match="python3' does not run on its own"):
            SandboxPool(SandboxSpec(python=str(fake)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user id")
def test_root_runs_programs_under_an_unused_user_id(pool: SandboxPool) -> None:
    pids = processes_of(pool)
    uids = {os.stat(f"/proc/{pid}").st_uid for pid in pids}
    inside = [Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0] for pid in pids]
    assert all(61000 <= int(uid) < 61184 for uid in inside), (uids, inside)


def test_programs_do_not_inherit_the_signals_that_the_run_ignores_or_blocks() -> None:
    """As in the background job of a shell, whose children ignore SIGQUIT."""
    kill = "import os, signal; os.kill(os.getpid(), signal.{})"
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with SandboxPool(SPEC, num_workers=1) as pool:
            for name in ("SIGQUIT", "SIGUSR1"):
                result = asyncio.run(pool.run(kill.format(name)))
                assert result.exit_code == -getattr(signal, name), name
    finally:
        signal.signal(signal.SIGQUIT, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_preloaded_modules_are_there() -> None:
    with SandboxPool(SandboxSpec(timeout_s=60.0, preload=("sqlite3",))) as pool:
        result = pool.run_sync(
            "import sys; print('sqlite3' in sys.modules, 'nanorl' in sys.modules)"
        )
        assert result.stdout == b"True False\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_worker_that_is_struck_while_it_starts_is_no_fault_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Of the pool's own workers, and of those that keep a session."""
    start, struck = bwrap.BwrapWorker, dict[bool, int]()

    def strike_the_first(
        *arguments: Any, is_session: bool = False, **options: Any
    ) -> bwrap.BwrapWorker:
        worker = start(*arguments, is_session=is_session, **options)
        is_first = is_session not in struck
        if is_first:
            struck[is_session] = worker.pid
            os.kill(worker.pid, number)
        # Of this worker: the next one may have a busy machine's time.
        monkeypatch.setattr(dispatch, "_START_LIMIT_S", 1.0 if is_first else 60.0)
        return worker

    async def play(pool: SandboxPool) -> bytes:
        session = await pool.open_session()
        try:
            return (await session.run("print(6 * 7)", 5.0)).stdout
        finally:
            await session.close()

    monkeypatch.setattr(opening, "BwrapWorker", strike_the_first)
    with SandboxPool(SPEC) as pool:
        assert pool.run_sync("print(6 * 7)").stdout == b"42\n"
        assert asyncio.run(play(pool)) == b"42\n"
    assert set(struck) == {False, True} and wait_until_none(list(struck.values())) == []
