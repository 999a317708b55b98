"""The inside of a worker: it makes the shared object, opens further ones from it, calls them.

Whatever the code raises becomes the text of a `WorkerReply`, and results travel as bytes that were
pickled and measured here, so the other side reads nothing that it did not expect.
Left out: walls. The code is the user's own and may do what the user may; code of a model belongs in
nanorl.sandbox. Next: host_pool.py.
"""

from __future__ import annotations

import inspect
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanorl.types import InfrastructureError

_OWN_FOLDER = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class WorkerReply:
    """A pickled result, or the reason why there is none. `is_unfit`: the worker had better be
    replaced. `is_bystander`: it was ended, for what another call did."""

    data: bytes = b""
    error: str | None = None
    is_unfit: bool = False
    is_bystander: bool = False


class CodeWorker:
    """One process with a shared object and the objects that it opened, by number."""

    def __init__(self, max_result_bytes: int) -> None:
        # A process group of its own: what the code starts is killed along with it.
        os.setsid()
        self._max_result_bytes = max_result_bytes
        self._objects: dict[int, Any] = {}
        self._shared: Any = None

    async def pid(self) -> int:
        """The process, which is also its process group."""
        return os.getpid()

    async def make(self, factory: Callable[..., Any], args: tuple[Any, ...]) -> WorkerReply:
        """Make the shared object."""
        return await self._reply(self._make(factory, args))

    async def open(self, number: int, args: tuple[Any, ...]) -> WorkerReply:
        """Open an object of the shared one, `shared.open(*args)`, under a number."""
        return await self._reply(self._open(number, args))

    async def call(self, number: int | None, method: str, args: tuple[Any, ...]) -> WorkerReply:
        """Call a method of an object, or of the shared one."""
        target = self._shared if number is None else self._objects[number]
        return await self._reply(_finished(getattr(target, method), args))

    async def drop(self, number: int) -> None:
        """Forget an object."""
        self._objects.pop(number, None)

    async def _make(self, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._shared = await _finished(factory, args)

    async def _open(self, number: int, args: tuple[Any, ...]) -> None:
        self._objects[number] = await _finished(self._shared.open, args)

    async def _reply(self, work: Any) -> WorkerReply:
        try:
            result = await work
        except (Exception, SystemExit) as error:  # the boundary of a plug-in
            return WorkerReply(error=describe(error))
        try:
            data = pickle.dumps(result, 5)
        except Exception as error:  # whatever pickle raises
            return WorkerReply(error=f"returned what cannot be sent: {error}", is_unfit=True)
        if len(data) > self._max_result_bytes:
            text = f"returned {len(data)} bytes, more than {self._max_result_bytes}"
            return WorkerReply(error=text, is_unfit=True)
        return WorkerReply(data)


def describe(error: BaseException) -> str:
    """The error in words, with the last line of the user's own code that led to it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN_FOLDER, "<frozen importlib"))
    ]
    last = frames[-1] if frames else None
    where = "" if last is None else f" ({last.filename}, line {last.lineno}: {last.line})"
    is_ours = isinstance(error, InfrastructureError) or (last is None and type(error) is ValueError)
    return f"{error}{where}" if is_ours else f"{type(error).__name__}: {error}{where}"


async def _finished(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = function(*args)
    return await result if inspect.isawaitable(result) else result
