"""Opens a pool of bubblewrap: finds it, starts workers in it, and tries their walls with a canary.

It happens once for a pool. Left out: running programs (pool.py, dispatch.py).
"""

from __future__ import annotations

import math
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanorl.sandbox import canary
from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox.base import (
    ISOLATED,
    Capabilities,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
)
from nanorl.sandbox.bwrap import BwrapWorker
from nanorl.sandbox.dispatch import Dispatcher, Size
from nanorl.sandbox.host_machine import explain, find_bwrap
from nanorl.sandbox.interpreter import Interpreter, find_python
from nanorl.sandbox.lease import SessionDispatcher
from nanorl.sandbox.protocol import TIER
from nanorl.sandbox.request import program_execution

_CANARY_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class OpenPool:
    """The workers of a pool whose walls were seen to hold."""

    dispatcher: Dispatcher
    bwrap: Path
    python: Interpreter
    ablate: frozenset[str]

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that were found on this machine."""
        return Capabilities(
            tier=TIER,
            isolates=ISOLATED[TIER],
            memory=self.dispatcher.memory_tier,
            details={"bwrap": str(self.bwrap), "python": str(self.python.path)},
        )

    def open_sessions(self) -> SessionDispatcher:
        """The dispatcher of sessions, which makes and ends its workers with them."""
        spec, size = self.dispatcher.spec, Size(0, 0, math.inf)
        new_worker = partial(
            BwrapWorker,
            spec,
            bwrap=self.bwrap,
            python=self.python,
            ablate=self.ablate,
            is_session=True,
        )
        return SessionDispatcher(spec, size, new_worker)

    async def probe_session(self, session: Any) -> None:
        """Run the canary in a `Session`. SandboxUnavailable where it sees more than walls."""
        result = await session.run(canary.CODE, _CANARY_TIMEOUT_S)
        leak = canary.find_leak(result, files_in_tmp=[])
        if leak and not self.ablate:
            raise explain(leak)


def open_pool(spec: SandboxSpec, size: Size, ablate: frozenset[str]) -> OpenPool:
    """The first bubblewrap in which the canary sees only walls. SandboxUnavailable, with the reason
    and the remedy, where there is none."""
    if sys.platform != "linux":
        raise SandboxUnavailable(
            f"the sandbox needs Linux namespaces, this is {sys.platform}",
            "run on Linux, or in a Linux virtual machine",
        )
    if platform.machine() not in ("x86_64", "aarch64"):
        raise SandboxUnavailable(
            f"no system-call table for {platform.machine()}", "run on x86_64 or aarch64"
        )
    memory.sweep()
    python = find_python(spec)
    refusals = []
    for bwrap in find_bwrap(spec):
        new_worker = partial(BwrapWorker, spec, bwrap=bwrap, python=python, ablate=ablate)
        dispatcher = Dispatcher(spec, size, new_worker)
        try:
            _probe(dispatcher, ablate)
            return OpenPool(dispatcher, bwrap, python, ablate)
        except SandboxUnavailable as refusal:
            refusals.append(refusal)
            dispatcher.close()
        except BaseException:  # Ctrl-C too: its workers run already
            dispatcher.close()
            raise
    raise refusals[0]


def _probe(dispatcher: Dispatcher, ablate: frozenset[str]) -> None:
    execution = program_execution(dispatcher.spec, canary.CODE, {}, timeout_s=_CANARY_TIMEOUT_S)
    dispatcher.submit(execution)
    try:
        result = execution.future.result()
    except SandboxFailure as failure:
        raise explain(dispatcher.start_error) from failure
    leak = canary.find_leak(result)
    if leak and not ablate:
        raise explain(leak)
