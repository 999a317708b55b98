"""`function_tool`: a Python function as a tool, its schema from annotations and docstring.

    def look_up(word: str, num_lines: int = 3) -> str:
        '''Find a word in the dictionary.

        Args:
            word: the word as it is written
            num_lines: how much of the entry to show
        '''

    tools = [function_tool(look_up)]

Annotations may be whatever pydantic reads: str, int, float, bool, Literal, Enum, unions, lists,
dicts, dataclasses, TypedDicts, models. A parameter annotated `ToolContext` is given the episode's
and is no part of the schema. Descriptions are read from docstrings in Google's, NumPy's and the
reST style. Arguments are checked and converted before the call ("7" for an int is 7); wrong ones
are a `ToolError` that says which. An exception of the function is one too, with its type and
message alone.

A plain function runs in a thread of its own, so calls of one turn run side by side; methods of one
object (`MethodTool`) take turns. Left out: stopping a function that exceeds the time limit. Its
call is answered, its thread goes on until it returns; functions that may hang belong in a process.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import json
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NotRequired

from nanorl.envs.images import split_result
from nanorl.envs.tools.base import Done, Shown, Submitted, Tool, ToolContext, ToolError
from nanorl.types import InfrastructureError

NOT_TOOLS = frozenset({"reset", "step", "close", "score", "tasks", "teacher", "setup"})
"""Public methods of an environment that are not for the model."""
MAX_SHOWN_CHARS = 80
"""Of a wrong argument, in the message to the model."""


class FunctionTool:
    """A function behind the contract of a tool. Make one with `function_tool`."""

    def __init__(self, fn: Callable[..., Any], name: str, lock: asyncio.Lock | None = None) -> None:
        """Calls of tools that share a `lock` never overlap.

        `ValueError` where the signature cannot be a tool's.
        """
        self.fn = fn
        self.name = name
        self._lock = lock
        parameters, self._context_name = _parameters(fn, name)
        self._names = list(parameters)
        self._adapter = _adapter(fn, name, parameters)
        self.schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": _description(fn),
                "parameters": _without_titles(self._adapter.json_schema()),
            },
        }

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str | Shown:
        """Check the arguments, call the function, and return its result as text, and pictures
        where it returned some."""
        bound = self._checked(arguments)
        if self._context_name:
            bound[self._context_name] = context
        try:
            async with asyncio.timeout(context.timeout_s) as limit:
                result = await self._call(bound)
            if isinstance(result, Done):
                raise Submitted(result.answer, result.reward)
            return split_result(result) or _as_text(result)
        except (ToolError, Submitted, InfrastructureError):
            raise
        except TimeoutError as error:
            if limit.expired():
                raise ToolError(f"{self.name} timed out after {context.timeout_s:g} s") from error
            raise _as_tool_error(error) from error
        except (Exception, SystemExit) as error:  # the boundary to the user's function
            raise _as_tool_error(error) from error

    def _checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        from pydantic import ValidationError  # here: it is slow, and other tools need none

        try:
            return dict(self._adapter.validate_python(dict(arguments)))
        except ValidationError as error:
            lines = [_wrong(one, self._names) for one in error.errors(include_url=False)]
            raise ToolError(f"wrong arguments for {self.name}: {'; '.join(lines)}") from error

    async def _call(self, bound: dict[str, Any]) -> Any:
        if self._lock is None:
            return await self._call_now(bound)
        async with self._lock:
            return await self._call_now(bound)

    async def _call_now(self, bound: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.fn):
            return await self.fn(**bound)
        result = await in_thread(functools.partial(self.fn, **bound))
        return await result if inspect.isawaitable(result) else result


class MethodTool(FunctionTool):
    """A method of an object that belongs to one episode. Its schema is made once; `bound_to` gives
    the tool of another episode's object."""

    def bound_to(self, obj: object, lock: asyncio.Lock) -> MethodTool:
        """The method of the same name of `obj`. Calls of tools that share the `lock` take turns."""
        bound = copy.copy(self)
        bound.fn, bound._lock = getattr(obj, self.name), lock
        return bound


def bind_tools(tools: Sequence[Tool], obj: object) -> list[Tool]:
    """The tools of one episode: methods are those of `obj`, and everything else is shared."""
    lock = asyncio.Lock()
    return [one.bound_to(obj, lock) if isinstance(one, MethodTool) else one for one in tools]


def function_tool(fn: Callable[..., Any], *, name: str | None = None) -> FunctionTool:
    """`fn` as a tool, named like the function. `ValueError` for a signature that cannot be one."""
    return FunctionTool(fn, name or str(getattr(fn, "__name__", type(fn).__name__)))


def method_tools(obj: object) -> list[MethodTool]:
    """The public methods of `obj` as tools, without `reset`, `step`, `close` and whatever is called
    with an underscore. They share the object, so one call waits for the other."""
    lock = asyncio.Lock()
    names = [name for name in dir(type(obj)) if name[0] != "_" and name not in NOT_TOOLS]
    return [
        MethodTool(getattr(obj, name), name, lock)
        for name in names
        if not isinstance(inspect.getattr_static(type(obj), name), property)
        and inspect.isroutine(getattr(obj, name))
    ]


def _parameters(
    fn: Callable[..., Any], name: str
) -> tuple[dict[str, inspect.Parameter], str | None]:
    """The parameters that the model may give, with resolved annotations, and the parameter for the
    context."""
    if not name.replace("-", "_").isidentifier():
        raise ValueError(f"tool name {name!r}: use letters, digits, _ and -, as in `look_up`")
    try:
        hints = typing.get_type_hints(_annotated(fn), include_extras=True)
    except NameError as error:
        raise ValueError(
            f"tool {name}: an annotation names what its module does not hold ({error}): import it "
            "at the top of the module, not under TYPE_CHECKING"
        ) from error
    found: dict[str, inspect.Parameter] = {}
    context_name = None
    for one in inspect.signature(fn).parameters.values():
        if one.name == "self":
            raise ValueError(
                f"tool {name}: its `self` would have to come from the model; name a method in the "
                "body of its own class, or of an object (game.look)"
            )
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ValueError(
                f"tool {name}: parameter {one} cannot be given by name; give the function "
                "parameters that can"
            )
        hint = hints.get(one.name, Any)
        if hint is ToolContext:
            context_name = one.name
        else:
            found[one.name] = one.replace(annotation=hint)
    return found, context_name


def _annotated(fn: Callable[..., Any]) -> Any:
    """The object that holds the annotations: the function inside a partial, the method of a
    callable."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else type(fn).__call__


def _adapter(fn: Callable[..., Any], name: str, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """pydantic's validator of a dict of the function's arguments."""
    # Here: it is slow, and other tools need none.
    from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter
    from typing_extensions import TypedDict  # pydantic wants this one below Python 3.12

    texts = {one.arg_name: one.description for one in _docstring(fn).params}
    annotated: Any = Annotated  # its arguments are values here, which a type checker cannot follow
    fields: dict[str, Any] = {}
    for key, one in parameters.items():
        is_optional = one.default is not inspect.Parameter.empty
        extra = {"default": one.default} if is_optional and _is_json(one.default) else None
        note = Field(description=texts.get(key), json_schema_extra=extra)
        hint = annotated[one.annotation, note]
        fields[key] = NotRequired[hint] if is_optional else hint
    # A dict and not a model: its keys may be called like a model's own methods.
    make: Any = TypedDict
    record = make(name, fields)
    record.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    try:
        return TypeAdapter(record)
    except PydanticUserError as error:
        raise ValueError(
            f"tool {name}: a parameter has a type that cannot be read from JSON: {error.message}"
        ) from error


def _docstring(fn: Callable[..., Any]) -> Any:
    import docstring_parser  # here: other tools need none

    return docstring_parser.parse(inspect.getdoc(_annotated(fn)) or "")


def _description(fn: Callable[..., Any]) -> str:
    doc = _docstring(fn)
    return "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)


def _without_titles(schema: Any, is_properties: bool = False) -> Any:
    """A JSON schema without the titles that pydantic makes of names: tokens that say nothing."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value, key == "properties" and not is_properties)
            for key, value in schema.items()
            if is_properties or key != "title" or not isinstance(value, str)
        }
    return [_without_titles(one) for one in schema] if isinstance(schema, list) else schema


def _wrong(error: Mapping[str, Any], names: list[str]) -> str:
    """One error of pydantic's in words for the model."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{place!r} is missing"
    if error["type"] == "extra_forbidden":
        return f"there is no {place!r}, only {', '.join(names) or 'no arguments at all'}"
    shown = json.dumps(error["input"], ensure_ascii=False, default=str)
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[:MAX_SHOWN_CHARS] + "..."
    return f"{place!r}: {error['msg']}, not {shown}"


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    from pydantic_core import to_jsonable_python  # here: it is slow, and other tools need none

    return json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)


def _as_tool_error(error: BaseException) -> ToolError:
    name = type(error).__name__
    return ToolError(f"{name}: {error}" if str(error) else name)


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in a daemon thread of its own: one that hangs keeps neither the others of a pool
    waiting nor the process from ending."""
    loop = asyncio.get_running_loop()
    variables = contextvars.copy_context()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if not done.done():  # given up at the time limit
            done.set_result((value, error))

    def work() -> None:
        value, raised = None, None
        try:
            value = variables.run(call)
        except BaseException as error:  # handed over: raised again where the call is awaited
            raised = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, value, raised)

    threading.Thread(target=work, daemon=True, name="tool").start()
    value, raised = await done
    if raised is not None:
        raise raised
    return value
