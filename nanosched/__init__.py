"""Actors, futures and bounded queues: one program for one process or many.

An actor is an object that somebody else runs: `Scheduler` makes it and hands out a handle, a call
of a method through the handle gives a `Future` at once, and errors come back with the result. The
trainer is written against this, so that learner and collector need not know where they are. Today
there is one back end, `inline`: everything in this process. Start at api.py.
"""

from nanosched.api import ActorBuilder, ActorHandle, ActorOptions, Scheduler
from nanosched.errors import (
    GetTimeout,
    QueueClosed,
    SchedulerError,
    TaskError,
    WorkerDied,
)
from nanosched.future import Future
from nanosched.queue import BoundedQueue
from nanosched.shared_buffer import SharedBuffer

__all__ = [
    "ActorBuilder",
    "ActorHandle",
    "ActorOptions",
    "BoundedQueue",
    "Future",
    "GetTimeout",
    "QueueClosed",
    "Scheduler",
    "SchedulerError",
    "SharedBuffer",
    "TaskError",
    "WorkerDied",
]
