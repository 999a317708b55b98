"""What only processes have: signals, files, memory, orphans. The rest is in test_contract.py."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
from host_processes import is_running
from local_actors import Caller, SlowStarter, Worker, children_of
from waiting import eventually, wait_until

from nanosched import Future, GetTimeout, Resources, Scheduler, TaskError, WorkerDied
from nanosched.local import forkserver, process_backend
from nanosched.local.channel import pair

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0  # nothing here takes long; a machine under load may
MACHINE = Resources(num_cpus=4)

pytestmark = pytest.mark.xdist_group("actors")


@pytest.fixture
def sched() -> Iterator[Scheduler]:
    with Scheduler(backend="local", resources=MACHINE, preload=["local_actors"]) as scheduler:
        yield scheduler


@pytest.fixture(autouse=True)
def _patient_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a process ended is asserted here: the driver waits to hear it for as long as a test."""
    monkeypatch.setattr(process_backend, "SAY_S", LIMIT_S)


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def segment_bytes(pid: int) -> int:
    """Of the segments that a process has open, each counted once."""
    seen = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own file
            if "memfd:nanosched" in os.readlink(link):
                status = link.stat()
                seen[status.st_ino] = status.st_size
    return sum(seen.values())


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def program_of(text: str) -> Iterator[subprocess.Popen[str]]:
    """A program of its own that prints one line when it is ready."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    ) as program:
        try:
            yield program
        finally:
            program.kill()


BUSY_DRIVER = """
import os
import numpy as np
from local_actors import Caller, Worker, children_of
from nanosched import Scheduler
with Scheduler(backend="local") as sched:
    workers = [sched.actor(Worker).remote() for _ in range(2)]
    caller = sched.actor(Caller).remote()
    sched.get(caller.keep.remote(workers[0]))
    kept = [sched.get(worker.ones.remote(300_000)) for worker in workers]
    pids = sched.get([worker.pid.remote() for worker in workers])
    hanging = [caller.hang.remote(), *(worker.sleep.remote(1000.0) for worker in workers)]
    print(*children_of(os.getpid()), *pids, *children_of(children_of(os.getpid())[0]), flush=True)
    sched.get(hanging)
"""


def test_a_killed_driver_leaves_no_process_and_no_name() -> None:
    names = {folder: set(os.listdir(folder)) for folder in ("/dev/shm", "/tmp")}
    with program_of(BUSY_DRIVER) as driver:
        assert driver.stdout is not None
        pids = set(map(int, driver.stdout.readline().split()))
        assert len(pids) == 4, "a fork server and three actors"
        assert all(map(is_running, pids))
        driver.kill()
    assert eventually(lambda: not any(map(is_running, pids)))
    for folder, before in names.items():
        ours = {name for name in set(os.listdir(folder)) - before if "nanosched" in name}
        assert not ours


def test_ctrl_c_twice_ends_the_driver_and_its_actors() -> None:
    with program_of(BUSY_DRIVER) as driver:
        assert driver.stdout is not None
        pids = set(map(int, driver.stdout.readline().split()))
        for pid in [*pids, driver.pid]:  # as a terminal does; the driver ends the others
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        os.kill(driver.pid, signal.SIGINT)
        assert driver.wait(LIMIT_S) != 0
    assert eventually(lambda: not any(map(is_running, pids)))


def test_close_reaps_all_processes_and_closes_all_files() -> None:
    counts = []
    for _ in range(3):
        with Scheduler(backend="local", preload=["local_actors"]) as sched:
            worker, caller = sched.actor(Worker).remote(), sched.actor(Caller).remote()
            sched.get(caller.keep.remote(worker))
            sched.get(worker.echo.remote(np.ones(100_000)))
            pids = [*children_of(os.getpid()), sched.get(worker.pid.remote())]
            stuck = worker.sleep.remote(1000.0)
        with pytest.raises(WorkerDied, match="ended with its scheduler"):
            stuck.result()
        assert eventually(lambda pids=pids: not any(map(is_running, pids)))  # type: ignore[misc]
        del sched, worker, caller, stuck
        gc.collect()
        counts.append(num_files(os.getpid()))
    assert counts[0] == counts[1] == counts[2]


def test_a_stopped_actor_times_out_and_can_be_killed(sched: Scheduler) -> None:
    worker, other = sched.actor(Worker).remote(), sched.actor(Worker).remote()
    pid = sched.get(worker.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    future = worker.add.remote()
    with pytest.raises(GetTimeout):
        sched.get(future, timeout_s=0.1)
    assert sched.get(other.add.remote(), timeout_s=LIMIT_S) == 1
    sched.kill(worker)
    with pytest.raises(WorkerDied, match="Worker was killed"):
        sched.get(future, timeout_s=LIMIT_S)
    assert eventually(lambda: not is_running(pid))


def test_death_is_noticed_without_a_heartbeat(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    death = sched.death(worker)
    pid = sched.get(worker.pid.remote())
    sleeping = worker.sleep.remote(1000.0)
    os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    with pytest.raises(WorkerDied, match="Worker was killed by signal 9"):
        sched.get(sleeping, timeout_s=LIMIT_S)
    assert time.monotonic() - began_s < LIMIT_S / 2  # 0.01 on a quiet machine
    assert sched.get(death) == "Worker was killed by signal 9"


LATE_SERVER = """
import time
from nanosched.local.forkserver import _Server
reap = _Server._reap
def late(self, pidfd):
    time.sleep(0.5)
    reap(self, pidfd)
_Server._reap = late
"""


def test_how_an_actor_ended_is_told_by_a_fork_server_that_is_slow_to_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_server.py").write_text(LATE_SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Scheduler(backend="local", resources=MACHINE, preload=["late_server"]) as sched:
        worker = sched.actor(Worker).remote()
        os.kill(sched.get(worker.pid.remote()), signal.SIGKILL)
        death = sched.get(sched.death(worker), timeout_s=LIMIT_S)
        assert death == "Worker was killed by signal 9"


def test_nobody_waits_for_a_stopped_fork_server_to_say_how_an_actor_ended(
    sched: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = sched.actor(Worker).remote()
    pid = sched.get(worker.pid.remote())
    os.kill(the_server(), signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr(process_backend, "SAY_S", 1000.0)
    assert sched.get(sched.death(worker), timeout_s=LIMIT_S) == "Worker ended"
    os.kill(the_server(), signal.SIGCONT)


def test_the_death_of_the_fork_server_ends_its_actors_and_not_the_scheduler(
    sched: Scheduler,
) -> None:
    worker = sched.actor(Worker).remote()
    pid = sched.get(worker.pid.remote())
    (server,) = children_of(os.getpid())
    os.kill(server, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        sched.get(worker.sleep.remote(1000.0), timeout_s=LIMIT_S)
    assert not is_running(pid)
    assert sched.get(sched.actor(Worker).remote().add.remote(), timeout_s=LIMIT_S) == 1


def asked_again(sched: Scheduler, call: Callable[[], Future[int]]) -> int:
    """Its result; one that the actor's death cuts off is made again."""
    for _ in range(20):
        with suppress(WorkerDied):
            return sched.get(call(), timeout_s=LIMIT_S)
    raise AssertionError("it died again and again")


def kill_the_server() -> None:
    server = the_server()
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not is_running(server))  # its actors have been sent their signals


def the_server() -> int:
    (server,) = children_of(os.getpid())
    return server


def test_a_stopped_fork_server_is_told_to_go_on_and_no_actor_notices(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    sched.get(worker.add.remote())
    server = the_server()
    os.kill(server, signal.SIGSTOP)
    other = sched.actor(Worker).remote()
    assert sched.get(other.add.remote(), timeout_s=LIMIT_S) == 1
    assert sched.get(worker.add.remote(), timeout_s=LIMIT_S) == 2
    assert the_server() == server and sched.num_server_deaths == 0


def test_a_fork_server_that_hangs_is_replaced(
    sched: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = sched.actor(Worker, max_restarts=1).remote()
    sched.get(worker.add.remote())
    server = the_server()
    os.kill(server, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(forkserver, "FORK_TICKS", 2)  # ended before it is told to go on
        other = sched.actor(Worker, max_restarts=1).remote()
        death = other.add.remote()
        wait_until(lambda: sched.wait([death], timeout_s=0.01) and sched.num_server_deaths)
    assert asked_again(sched, other.add.remote) == 1
    assert asked_again(sched, worker.add.remote) == 1  # a new life: it was its child
    assert the_server() != server and not is_running(server)
    assert sched.num_server_deaths == 1


def test_the_death_of_the_fork_server_costs_no_actor_a_restart(
    sched: Scheduler, tmp_path: Path
) -> None:
    """While they start and later: two deaths of it, and then one of each actor's own."""
    workers = [sched.actor(Worker, max_restarts=1).remote() for _ in range(2)]
    starting = sched.actor(SlowStarter, max_restarts=1).remote(str(tmp_path / "begun"))
    sched.get([worker.add.remote() for worker in workers])
    assert eventually((tmp_path / "begun").exists)
    kill_the_server()
    (tmp_path / "go").touch()
    actors = [starting, *workers]
    for actor in actors:
        assert asked_again(sched, actor.pid.remote)
    kill_the_server()
    pids = [asked_again(sched, actor.pid.remote) for actor in actors]
    assert sched.num_server_deaths == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    lives = [asked_again(sched, actor.pid.remote) for actor in actors]
    assert not set(lives) & set(pids)
    for pid in lives:
        os.kill(pid, signal.SIGKILL)
    deaths = [sched.get(sched.death(actor), timeout_s=LIMIT_S) for actor in actors]
    assert all(death.endswith("was killed by signal 9") for death in deaths)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_ends_no_fork_server_that_has_just_been_started(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before the server has said whose signals these are."""
    told = f"import signal; signal.raise_signal({int(number)})\n"
    monkeypatch.setattr(forkserver, "PROGRAM", told + forkserver.PROGRAM)
    with Scheduler(backend="local", resources=MACHINE, preload=["local_actors"]) as sched:
        assert sched.get(sched.actor(Worker).remote().add.remote(), timeout_s=LIMIT_S) == 1
        assert sched.num_server_deaths == 0


def test_actors_start_that_the_socket_of_a_busy_fork_server_had_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    (tmp_path / "slow_module.py").write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n"
        "    time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def narrow_pair() -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least: some five questions
        return ours, theirs

    monkeypatch.setattr(forkserver, "pair", narrow_pair)
    with Scheduler(backend="local", resources=MACHINE, preload=["slow_module"]) as sched:
        workers = [sched.actor(Worker, num_cpus=0).remote() for _ in range(12)]
        go.touch()
        assert sched.get([one.add.remote() for one in workers], timeout_s=LIMIT_S) == [1] * 12


def test_an_event_of_a_closed_file_is_none_of_the_file_that_got_its_number(
    sched: Scheduler,
) -> None:
    """Both are of one poll, as after a driver stood still: else a living actor would be buried."""
    backend = sched._backend
    assert isinstance(backend, process_backend.LocalBackend)
    (first, tell_first), (second, tell_second), (quiet, _) = pipes = [os.pipe() for _ in range(3)]
    handled: list[str] = []

    def end_second(_: int) -> None:
        backend._unwatch(first)
        backend._unwatch(second)
        os.dup2(quiet, second)  # closes what it was
        backend._watch(second, lambda _: handled.append("the next one"))
        handled.append("first")

    backend._watch(first, end_second)
    backend._watch(second, lambda _: handled.append("second"))
    for tell in (tell_first, tell_second):
        os.write(tell, b"x")
    backend._poll(LIMIT_S)
    backend._unwatch(second)
    for number in (one for pipe in pipes for one in pipe):
        os.close(number)
    assert handled == ["first"]


IMPORTING_DRIVER = """
import os
from local_actors import children_of
from nanosched import Scheduler
with Scheduler(backend="local", preload=["endless_module"]) as sched:
    print(*children_of(os.getpid()), flush=True)
    actor = sched.actor(dict).remote()  # without a handle it would end, and the driver with it
    sched.get(sched.death(actor))
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["importing", "stopped"])
def test_a_killed_driver_leaves_no_fork_server_whatever_that_is_doing(
    tmp_path: Path, is_stopped: bool
) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "endless_module.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(1000)\n"
    )
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{IMPORTING_DRIVER}"
    with program_of(program) as driver:
        assert driver.stdout is not None
        server = int(driver.stdout.readline())
        assert eventually(begun.exists)
        if is_stopped:
            os.kill(server, signal.SIGSTOP)
        driver.kill()
        driver.wait()
        try:
            assert eventually(lambda: not is_running(server))
        finally:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)


def test_segments_are_reused(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    pids = [os.getpid(), sched.get(worker.pid.remote())]
    array = np.ones(40_000)

    def use() -> list[int]:
        for _ in range(100):
            assert len(sched.get(worker.echo.remote(array))) == len(array)
        return [count for pid in pids for count in (num_files(pid), segment_bytes(pid))]

    assert use() == use()


def test_a_segment_is_not_reused_while_an_array_of_it_lives(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    kept = [sched.get(worker.echo.remote(np.full(40_000, float(n))))[::2] for n in range(5)]
    for _ in range(5):
        sched.get(worker.echo.remote(np.zeros(40_000)))
    assert [float(array.min()) for array in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [float(array.max()) for array in kept] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_the_driver_passes_on_it_does_not_map(sched: Scheduler) -> None:
    def num_mapped() -> int:
        gc.collect()  # what other tests have left
        return Path("/proc/self/maps").read_text().count("memfd:nanosched")

    before = num_mapped()
    first, second = sched.actor(Worker).remote(), sched.actor(Worker).remote()
    ones = first.ones.remote(500_000)
    assert sched.get(second.total.remote(ones)) == 500_000
    assert num_mapped() == before
    assert len(sched.get(ones)) == 500_000
    assert num_mapped() == before + 1


def test_what_is_put_is_written_once(sched: Scheduler) -> None:
    workers = [sched.actor(Worker).remote() for _ in range(2)]
    shared = sched.put(np.ones(500_000))
    before = segment_bytes(os.getpid())
    for _ in range(2):
        assert sched.get([worker.total.remote(shared) for worker in workers]) == [500_000] * 2
    assert segment_bytes(os.getpid()) == before


def test_large_pickles_without_buffers_travel_too(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    text = "word " * 100_000
    assert sched.get(worker.echo.remote(text)) == text
    parts = [text[:50_000]] * 5  # each small enough for a message; all of them are not
    futures = [sched.put(part) for part in parts]
    assert sched.get(worker.size_of.remote(futures[0])) == 50_000
    assert sched.get([worker.size_of.remote(one) for one in futures]) == [50_000] * 5
    with pytest.raises(TaskError, match="ValueError: xxxx") as caught:
        sched.get(worker.fail.remote(1_000_000))
    assert len(str(caught.value.cause)) == 1_000_000


def test_a_full_socket_holds_nothing_up(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    futures = [worker.add.remote() for _ in range(3_000)]
    assert sched.get(futures, timeout_s=LIMIT_S) == list(range(1, 3_001))


def test_memory_is_flat_where_calls_under_way_are_capped(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()
    pids = [os.getpid(), sched.get(worker.pid.remote())]
    text = "x" * 10_000  # 100 MB in all

    def call(count: int) -> None:
        under_way = []
        for _ in range(count):
            under_way.append(worker.echo.remote(text))
            if len(under_way) == 16:
                done, under_way = sched.wait(under_way, num_returns=1)
                assert done[0].result() == text

    call(500)
    before = [(resident_bytes(pid), num_files(pid)) for pid in pids]
    call(10_000)
    for pid, (resident, files) in zip(pids, before, strict=True):
        assert resident_bytes(pid) < resident + 20_000_000
        assert num_files(pid) <= files + 2


def test_a_handle_survives_the_restart_of_its_actor(sched: Scheduler, tmp_path: Path) -> None:
    worker, caller = sched.actor(Worker, max_restarts=1).remote(), sched.actor(Caller).remote()
    sched.get(caller.keep.remote(worker))
    assert sched.get([caller.add.remote() for _ in range(3)]) == [1, 2, 3]
    assert sched.get(caller.send.remote(100_000)) == 100_000
    pid = sched.get(worker.pid.remote())
    waiting = caller.outlive.remote(str(tmp_path / "begun"))
    wait_until((tmp_path / "begun").exists)  # earlier, the call would go to the restarted worker
    os.kill(pid, signal.SIGKILL)
    assert "Worker died" in sched.get(waiting, timeout_s=LIMIT_S)
    assert sched.get(caller.add.remote(), timeout_s=LIMIT_S) == 1
    sched.kill(worker)
    with pytest.raises(TaskError, match="Worker was killed"):
        sched.get(caller.add.remote(), timeout_s=LIMIT_S)


def test_a_blocking_actor_serves_others_after_a_segment_came_back(sched: Scheduler) -> None:
    worker, caller = sched.actor(Worker).remote(), sched.actor(Caller).remote()
    sched.get(caller.keep.remote(worker))
    assert len(sched.get(worker.ones.remote(100_000))) == 100_000  # and dropped
    sched.wait([caller.hang.remote()], timeout_s=0)  # says so to the worker
    assert sched.get(caller.add.remote(), timeout_s=LIMIT_S) == 1


def test_every_call_ends_whatever_dies_meanwhile(sched: Scheduler) -> None:
    random = Random(0)
    workers = [sched.actor(Worker, max_restarts=100).remote() for _ in range(2)]
    callers = [sched.actor(Caller, max_restarts=100).remote() for _ in range(2)]

    def some_calls() -> list[Future[object]]:
        one, two, caller = random.choice(workers), random.choice(workers), random.choice(callers)
        array = np.ones(random.choice([10, 50_000]))
        calls: list[list[Future[object]]] = [
            [one.echo.remote(array)],
            [two.total.remote(one.ones.remote(60_000))],
            [caller.keep.remote(one), caller.add.remote()],
            [caller.send.remote(50_000)],
        ]
        return random.choice(calls)

    outcomes: set[str] = set()
    for _ in range(60):
        futures = [future for _ in range(random.randrange(1, 8)) for future in some_calls()]
        if random.random() < 0.4:
            (server,) = children_of(os.getpid())
            os.kill(random.choice(children_of(server)), signal.SIGKILL)
        done, pending = sched.wait(futures, num_returns=len(futures), timeout_s=LIMIT_S)
        assert not pending
        outcomes |= {type(future.error()).__name__ for future in done}
    assert {"NoneType", "WorkerDied"} <= outcomes <= {"NoneType", "WorkerDied", "TaskError"}


def test_an_actor_lives_as_long_as_another_one_has_its_handle(sched: Scheduler) -> None:
    worker, caller = sched.actor(Worker).remote(), sched.actor(Caller).remote()
    pid = sched.get(worker.pid.remote())
    death = sched.death(worker)
    sched.get(caller.keep.remote(worker))
    del worker
    gc.collect()
    assert sched.get(caller.add.remote(), timeout_s=LIMIT_S) == 1
    assert not death.is_done()
    sched.get(caller.drop.remote())
    assert sched.get(death, timeout_s=LIMIT_S) == "Worker ended with its last handle"
    assert eventually(lambda: not is_running(pid))


def test_actors_of_the_main_module_can_be_made(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from nanosched import Scheduler\n"
        "class Own:\n"
        "    def name(self):\n"
        "        return __name__\n"
        "if __name__ == '__main__':\n"
        "    with Scheduler(backend='local') as sched:\n"
        "        print(sched.get(sched.actor(Own).remote().name.remote()))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "__mp_main__", run.stderr


def test_what_cannot_work_is_refused_with_a_reason(sched: Scheduler) -> None:
    with pytest.raises(ValueError, match="preload='no_such_module'"):
        Scheduler(backend="local", preload=["no_such_module"])
    worker = sched.actor(Worker).remote()
    with pytest.raises(ValueError, match=r"arguments of Worker\.echo cannot be pickled"):
        worker.echo.remote(lambda: None)
    with pytest.raises(ValueError, match="nested in what is sent, and pending"):
        worker.echo.remote([worker.sleep.remote(0.0)])


def test_the_running_loop_serves_the_scheduler_and_the_next_loop_too(sched: Scheduler) -> None:
    worker = sched.actor(Worker).remote()

    async def main() -> list[int]:
        return list(await asyncio.gather(*(awaited(worker.add.remote()) for _ in range(5))))

    async def awaited(future):  # type: ignore[no-untyped-def]
        return await future

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]
    assert sched.get(worker.add.remote()) == 6
    assert asyncio.run(main()) == [7, 8, 9, 10, 11]


def test_a_death_can_be_awaited_in_a_loop_that_makes_no_calls(sched: Scheduler) -> None:
    group = sched.group(Worker, [((), {})] * 2)
    pids = sched.get(group.call(Worker.pid))
    os.kill(pids[1], signal.SIGKILL)

    async def main() -> str:
        return await group.death

    reason = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert reason == "rank 1: Worker was killed by signal 9"


def test_a_program_of_one_process_imports_neither_multiprocessing_nor_ray() -> None:
    text = (
        "import sys; from nanosched import Scheduler; Scheduler().close();"
        "print([name for name in ('multiprocessing', 'ray', 'torch') if name in sys.modules])"
    )
    with program_of(text) as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == "[]"
