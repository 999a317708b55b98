"""The work of bench_sched.py for one side, in a process of its own, and the actor that does it.

    python scripts/sched_work.py local|ray [--small]

Prints one JSON line: each row's name and its value, which is in seconds, but for `copy` (bytes/s)
and the rows of calls/s. `local` goes through nanosched; `ray` is Ray's own interface.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

NUM_BYTES = 100_000_000
BATCH = 100  # calls under way at once, where calls/s are counted


class Echo:
    """What is called. `give` returns an array that is there already."""

    def __init__(self) -> None:
        self.array: np.ndarray | None = None

    def nothing(self) -> None: ...

    def take(self, array: np.ndarray) -> int:
        return len(array)

    def keep(self, num_bytes: int) -> None:
        self.array = np.ones(num_bytes, dtype=np.uint8)

    def give(self) -> np.ndarray | None:
        return self.array

    def pid(self) -> int:
        return os.getpid()

    def sleep(self) -> None:
        time.sleep(600)


class Side(Protocol):
    """The few words that the work is written in."""

    def make(self) -> Any: ...

    def call(self, actor: Any, method: str, *args: Any) -> Any: ...

    def get(self, futures: Any) -> Any: ...

    def wait_for_death(self, actor: Any) -> Callable[[], None]:
        """Watches the actor; what is returned blocks until its death is known."""
        ...

    def close(self) -> None: ...


class Local:
    def __init__(self) -> None:
        from nanosched import Scheduler

        self._sched = Scheduler(backend="local")

    def make(self) -> Any:
        return self._sched.actor(_importable()).remote()

    def call(self, actor: Any, method: str, *args: Any) -> Any:
        return getattr(actor, method).remote(*args)

    def get(self, futures: Any) -> Any:
        return self._sched.get(futures)

    def wait_for_death(self, actor: Any) -> Callable[[], None]:
        death = self._sched.death(actor)
        return lambda: self._sched.get(death) and None

    def close(self) -> None:
        self._sched.close()


class Ray:
    def __init__(self) -> None:
        import ray

        self._ray = ray
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def make(self) -> Any:
        return self._ray.remote(num_cpus=0)(_importable()).remote()

    def call(self, actor: Any, method: str, *args: Any) -> Any:
        return getattr(actor, method).remote(*args)

    def get(self, futures: Any) -> Any:
        return self._ray.get(futures)

    def wait_for_death(self, actor: Any) -> Callable[[], None]:
        """Ray has no word for it: a call under way fails."""
        sleeping = actor.sleep.remote()

        def wait() -> None:
            try:
                self._ray.get(sleeping)
            except self._ray.exceptions.RayActorError:
                return

        return wait

    def close(self) -> None:
        self._ray.shutdown()


def _importable() -> type:
    """`Echo` of the module as others import it; processes of actors know no `__main__`."""
    import sched_work

    return sched_work.Echo


SIDES: dict[str, Callable[[], Side]] = {"local": Local, "ray": Ray}


def measure(make_side: Callable[[], Side], is_small: bool) -> dict[str, float]:
    """All figures of one side; every one a median."""
    copy = copy_rate()
    start = time.perf_counter()
    side = make_side()
    actor = side.make()
    side.get(side.call(actor, "nothing"))
    start_up = time.perf_counter() - start
    num_calls, num_passes, num_deaths = (200, 3, 2) if is_small else (3000, 15, 5)
    side.get(side.call(actor, "keep", NUM_BYTES))
    array = np.ones(NUM_BYTES, dtype=np.uint8)
    actors = [actor, *(side.make() for _ in range(7))]
    side.get([side.call(one, "nothing") for one in actors])
    found = {
        "copy": copy,
        "start-up": start_up,
        "call": median_s(lambda: side.get(side.call(actor, "nothing")), num_calls),
        "pass-100MB": median_s(lambda: side.get(side.call(actor, "take", array)), num_passes),
        "return-100MB": median_s(lambda: side.get(side.call(actor, "give")), num_passes),
        "calls-per-s-1": calls_per_s(side, [actor], num_calls),
        "calls-per-s-8": calls_per_s(side, actors, num_calls),
        "death-detection": statistics.median(
            seconds_to_death(side, one) for one in actors[1 : 1 + num_deaths]
        ),
    }
    side.close()
    return found


def median_s(work: Callable[[], object], num_runs: int) -> float:
    """Seconds of one run, the first fifth of them being for warming up."""
    times = []
    for _ in range(num_runs + num_runs // 5 + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[-num_runs:])


def calls_per_s(side: Side, actors: Sequence[Any], num_calls: int) -> float:
    def batch() -> None:
        side.get([side.call(actors[n % len(actors)], "nothing") for n in range(BATCH)])

    return BATCH / median_s(batch, max(3, num_calls // BATCH))


def seconds_to_death(side: Side, actor: Any) -> float:
    """From the signal to the knowledge."""
    pid = side.get(side.call(actor, "pid"))
    wait = side.wait_for_death(actor)
    time.sleep(0.1)  # until the watching has begun
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    wait()
    return time.perf_counter() - start


def copy_rate() -> float:
    """Bytes/s of copying as much between two arrays that are there already."""
    source, target = (np.ones(NUM_BYTES, dtype=np.uint8) for _ in range(2))
    return NUM_BYTES / median_s(lambda: np.copyto(target, source), 15)


if __name__ == "__main__":
    print(json.dumps(measure(SIDES[sys.argv[1]], "--small" in sys.argv)))
