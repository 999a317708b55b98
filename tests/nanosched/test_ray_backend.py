"""What is Ray's alone: the one connection of a process, who can reach it, calls that overtake."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanosched import Resources, Scheduler, SchedulerLost

pytest.importorskip("ray", reason="ray is not installed (pip install .[ray])")
pytestmark = pytest.mark.xdist_group("ray")

LISTENING = "0A"


def descendants(pid: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # it has just ended
        parents[int(folder.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def listening_addresses(pids: set[int]) -> set[str]:
    """As the kernel writes them, in hexadecimal."""
    sockets = set()
    for pid in pids:
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                sockets.add(os.readlink(entry))
        except OSError:
            continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in table(name)]
    return {
        line[1].split(":")[0]
        for line in lines
        if line[3] == LISTENING and f"socket:[{line[9]}]" in sockets
    }


def table(name: str) -> list[str]:
    return Path(f"/proc/net/{name}").read_text().splitlines()[1:]


DRIVER = """
import sys
from nanosched import Resources, Scheduler

with Scheduler(backend="ray", resources=Resources(num_cpus=1)):
    print("started", flush=True)
    sys.stdin.readline()
"""


def test_a_private_ray_can_be_reached_from_this_machine_only(tmp_path: Path) -> None:
    # A process of its own: this one may listen for other tests.
    environment = os.environ | {"RAY_AUTH_TOKEN": "0" * 64, "HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as driver:
        assert driver.stdin and driver.stdout
        lines = iter(driver.stdout.readline, "")
        assert any(line == "started\n" for line in lines)
        addresses = listening_addresses(descendants(driver.pid))
        driver.stdin.close()
    assert addresses
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}


LOST_DRIVER = """
import asyncio, os
from contract_actors import Counter
from nanosched import Resources, Scheduler, SchedulerLost

async def main(sched):
    counter = sched.actor(Counter).remote()
    await counter.call(Counter.add, 1)
    death = asyncio.ensure_future(awaited(sched.death(counter)))
    print("started", flush=True)
    await asyncio.wait({death})
    errors = [death.exception()]
    for call in (lambda: counter.call(Counter.add, 1), lambda: sched.actor(Counter).remote()):
        try:
            await call()
        except SchedulerLost as error:
            errors.append(error)
    (said,) = {str(error) for error in errors if isinstance(error, SchedulerLost)}
    os.write(1, f"\\n{said} {len(errors)}\\n".encode())  # in one piece: Ray's threads print, too

async def awaited(future):
    return await future

with Scheduler(backend="ray", resources=Resources(num_cpus=2)) as sched:
    asyncio.run(main(sched))
"""


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_end_of_rays_own_processes_is_one_clear_error(name: str, tmp_path: Path) -> None:
    folder = str(Path(__file__).parent)
    path = os.pathsep.join([folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", LOST_DRIVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as driver:
        assert driver.stdout
        lines = iter(driver.stdout.readline, "")
        assert any(line == "started\n" for line in lines)
        (victim,) = [pid for pid in descendants(driver.pid) if named(pid) == name]
        os.kill(victim, signal.SIGKILL)
        (said,) = [line for line in lines if "--resume" in line]
        assert driver.wait() == 1
    assert said.startswith(f"Ray's {name} has ended, and without it no process can be started")
    assert said.endswith(" 3\n"), "the death, the call and the new actor"


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_a_process_has_one_connection(private_ray: Scheduler) -> None:
    with pytest.raises(ValueError, match="already connected to the Ray at 127"):
        Scheduler(backend="ray")
    with pytest.raises(ValueError, match=r"address='10\.0\.0\.1:6379': this process is"):
        Scheduler(backend="ray", address="10.0.0.1:6379")
    with pytest.raises(ValueError, match="a running cluster has its own"):
        Scheduler(backend="ray", address="auto", resources=Resources(num_cpus=1))
    with Scheduler(backend="ray", address="auto") as sched:
        assert sched.available().num_gpus == private_ray.available().num_gpus


def test_calls_that_overtake_each_other_start_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanosched import ray_host

    async def starts(numbers: list[int]) -> list[int]:
        line, started = ray_host._Line(0), []

        async def call(number: int) -> None:
            await line.arrive(number)
            async with line.turn:
                await asyncio.sleep(0)  # inputs
                started.append(number)

        await asyncio.gather(*map(call, numbers))
        return started

    assert asyncio.run(starts([3, 1, 0, 4, 2])) == [0, 1, 2, 3, 4]
    monkeypatch.setattr(ray_host, "LOST_CALL_S", 0.05)
    assert asyncio.run(starts([4, 3, 0, 1])) == [0, 1, 3, 4]  # 2 was lost with its connection


def test_a_ray_that_comes_up_late_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its limit of 30 s cannot be set, and a busy machine exceeds it."""
    from nanosched import ray_backend

    tries: list[Path] = []

    def start(_: Resources, folder: Path) -> None:
        tries.append(folder)
        if len(tries) < num_good:
            raise Exception(said)

    monkeypatch.setattr(ray_backend, "_start_ray_once", start)
    said = "The current node timed out during startup. This could happen because"
    num_good = ray_backend.MOST_STARTS
    ray_backend._start_ray(Resources(num_cpus=1), tmp_path)
    assert len(tries) == num_good
    tries, num_good = [], 99
    with pytest.raises(SchedulerLost, match="Ray did not come up, 3 times"):
        ray_backend._start_ray(Resources(num_cpus=1), tmp_path)
    tries, said = [], "something else"
    with pytest.raises(Exception, match="something else"):
        ray_backend._start_ray(Resources(num_cpus=1), tmp_path)
    assert len(tries) == 1
