"""Actors, futures and bounded queues: one program for one process or many.

An actor is an object that somebody else runs: `Scheduler` makes it and hands out a handle, a call
of a method through the handle gives a `Future` at once, and errors come back with the result. The
trainer is written against this, so that learner and collector need not know where they are. Three
back ends keep one contract: `inline` (everything in this process), `local` (a process per actor,
the room local/) and `ray` (one or many machines). Start at api.py.
"""

from nanosched.api import ActorBuilder, Scheduler
from nanosched.errors import (
    GetTimeout,
    QueueClosed,
    SchedulerError,
    SchedulerLost,
    TaskError,
    WorkerDied,
)
from nanosched.future import Future
from nanosched.handle import ActorHandle
from nanosched.node_address import meeting_address, node_address
from nanosched.queue import BoundedQueue
from nanosched.resources import ActorOptions, PlacementGroup, Resources
from nanosched.shared_buffer import SharedBuffer
from nanosched.worker_group import WorkerGroup

__all__ = [
    "ActorBuilder",
    "ActorHandle",
    "ActorOptions",
    "BoundedQueue",
    "Future",
    "GetTimeout",
    "PlacementGroup",
    "QueueClosed",
    "Resources",
    "Scheduler",
    "SchedulerError",
    "SchedulerLost",
    "SharedBuffer",
    "TaskError",
    "WorkerDied",
    "WorkerGroup",
    "meeting_address",
    "node_address",
]
