"""What a router calls: a replica in some process of this run, or a server that somebody started.

A client answers, raises what the replica raised, or raises `ReplicaLost`: then nobody will answer,
and the request may be given to another replica. A caller that is cancelled takes its request along.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.led_engine import RanksLost
from nanorl.distributed.roles.replica_role import Replica
from nanosched import ActorHandle, TaskError, WorkerDied


class ReplicaLost(ConnectionError):  # noqa: N818 - named as what happened
    """The replica is dead or out of reach; what it had of the request is lost."""


class ReplicaClient(Protocol):
    """One replica, as far as a router needs it."""

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        """Complete `ids`, from what is `sampled` on. An output with finish_reason "abort" and no
        stop_reason is of a replica that drains. `name` is the request's own in all the run."""


class ActorClient:
    """The client of a `Replica` that nanosched runs, in this process or another."""

    def __init__(self, handle: ActorHandle[Replica]) -> None:
        self._handle = handle

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        """As `ReplicaClient`. Errors are the engine's own, e.g. `ValueError` for bad parameters."""
        try:
            return await self._handle.call(Replica.generate, ids, params, name, sampled)
        except asyncio.CancelledError:
            self._handle.call(Replica.abort, name)  # the call itself goes on without its caller
            raise
        except WorkerDied as error:
            raise ReplicaLost(str(error)) from error
        except TaskError as error:
            # The replica was closed, or is out of step with its other ranks and will be killed.
            if isinstance(error.cause, asyncio.CancelledError | RanksLost):
                raise ReplicaLost(str(error)) from error
            raise error.cause from error
