"""Resident worker processes for tests over gloo: started once, reused by every test.

    results = pool.run(4, my_function, arg, ...)      # my_function(rank: Rank, arg, ...) on 4 ranks

Starting four processes that import torch takes seconds, a fresh set of groups in running ones
takes milliseconds. `my_function` must be importable (a module beside this one, not a test file).
A rank that raises fails the call at once with its traceback; a call that exceeds its time, or
loses a process, kills all workers and the next call starts fresh ones.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import open_store

PRELOAD = ["pytest", "torch", "torch._dynamo", "nanoengine.engine", "nanoengine.parallel.mesh"]


class RankFailed(AssertionError):  # noqa: N818 (the name of the event)
    """A rank raised, died or took too long; the message holds its traceback."""


@dataclass
class Rank:
    """What a worker function gets: its number, and a way to the others."""

    rank: int
    world: int
    store: dist.Store
    meshes: list[Mesh]

    def mesh(self, layout: Layout, timeout_s: float = 240.0) -> Mesh:
        """A mesh of all ranks of this call; several are fine. Closed after the call."""
        name = f"mesh{len(self.meshes)}"
        mesh = Mesh(layout, self.rank, self.store, name=name, timeout_s=timeout_s)
        self.meshes.append(mesh)
        return mesh


class WorkerPool:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []
        self._server: MeetingStore | None = None
        self._num_runs = 0

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 280.0
    ) -> list[Any]:
        """`function(Rank, *args)` on every rank; their results in order."""
        self._grow(world)
        self._num_runs += 1
        task = pickle.dumps((f"run{self._num_runs}", world, function, args))
        try:
            return self._collect(world, task, timeout_s)
        except BaseException:  # the test's own time limit, say: late answers would be the next's
            self.close()
            raise

    def _collect(self, world: int, task: bytes, timeout_s: float) -> list[Any]:
        pending: dict[Any, int] = {}
        for rank, (_, connection) in enumerate(self._workers[:world]):
            connection.send_bytes(task)
            pending[connection] = rank
        results: list[Any] = [None] * world
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(pending.values())} took longer than {timeout_s} s")
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    is_good, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self._fail(f"rank {rank} died")
                if not is_good:
                    self._fail(f"rank {rank} of {world} raised\n{value}")
                results[rank] = value
        return results

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _grow(self, world: int) -> None:
        if self._server is None:
            self._server, self._point = open_store()
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            arguments = (len(self._workers), self._point, theirs)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _fail(self, message: str) -> None:
        self.close()
        raise RankFailed(message)


def _serve(rank: int, point: MeetingPoint, connection: Connection) -> None:
    torch.set_num_threads(1)
    server = MeetingStore(point)
    while True:
        try:
            name, world, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        meshes: list[Mesh] = []
        place = Rank(rank, world, dist.PrefixStore(name, server), meshes)
        try:
            answer = (True, function(place, *args))
            for mesh in meshes:
                mesh.close()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
