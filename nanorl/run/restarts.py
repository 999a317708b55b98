"""A run that failed begins again by itself, from its newest checkpoint: `--monitor.restarts`.

    a role dies or hangs            it alone is started again                  (roles/actor_role.py)
    a rank of the trainer dies      all ranks; back to the newest checkpoint   (run.py)
    that did not help, either       all of the run but its process: this file

The kind of the error decides. `FAULTS` are those of processes and of what connects them: the same
run may get through when they are new. Everything else would fail again, so it ends the run: what a
user has to mend (ValueError), a full disk, a defect of ours or of an environment. So does Ctrl-C.
What a run held, its processes, sockets and memory, is gone before the next one begins; what it has
learnt since the checkpoint is computed again, bit for bit where `--resume` would.

Left out: a driver that died. Whatever started it may start it again with `--resume`.
"""

from __future__ import annotations

import datetime
import gc
import shlex
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from nanoengine.state.checkpoint import latest_checkpoint, read_cursor
from nanorl.distributed.roles.base import Roles
from nanorl.distributed.roles.choose_roles import make_roles
from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.distributed.roles.role import RoleLost
from nanorl.observability.report.live import LiveView
from nanorl.observability.results import PHASES
from nanorl.options.parts import Parts
from nanorl.run.cursor import CHECKPOINTS, Cursor
from nanorl.run.history import Event
from nanorl.run.run import Run
from nanorl.run.state import RunState
from nanorl.sandbox.base import SandboxFailure
from nanosched import WorkerDied

RunToEnd = Callable[[Coroutine[Any, Any, None]], None]
FAULTS = (RoleLost, TrainerLost, WorkerDied, SandboxFailure, ConnectionError, EOFError)
MOST_IN_VAIN = 3
"""So often a run may fail at one place: another restart would only fail there again."""


class Restarts:
    """Holds what one process knows of its run's failures so far."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, 0
        self._furthest, self._num_in_vain = (-1, -1), 0

    def allow(self, error: BaseException, run: RunState) -> bool:
        """Say whether the run, which ends with `error`, is to begin again."""
        is_fault, is_left = isinstance(error, FAULTS), self.count < self.most
        return is_fault and is_left and self._in_vain(run) < MOST_IN_VAIN

    def _in_vain(self, run: RunState) -> int:
        """Count how often it has failed without getting any further, this time included."""
        return self._num_in_vain + 1 if _place(run) <= self._furthest else 1

    def note(self, parts: Parts, run: RunState, reason: str) -> None:
        """Record one. From now on the run is one that goes on."""
        self.count += 1
        self._num_in_vain = self._in_vain(run)
        self._furthest = max(_place(run), self._furthest)
        cursor = _checkpointed(run)
        run.history.append(
            Event(
                event="restarted",
                at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                phase=cursor.phase,
                step=cursor.rl_steps_done,
                changes={},
                origin="",
                command=shlex.join(sys.argv),
                reason=reason,
            )
        )
        parts.config = replace(parts.config, resume=True)


def _place(run: RunState) -> tuple[int, int]:
    return PHASES.index(run.cursor.phase), run.cursor.step


def _checkpointed(run: RunState) -> Cursor:
    """The place where the run goes on: its newest checkpoint's, or the beginning."""
    newest = latest_checkpoint(run.dir / CHECKPOINTS)
    if newest is None:
        return Cursor()
    steps = run.history.original("rl.steps", run.config.rl.steps)
    return Cursor.from_json(read_cursor(newest), rl_steps=steps)


def _told(error: Exception) -> RoleLost:
    """The error that tells its reader what can be done."""
    return RoleLost(
        f"{type(error).__name__}: {error}. Look at the messages above, then go on with --resume"
    )


def run_until_done(
    parts: Parts,
    first: Callable[[], Roles],
    title: str,
    run_to_end: RunToEnd,
    *,
    is_program: bool = False,
) -> RunState:
    """Run all phases, again from the newest checkpoint where that may help. `first` gives the roles
    of the first attempt; those of every attempt are closed. Raises what ended the run. `is_program`
    as in `Run`."""
    restarts = Restarts(parts.config.monitor.restarts)
    roles = first()
    with LiveView(title) as live:
        while True:
            try:
                run = Run(parts, roles, live, goes_on=restarts.allow, is_program=is_program)
                run_to_end(run.execute())
                return run.state
            except FAULTS as error:
                # A fault that meets Ctrl-C may be all that is seen of the two.
                if run.is_asked_to_stop or not restarts.allow(error, run.state):
                    if isinstance(error, RoleLost):
                        raise
                    raise _told(error) from error
                reason = f"{type(error).__name__}: {error}"
            finally:
                roles.close()
            restarts.note(parts, run.state, reason)
            live.say(
                f"the run failed ({reason}) and begins again from its newest checkpoint, "
                f"restart {restarts.count} of at most {restarts.most} (--monitor.restarts)"
            )
            del run, roles
            gc.collect()  # models, segments, sockets of what failed, before there are new ones
            roles = make_roles(parts)
