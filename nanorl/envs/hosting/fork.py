"""`call_in_fork`: one call in a fork of this process, with limits of CPU seconds and of memory.

For code that is trusted and an input that is not: what a policy wrote may keep a parser busy for
hours. Limits of the CPU say the same on a busy machine and on an idle one.
Left out: a limit on the time of the wall, which the deadline of a worker sets (host_pool.py).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable
from typing import Any


class NoResultError(RuntimeError):
    """The call raised, or took more than it may."""


def call_in_fork(function: Callable[[], Any], *, cpu_s: int, memory_bytes: int) -> Any:
    """The result, which is JSON. NoResultError where there is none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _call_and_leave(function, writer, cpu_s, memory_bytes)
    os.close(writer)
    with open(reader, "rb") as stream:
        data = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise NoResultError(f"the call ended with status {status}")
    return json.loads(data)


def _call_and_leave(
    function: Callable[[], Any], writer: int, cpu_s: int, memory_bytes: int
) -> None:
    """Run the function in the child, write its result as JSON to `writer`, and leave. It never
    returns."""
    status = 1
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        logging.disable()  # packages report what they cannot read
        with open(writer, "wb") as stream:
            stream.write(json.dumps(function()).encode())
        status = 0
    finally:
        os._exit(status)
