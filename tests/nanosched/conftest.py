"""Schedulers for the contract: each back end, and one private Ray for all tests that need it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from backends import MACHINE, MakeScheduler, inline, local, ray

from nanosched import Scheduler

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.fixture(scope="session")
def private_ray() -> Iterator[Scheduler]:
    """The one connection to Ray that a process can have; tests share it."""
    if not HAS_RAY:
        pytest.skip("ray is not installed (pip install .[ray])")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "0" * 64)  # or Ray would write one into the home directory
        with Scheduler(backend="ray", resources=MACHINE) as scheduler:
            yield scheduler


@pytest.fixture(params=[inline, local, ray])
def backend(request: pytest.FixtureRequest) -> str:
    """Tests may narrow it: `@pytest.mark.parametrize("backend", [local, ray])`."""
    return str(request.param)


@pytest.fixture
def make_scheduler(backend: str, request: pytest.FixtureRequest) -> MakeScheduler:
    """Makes schedulers of the back end `backend` on a declared machine, `MACHINE`."""
    if backend == "ray":
        request.getfixturevalue("private_ray")
        return lambda: Scheduler(backend="ray", address="auto")
    preload = ["contract_actors"]  # or every process would import it anew
    return lambda: Scheduler(backend=backend, resources=MACHINE, preload=preload)


@pytest.fixture
def sched(make_scheduler: MakeScheduler) -> Iterator[Scheduler]:
    with make_scheduler() as scheduler:
        yield scheduler
