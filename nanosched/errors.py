"""The scheduler's own errors; what an actor raised is the cause of a TaskError.

Left out: mistakes in arguments (an unknown back end, an unknown option), which are ValueError.
"""

from __future__ import annotations


class SchedulerError(RuntimeError):
    """Base of all errors below; raised itself for calls that could never finish."""


class TaskError(SchedulerError):
    """A method or constructor of an actor raised. `cause` is the original exception."""

    def __init__(self, method: str, cause: BaseException) -> None:
        super().__init__(method, cause)  # both in args, so that the error survives pickling
        self.method = method
        self.cause = cause
        self.__cause__ = cause

    def __str__(self) -> str:
        return f"{self.method} raised {type(self.cause).__name__}: {self.cause}"


class WorkerDied(SchedulerError):  # noqa: N818 - named as what happened
    """The actor was killed or exited; the call may or may not have run, and is not repeated."""


class SchedulerLost(SchedulerError):  # noqa: N818 - named as what happened
    """The process that starts and connects the actors has ended; this scheduler can do nothing any
    more."""


class GetTimeout(SchedulerError, TimeoutError):  # noqa: N818 - named as what happened
    """`get` gave up waiting. The call itself goes on and can be waited for again."""


class QueueClosed(SchedulerError):  # noqa: N818 - named as what happened
    """`put` on a closed queue, or `get` on a closed queue that has been drained."""
