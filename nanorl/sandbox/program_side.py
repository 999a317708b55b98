"""The program's end of a graded test: imports its modules, makes calls, says what came of them.

Runs in a process of its own beside the tests' (tests_side.py), with nothing of theirs in it: it is
sent names, arguments and numbers of objects that stay here. It is trusted with nothing: the code
that it runs may take it over, and can then say what it could have returned.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import io
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from nanorl.sandbox import plain
from nanorl.sandbox.program import exit_now

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__{one.__name__}__": one for one in (len, bool, str, repr, iter, hash, int, float, abs)},
    **{
        f"__{name}__": getattr(operator, name)
        for name in ("contains", "getitem", "setitem", "delitem", "eq", "lt", "le", "gt", "ge")
    },
    **{f"__{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "neg")},
}
"""What the tests may have done with an object beside calling its methods."""
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Program(plain.Peer):
    """Answers the tests until they end."""

    def __init__(self, channel: Any, folder: str) -> None:
        super().__init__(channel)
        self._folder = folder
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id: those of `_objects` are never freed
        self._held: set[int] = set()  # ids of those that the tests hold as objects
        self._callbacks: dict[int, int] = {}

    def serve(self) -> NoReturn:
        while True:
            verb, *rest = self._receive()
            self._send(["reply", *self.answer(verb, rest)])

    def gone(self, why: str) -> NoReturn:
        exit_now(0)

    def answer(self, verb: str, rest: list[Any]) -> list[Any]:
        """[what came of it, what was printed, the arguments as they are now]."""
        arguments: list[Any] = []
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                said = getattr(self, f"_{verb}")(arguments, *rest)
            except BaseException as error:  # SystemExit too: what code raises is its answer
                said = self._raised(error)
        return [said, printed.getvalue(), arguments]

    def _load(self, _: list[Any], name: str, location: str, more_paths: list[str]) -> Any:
        sys.path.extend(path for path in more_paths if path not in sys.path)
        try:
            module = _from_file(name, location) if location else importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                return ["missing"]
            raise
        names = getattr(module, "__all__", None) or [n for n in vars(module) if n[:1] != "_"]
        return ["module", self._number(module), hasattr(module, "__path__"), list(names)]

    def _get(self, _: list[Any], number: int, name: str, is_kept: bool) -> Any:
        return self._said(getattr(self._objects[number], name), is_kept)

    def _set(self, _: list[Any], number: int, name: str, value: Any) -> Any:
        setattr(self._objects[number], name, plain.decode(value, self._known))
        return ["value", None]

    def _call(self, after: list[Any], number: int, args: Any, named: Any, is_kept: bool) -> Any:
        given = plain.decode(args, self._known), plain.decode(named, self._known)
        said = self._said(self._objects[number](*given[0], **given[1]), is_kept)
        changed = [plain.encode(each, self._as_argument) for each in given]
        after += changed if changed != [args, named] else []
        return said

    def _special(self, _: list[Any], name: str, number: int, args: Any, is_kept: bool) -> Any:
        given = plain.decode(args, self._known)
        return self._said(_FUNCTIONS[name](self._objects[number], *given), is_kept)

    def _next(self, _: list[Any], number: int) -> Any:
        try:
            return self._said(next(self._objects[number]), False)
        except StopIteration:
            return ["end"]

    def _is(self, _: list[Any], number: int, kind: int) -> Any:
        return ["value", isinstance(self._objects[number], self._objects[kind])]

    def _said(self, value: Any, is_kept: bool) -> list[Any]:
        """A value by its content; what is not plain by a number, with what can be done to it."""
        try:
            return ["value", plain.encode(value)]
        except (TypeError, ValueError, RecursionError) as error:
            why = str(error)
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", value.__name__, *self._kinds(value)]
        if id(value) in self._held or (is_kept and not isinstance(value, _CODE)):
            self._held.add(id(value))
            return ["object", self._number(value), type(value).__name__]
        if callable(value):
            return ["function", self._number(value)]
        if isinstance(value, Iterator | type({}.keys()) | type({}.values()) | type({}.items())):
            return ["items", self._number(iter(value))]
        return ["refused", why]

    def _raised(self, error: BaseException) -> list[Any]:
        """Its class, and what it was made with as far as that is plain."""
        details = []
        for each in (error.args, vars(error)):
            try:
                details.append(plain.encode(each))
            except (TypeError, ValueError, RecursionError):
                details.append(plain.encode(type(each)()))
        try:
            text = str.__str__(str(error))
        except Exception as other:  # its own __str__ fails: that is no message
            text = type(other).__name__
        return ["raises", *self._kinds(type(error)), text, *details]

    def _kinds(self, kind: type[BaseException]) -> tuple[list[int], str]:
        """Numbers of an exception's classes, and the name of the first that is Python's own."""
        own = [each for each in kind.__mro__ if vars(builtins).get(each.__name__) is each]
        theirs = [self._number(each) for each in kind.__mro__ if each not in own]
        return theirs, own[0].__name__

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _known(self, name: str, rest: list[Any]) -> Any:
        if name == "object":
            return self._objects[rest[0]]
        if name == "builtin":
            return getattr(builtins, rest[0])
        number = rest[0]

        def callback(*args: Any, **named: Any) -> Any:
            given = plain.encode(list(args), self._as_argument), plain.encode(named)
            kind, said = self.ask("callback", number, *given)
            if kind == "value":
                return plain.decode(said, self._known)
            raise getattr(builtins, said, RuntimeError)("raised by what the test handed in")

        self._number(callback)
        self._callbacks[id(callback)] = number
        return callback

    def _as_argument(self, value: Any) -> list[Any]:
        """Encode what is not plain in an argument, under the name that it came with."""
        if id(value) in self._callbacks:
            return ["callback", self._callbacks[id(value)]]
        if plain.is_builtin(value):
            return ["builtin", value.__name__]
        return ["object", self._number(value)]


def _from_file(name: str, location: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None and spec.loader is not None, f"{location} is no module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
