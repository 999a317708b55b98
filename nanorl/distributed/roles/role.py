"""A role is a part of a run that is called by the name of a method, wherever it is.

    rollouts = await collector.call(RolloutCollector.run_group, task, group_id="s0-g1", ...)

Here a role is an object of this process, and a call is a call: it runs in the caller's task, raises
what the method raises and is cancelled with its caller.
Left out: roles in processes of their own, which die and have successors (actor_role.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

A = TypeVar("A")  # the class of the object
A_co = TypeVar("A_co", covariant=True)


class RoleLost(RuntimeError):  # noqa: N818 (named as what happened)
    """A role died and could not be started again; the message says why and how to go on."""


class Role(Protocol[A_co]):
    """The interface that a run asks of a role. `A_co` is the class whose methods it takes."""

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, named as `Class.method`; returns what it returns, raises what it raises.

        RoleLost where nobody can answer any more.
        """
        ...


class DirectRole(Generic[A]):
    """An object of this process, which the first call makes: a run opens its files when it starts,
    not before."""

    def __init__(self, name: str, make: Callable[[], A]) -> None:
        self.name = name
        self._make = make
        self._object: A | None = None
        self._is_closed = False

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method as `Role.call`, and await it if it is a coroutine."""
        # By its name, so that a subclass's own version runs, as everywhere in Python.
        said = getattr(self.open(), method.__name__)(*args, **kwargs)
        return await said if inspect.iscoroutine(said) else said

    def open(self) -> A:
        """The object, which is made if there is none. RoleLost after `close`."""
        if self._is_closed:
            raise RoleLost(f"{self.name} is closed and has no successor")
        if self._object is None:
            self._object = self._make()
        return self._object

    def close(self) -> A | None:
        """Refuse later calls; returns the object, if there is one, to whoever ends it."""
        self._is_closed = True
        return self._object
