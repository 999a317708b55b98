"""Actors, futures and bounded queues; one program for one process or many."""

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
    "TaskError",
    "WorkerDied",
]
