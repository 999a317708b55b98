"""The first lines that a worker runs, before the modules of its server are imported.

Stdlib only. Next: worker.py or keeper.py, whichever of them bwrap.py names.
"""

from __future__ import annotations

import os
from typing import Any

from nanorl.sandbox.confine import unshare_pids


def enter_pid_namespace(control: int) -> None:
    """Continues as pid 1 of a pid namespace that belongs to this user namespace.

    Bubblewrap's own belongs to the user namespace above, so nobody in here could return to it
    (setns(2)) after having made one for an execution. The process that bubblewrap started stays
    behind, small and without the host's socket `control`, until the server ends.
    """
    unshare_pids()
    if (pid := os.fork()) != 0:
        os.close(control)
        os.waitpid(pid, 0)
        os._exit(0)


class HeldHooks:
    """Holds back, for the program, what modules register to be done after a fork.

    `random` and `threading` repair in a forked child what the server, which has one thread and
    never draws a number, has not broken: half of what a fork costs. A program gets their hooks for
    its own forks.
    """

    def __init__(self) -> None:
        self._hooks: list[dict[str, Any]] = []
        self._register = os.register_at_fork
        os.register_at_fork = self._hold  # type: ignore[assignment]

    def _hold(self, **hook: Any) -> None:
        self._hooks.append(hook)

    def release(self) -> None:
        """From now on modules register for themselves."""
        os.register_at_fork = self._register

    def register(self) -> None:
        """In the program's process: for the forks that it makes."""
        for hook in self._hooks:
            os.register_at_fork(**hook)
