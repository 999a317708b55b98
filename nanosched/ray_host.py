"""What runs inside a process of Ray: it builds an actor's object and runs the methods asked for.

`SyncHost` is for classes without async methods: Ray itself keeps the order of the calls. For those
with async methods there is `AsyncHost`, whose calls run concurrently but start in order: Ray does
not promise that, so every call carries its place in its caller's line. Both answer `watch` only
when they are told to, so that a call of it fails at the moment when the process ends.

Left out: more than about a thousand calls at once of one async actor (Ray's own limit, the others
stand in line). Next: ray_backend.py, the side that calls.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import ray
from ray import cloudpickle
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from nanosched.errors import SchedulerError, TaskError, WorkerDied

# Ray tells why a process ended only if it ended without calls under way. `sys.exit` writes it down.
NAMESPACE = b"nanosched"
LOST_CALL_S = 10.0
# A result that was lost with the process or the machine that had it.
GONE = (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    WorkerCrashedError,
)


class Input(NamedTuple):
    """A result that the host waits for itself, in the call's turn; Ray leaves it alone."""

    ref: ray.ObjectRef[Any]


class Place(NamedTuple):
    """The place of a call in the order of its caller's calls; callers count from 0."""

    caller: str
    number: int


class SyncHost:
    """Runs the methods of one object, one after the other."""

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._object = _Object(cls, args, kwargs)
        self._is_released = threading.Event()

    @ray.method(max_task_retries=0)
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self._object.run(method, lambda bound: bound(*args, **kwargs))

    @ray.method(max_task_retries=0, concurrency_group="watch")
    def watch(self) -> None:
        self._is_released.wait()

    @ray.method(max_task_retries=0, concurrency_group="watch")
    def unwatch(self) -> None:
        self._is_released.set()


class AsyncHost:
    """Runs the methods of one object as tasks of one event loop."""

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._object = _Object(cls, args, kwargs)
        self._is_released = asyncio.Event()
        self._lines: dict[str, _Line] = {}
        self._has_lived_before = ray.get_runtime_context().was_current_actor_reconstructed

    @ray.method(max_task_retries=0)
    async def call(
        self, place: Place, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        first = place.number if self._has_lived_before else 0  # earlier ones died with that life
        line = self._lines.setdefault(place.caller, _Line(first))
        await line.arrive(place.number)
        async with line.turn:  # fair, so that calls start in the order in which they came here
            positional = [await _value_of(value) for value in args]
            named = {name: await _value_of(value) for name, value in kwargs.items()}
            result = self._object.run(method, lambda bound: bound(*positional, **named))
            if not inspect.iscoroutine(result):
                return result
            task = asyncio.create_task(self._object.finish(method, result))
        return await task

    @ray.method(max_task_retries=0)
    async def watch(self) -> None:
        await self._is_released.wait()

    @ray.method(max_task_retries=0)
    async def unwatch(self) -> None:
        self._is_released.set()


class _Object:
    """The object of an actor, or the error of its constructor, which every call raises."""

    def __init__(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _internal_kv_del(_own_key(), namespace=NAMESPACE)  # a former life's
        if not ray.get_gpu_ids():  # Ray hides devices only from those who have one
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._label = cls.__name__
        self._instance: Any = None
        self._error: SchedulerError | None = None
        try:
            positional = [_get(value) for value in args]
            named = {name: _get(value) for name, value in kwargs.items()}
        except SchedulerError as error:  # of the call that an argument came from
            self._error = error
            return
        try:
            self._instance = cls(*positional, **named)
        except SystemExit as error:
            _leave(f"{self._label}.__init__ called sys.exit({error.code!r})")
        except Exception as error:  # the boundary of the actor: recorded, raised by its calls
            self._error = TaskError(f"{self._label}.__init__", _portable(error))

    def run(self, method: str, start: Callable[[Any], Any]) -> Any:
        """The result of `start` on the bound method. TaskError holds what it raised."""
        if self._error is not None:
            raise self._error
        label = f"{self._label}.{method}"
        try:
            result = start(getattr(self._instance, method))
        except SystemExit as error:
            _leave(f"{self._label} called sys.exit({error.code!r}) in {label}")
        except Exception as error:  # the boundary of the actor: recorded, raised by `get`
            failure = TaskError(label, _portable(error))
        else:
            share_tensors()
            return result
        raise failure

    async def finish(self, method: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The same for an async method, as the body of its task."""
        label = f"{self._label}.{method}"
        try:
            result = await coroutine
        except SystemExit as error:  # not for the loop, which would end with it
            _leave(f"{self._label} called sys.exit({error.code!r}) in {label}")
        except (Exception, asyncio.CancelledError) as error:  # the boundary of the actor, as above
            failure = TaskError(label, _portable(error))
        else:
            share_tensors()
            return result
        raise failure


class _Line:
    """The calls of one caller. A later one may get here first: it waits for those before it."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._waiting: dict[int, asyncio.Event] = {}
        self.turn = asyncio.Lock()

    async def arrive(self, number: int) -> None:
        if number > self._next:
            arrived = self._waiting[number] = asyncio.Event()
            while not arrived.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), LOST_CALL_S)
                    break
                # One was lost on its way, and its caller knows: the first of the others goes on.
                self._waiting[min(self._waiting)].set()
            del self._waiting[number]
        self._next = max(self._next, number + 1)
        if self._next in self._waiting:
            self._waiting[self._next].set()


def error_of(error: BaseException, label: str) -> SchedulerError:
    """The error that Ray raised for a call, in the scheduler's own terms."""
    while isinstance(error, RayTaskError):  # each call that it went through as input adds one
        error = error.cause
    if isinstance(error, SchedulerError):
        return error
    if isinstance(error, RayActorError):
        return WorkerDied(f"{label}: {_noted_reason(error.actor_id) or _brief(error)}")
    if isinstance(error, GONE):
        return WorkerDied(f"{label}: {_brief(error)}")
    return TaskError(label, error)  # the result could not be pickled, or unpickled


def share_tensors() -> None:
    """Lets Ray pass a CPU tensor's memory beside the pickle, once this process uses torch.

    Ray alone would write it into the pickle, several copies later. Sharing of one storage by
    several tensors is lost: each arrives as the receiver's own copy."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor"):
        ray.util.register_serializer(
            torch.Tensor, serializer=_tensor_parts, deserializer=_tensor_of
        )


def _tensor_parts(tensor: Any) -> tuple[Any, ...]:
    import torch  # here: tasks without tensors need none

    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if is_plain and not (tensor.requires_grad or tensor.is_conj() or tensor.is_quantized):
        flat = tensor.contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape
    with io.BytesIO() as file:
        torch.save(tensor, file)
        return (file.getvalue(),)


def _tensor_of(parts: tuple[Any, ...]) -> Any:
    import torch  # here: tasks without tensors need none

    if len(parts) == 1:
        return torch.load(io.BytesIO(parts[0]), weights_only=True)
    memory, dtype, shape = parts
    if memory.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory.copy()).view(dtype).reshape(shape)


async def _value_of(value: Any) -> Any:
    if not isinstance(value, Input):
        return value
    try:
        return await value.ref
    except RayError as error:
        failure = error_of(error, "an argument")
    raise failure


def _get(value: Any) -> Any:
    if not isinstance(value, Input):
        return value
    try:
        return ray.get(value.ref)
    except RayError as error:
        failure = error_of(error, "an argument")
    raise failure


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note, or a stand-in that survives the journey."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception as reason:  # whatever its own code raises: the stand-in records it
        kind = type(error).__name__
        return SchedulerError(f"{kind}: {error} ({kind} cannot be pickled: {reason})")
    return error


def _leave(reason: str) -> NoReturn:
    """Ends the process, whatever else runs in it, having written down why."""
    _internal_kv_put(_own_key(), reason.encode(), overwrite=True, namespace=NAMESPACE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _own_key() -> bytes:
    return _key(ray.get_runtime_context().get_actor_id())


def _key(actor_id: str | None) -> bytes:
    return f"exit:{actor_id}".encode()


def _noted_reason(actor_id: str | None) -> str | None:
    noted = _internal_kv_get(_key(actor_id), namespace=NAMESPACE) if ray.is_initialized() else None
    return None if noted is None else noted.decode()


def _brief(error: BaseException) -> str:
    """Ray's last line without its advice."""
    return str(error).strip().splitlines()[-1].split(" Some common causes")[0]
