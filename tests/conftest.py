"""Shared fixtures: one torch thread, interrupts that are heeded, folders that are emptied, the CPU
kernels of either path, worker processes, the SmolLM2 folder where there is one."""

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kernels.cpp import ops as cpp_ops
from nanoengine.formats.sources import SMOLLM2, cached_folder

# Tests of one room use helpers of others. All names are distinct: test_house.py.
HERE = Path(__file__).resolve().parent
sys.path += [
    *sorted({str(file.parent) for file in HERE.glob("nano*/**/test_*.py")}),
    str(HERE / "kernels"),
]

from pool import WorkerPool  # noqa: E402

with suppress(ModuleNotFoundError):  # scripts/gpu_check.sh does without it
    from hypothesis import settings

    # Else an example fails that takes 200 ms: on a busy machine any may, and that says nothing.
    settings.register_profile("without deadlines", deadline=None)
    settings.load_profile("without deadlines")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--smollm2",
        default=None,
        metavar="DIR",
        help="Hugging Face folder of SmolLM2-135M-Instruct; default: the cache, if it is there",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="files in a random order, and the tests of each: none may need another before it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that look at the host's processes run one after the other, in one pytest process. So
    do those that use the worker pool: it is shared, and the machine is small."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("gloo"))
        if item.get_closest_marker("sandbox"):
            item.add_marker(pytest.mark.xdist_group("sandbox"))
    seed = config.getoption("--shuffle")
    if seed is not None:
        shuffle(items, seed)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """In place. Tests of a file stay together, so that what they share is made once."""
    rng = random.Random(seed)
    places = {path: rng.random() for path in sorted({item.path for item in items})}
    draws = {item: rng.random() for item in items}
    items.sort(key=lambda item: (places[item.path], draws[item]))


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests name is not kept where the user's own runs are known (nanorl/options/trust.py)."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="session")
def heeded_interrupts() -> None:
    """The background job of a shell ignores Ctrl-C, and so would the programs that tests start and
    interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests run side by side; one thread each is also faster on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """pytest's own, emptied unless the test failed: those of a suite are gigabytes. The folder
    stays, because pytest would give its name, under which modules are cached, to the next one."""
    num_failed = request.session.testsfailed
    yield tmp_path
    if request.session.testsfailed == num_failed and tmp_path.is_dir():
        shutil.rmtree(tmp_path, ignore_errors=True)
        tmp_path.mkdir(exist_ok=True)


@pytest.fixture(autouse=True)
def room_on_the_gpu() -> Iterator[None]:
    """Several test processes share a card: what one has freed is there for the others."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def native() -> None:
    """A test of the C++ kernels."""
    if cpp_ops.library() is None:
        pytest.skip("the C++ kernels are not available")


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C++ compiler."""
    monkeypatch.setattr(cpp_ops, "library", lambda: None)


@pytest.fixture(params=["native", "no_native"], ids=["cpp", "torch"])
def cpu_path(request: pytest.FixtureRequest) -> None:
    """A test of what both paths promise, run over each."""
    request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Processes for tests over gloo."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def smollm2_folder(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--smollm2")
    folder = Path(given) if given else cached_folder(SMOLLM2)
    if folder is None:
        pytest.skip("SmolLM2 is not in the cache; fetch it or pass --smollm2 DIR")
    return folder
