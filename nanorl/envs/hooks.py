"""What a class derived from `Env` may define, checked before anything is played.

A hook whose name is misspelt would never be called, and nothing would say so:

    Guess.stepp: an environment has no such method; did you mean `step`?

Only near misses are refused, and a method only for a method, a value only for a value. A name that
begins with an underscore, a method that is one of the tools, or what the class's own methods use
(a helper `scores` of `score`) is the user's: a misspelt hook is what nobody uses.
Next: env_class.py, which asks for this.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from nanorl.envs.env import Env
from nanorl.envs.tools.base import Tool
from nanorl.envs.tools.function import MethodTool, function_tool

METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "setup": (),
        "tasks": ("rng",),
        "reset": (),
        "step": ("text",),
        "score": ("transcript",),
        "teacher": ("observations", "rng"),
        "close": (),
        "open_session": ("sandbox",),
    }
)
"""The methods that a run calls, and what each is given."""
VALUES = ("system", "tools", "parser", "loop", "data", "defaults", "evaluation_only")
"""What a run reads from the class."""
BEFORE_EPISODES = ("setup", "tasks")
"""Those of them that nobody awaits."""
CALLED = ("done", "reward", "metric", "session")
"""What the methods call; a class that defines it anew breaks its own calls."""
NEAR = 0.81
"""How alike two names are that mean the same: `stepp` and `step`, but not `stop` and `step`."""


def check_hooks(cls: type[Env]) -> None:
    """ValueError, naming the nearest hook, where the class has a misspelt one or one of the wrong
    kind."""
    bases = [base for base in cls.__mro__ if base is not Env and issubclass(base, Env)]
    used = set[str]().union(*(_names_in(value) for base in bases for value in vars(base).values()))
    for base in bases:
        own = {name: value for name, value in vars(base).items() if name[0] != "_"}
        for name, value in own.items():
            is_tool = any(value is one for one in _listed(own.get("tools")))
            is_users = is_tool or (name in used and name not in (*CALLED, "task"))
            _check(f"{base.__name__}.{name}", name, value, is_users=is_users)


def tools_of(env: Env) -> tuple[Tool, ...]:
    """The tools of an environment, its own methods bound to `env`. ValueError for what is none."""
    name = type(env).__name__
    if not isinstance(env.tools, Sequence) or isinstance(env.tools, str):
        raise ValueError(
            f"{name}.tools is {env.tools!r}: it is a list of functions, as `tools = [look, move]`"
        )
    return tuple(_tool(env, one, name) for one in env.tools)


def _tool(env: Env, given: Any, name: str) -> Tool:
    if hasattr(given, "schema"):
        return given  # type: ignore[no-any-return]
    if isinstance(given, staticmethod):
        return function_tool(given.__func__)
    if not callable(given):
        raise ValueError(
            f"{name}.tools holds {given!r}, which is no function; below the `def`s of its methods "
            "write the names without quotes, as `tools = [look, move]`"
        )
    called = getattr(given, "__name__", "")
    is_own = getattr(given, "__self__", None) is env or any(
        vars(base).get(called) is given for base in type(env).__mro__
    )
    return MethodTool(getattr(env, called), called) if is_own else function_tool(given)


def _names_in(value: Any) -> set[str]:
    """The names that a function's code uses, and those of the functions inside of it."""
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    todo = [code] if (code := getattr(function, "__code__", None)) else []
    names: set[str] = set()
    while todo:
        code = todo.pop()
        names |= set(code.co_names)
        todo += [one for one in code.co_consts if isinstance(one, CodeType)]
    return names


def _check(place: str, name: str, value: Any, *, is_users: bool) -> None:
    """Refuse one attribute of a class, or let it be."""
    if name in METHODS:
        if not callable(value) and value is not None and not _is_wrapped(value):
            into = "; a list or a file of tasks is `data`" if name == "tasks" else ""
            raise ValueError(f"{place} is {value!r:.60}, but it is a method{into}")
        if isinstance(value, FunctionType):
            _check_parameters(place, value, METHODS[name])
            _check_awaited(place, name, value)
        return
    is_method = isinstance(value, FunctionType) and value.__name__ == name
    if name in VALUES:
        if is_method:
            raise ValueError(
                f"{place} is a method, but it is a value: write `{name} = ...`, or put "
                "@property above the def"
            )
        return
    if is_users:
        return
    if name in CALLED or name == "task":
        raise ValueError(
            f"{place}: `self.{name}` is what an environment is given; "
            + ("did you mean `tasks`?" if name == "task" else "choose another name")
        )
    known = METHODS if is_method else VALUES
    for near in difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR):
        raise ValueError(
            f"{place}: an environment has no such {'method' if is_method else 'value'}; did you "
            f"mean `{near}`? One of your own begins with an underscore, or has another name"
        )


def _check_parameters(place: str, method: FunctionType, given: Sequence[str]) -> None:
    """`tasks` alone may do without what it is given."""
    signature = inspect.signature(method)
    is_lazy = place.endswith(".tasks") and len(signature.parameters) == 1
    try:
        signature.bind(None, *(() if is_lazy else given))
    except TypeError as error:
        wanted = ", ".join(("self", *given))
        raise ValueError(
            f"{place}{signature}: {error}; it is called as {place.rpartition('.')[2]}({wanted})"
        ) from None


def _check_awaited(place: str, name: str, method: FunctionType) -> None:
    """What is called before any episode begins has no event loop to wait in."""
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    if is_async and name in BEFORE_EPISODES:
        raise ValueError(
            f"{place} is `async`, but it is called before any episode begins, where nobody waits "
            f"for it; write `def {name}`, with asyncio.run inside if it must"
        )


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, staticmethod | classmethod | property) or hasattr(value, "__get__")


def _listed(tools: Any) -> Iterable[Any]:
    return tools if isinstance(tools, Sequence) and not isinstance(tools, str) else ()
