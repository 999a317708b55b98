"""The tests' end of a graded test: modules of the program that are no more than questions to it.

    from stats import mean     # a module here that has nothing but the names of the real one
    mean([1, 2]) == 1.5        # called in the program's process; 1.5 is plain and comes as itself

What a function returns is a plain value (plain.py), an iterator of such, or a function again; it is
compared here, where the program's code never runs. Anything else is refused with a TypeError that
says so: an object whose class says yes to everything passes nothing.
A name that begins with a capital letter is a class, by the tests' own text: what it returns is
held as an object of the program's. Its methods return plain values and objects that are held
already; its operators may return new ones. Such an object equals no plain value. Of everything else
that it is asked its class decides: there is nothing else that could.
Arguments are plain values, held objects, and functions of the tests' own; what the program changes
in lists, dicts, sets and bytearrays is changed here, too. What it prints is printed here.
Left out: classes of the tests that inherit from the program's, replaced names (`mock.patch` of
modules it has imported), an input that the tests replace, and the identity of what is returned.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from nanorl.sandbox import plain, protocol
from nanorl.sandbox.program import exit_now

_KEPT = frozenset(f"__{one}__" for one in ("add", "sub", "mul", "truediv", "neg", "abs"))
_ASKED = frozenset(
    f"__{one}__"
    for one in (
        *("len", "bool", "str", "repr", "iter", "hash", "int", "float", "lt", "le", "gt", "ge"),
        *("contains", "getitem", "setitem", "delitem"),
    )
)
# In a test's `for got in map(f, ...)` they would end the loop, and with it the test, in silence.
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)


class Tests(plain.Peer):
    """Asks the program in the name of the tests, of which this is the text."""

    def __init__(self, channel: Any, source: bytes) -> None:
        super().__init__(channel)
        self._wanted = _names_left_open(source)
        self._objects: dict[int, Held] = {}
        self._errors: dict[int, type[BaseException]] = {}
        self._callbacks: list[Callable[..., Any]] = []
        self._own_paths = [*sys.path]

    def gone(self, why: str) -> NoReturn:
        # Not an exception, which the test might expect.
        os.write(2, f"the program {why} before the test did".encode())
        exit_now(1)

    def order(self, verb: str, *rest: Any) -> list[Any]:
        """Give an order and return what came of it; prints what the program printed."""
        return self._order(verb, rest)[0]

    def _order(self, verb: str, rest: Any) -> tuple[list[Any], list[Any]]:
        reply = self.ask(verb, *rest)
        try:
            (kind, *said), printed, arguments = reply
            sys.stdout.write(printed)
            error = self._raised(*said) if kind == "raises" else None
        except (ValueError, TypeError):
            self.gone("says what is no answer")
        if error is not None:
            raise error
        return [kind, *said], arguments

    def module(self, name: str, location: str = "") -> Module | None:
        """The program's module of that name; None where it has none."""
        more = [path for path in sys.path if path not in self._own_paths]
        said = self.order("load", name, location, more)
        if said[0] != "module":
            return None
        number, is_package, names = said[1:]
        shown = [one for one in map(str, names) if one in self._wanted]
        return Module(name, self, number, bool(is_package), shown)

    def get(self, number: int, name: str) -> Any:
        """An attribute of something of the program's."""
        is_class = _is_class(name)
        return self._value(self.order("get", number, name, is_class), name, is_class)

    def put(self, number: int, name: str, value: Any) -> None:
        """Replace an attribute of an object."""
        self.order("set", number, name, plain.encode(value, self._argument))

    def call(self, number: int, name: str, args: Any, named: Any) -> Any:
        """Call what the program has under `number`, and return its value. Arguments that the call
        has changed are changed here too."""
        is_class = _is_class(name)
        sent = [plain.encode(each, self._argument) for each in (list(args), named)]
        said, arguments = self._order("call", (number, *sent, is_class))
        if arguments:
            now = [self._read(each) for each in arguments]
            for old, new in zip(args, now[0], strict=True):
                _renew(old, new)
            for key in named:
                _renew(named[key], now[1].get(key))
        return self._value(said, f"{name}()", is_class)

    def special(self, name: str, held: Held, args: Any) -> Any:
        """Return what an operator or a built-in function makes of an object."""
        sent = plain.encode(list(args), self._argument)
        said = self.order("special", name, held.__number__, sent, name in _KEPT)
        return self._value(said, name, name in _KEPT)

    def next(self, number: int) -> Any:
        """The next of an iterator's values."""
        said = self.order("next", number)
        if said == ["end"]:
            raise StopIteration
        return self._value(said, "an iterator", False)

    def answer(self, verb: str, rest: list[Any]) -> list[Any]:
        """The program calls what the test handed it: the only order that it can give."""
        if verb != "callback":
            self.gone("asks what it may not")
        number, args, named = rest
        function = self._callbacks[number]
        try:
            given = self._read(args), self._read(named)
            return ["value", plain.encode(function(*given[0], **given[1]), self._argument)]
        except Exception as error:  # what the test's callback raises is its answer
            return ["raises", type(error).__name__]

    def _value(self, said: list[Any], what: str, is_kept: bool) -> Any:
        kind, *rest = said
        if kind == "value":
            return self._read(rest[0])
        if kind == "function":
            return (Class if is_kept else Routine)(self, rest[0], what)
        if kind == "module":  # one that the program's imports: Python's own are here as well
            return importlib.import_module(str(rest[0]))
        if kind == "items":
            return Items(self, rest[0])
        if kind == "exception" and is_kept:
            return self._error(*rest)
        if kind == "object" and (is_kept or rest[0] in self._objects):
            return self._objects.setdefault(rest[0], Held(self, rest[0], rest[1]))
        why = rest[0] if kind == "refused" else "an object of the program's own is no plain value"
        raise TypeError(f"{what} cannot be compared: {why}")

    def _read(self, data: Any) -> Any:
        try:
            return plain.decode(data, self._known)
        except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError):
            self.gone("says what is no value")

    def _known(self, name: str, rest: list[Any]) -> Any:
        if name == "builtin":
            return getattr(builtins, rest[0])
        return self._callbacks[rest[0]] if name == "callback" else self._objects[rest[0]]

    def _argument(self, value: Any) -> list[Any]:
        """Encode what the program is handed that is not plain; TypeError for what cannot be."""
        if isinstance(value, Held | Routine | Items):
            return ["object", value.__number__]
        if plain.is_builtin(value):
            return ["builtin", value.__name__]
        if callable(value):
            self._callbacks.append(value)
            return ["callback", len(self._callbacks) - 1]
        raise TypeError(f"a {type(value).__name__} cannot be handed to the program")

    def _error(self, name: str, numbers: list[int], builtin: str) -> type[BaseException]:
        """A class here for an exception's class there."""
        base = next((self._errors[n] for n in numbers if n in self._errors), None)
        if base is None or numbers[0] not in self._errors:
            kind = type(str(name), (base or _builtin_error(builtin),), {"__str__": _message})
            self._errors[numbers[0]] = kind
        return self._errors[numbers[0]]

    def _raised(
        self, numbers: list[int], builtin: str, message: str, args: Any, details: Any
    ) -> BaseException:
        """The exception that the program raised, of the nearest class that the test knows."""
        known = [self._errors[n] for n in numbers if n in self._errors]
        kind = known[0] if known else _builtin_error(builtin)
        try:
            error = kind(*self._read(args))
        except (TypeError, ValueError):  # one that wants other arguments
            error = RuntimeError(str(message))
        if known:
            vars(error).update(self._read(details), __said__=str(message))
        return error


class Routine:
    """A function of the program's. It can be called, and nothing else."""

    def __init__(self, tests: Tests, number: int, name: str) -> None:
        self.__tests__, self.__number__, self.__name__ = tests, number, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__tests__.call(self.__number__, self.__name__, args, named)


class Class(Routine):
    """A class of the program's, by the word of the tests' text."""

    def __getattr__(self, name: str) -> Any:
        return self.__tests__.get(self.__number__, name)

    def __instancecheck__(self, value: Any) -> bool:
        if not isinstance(value, Held):
            return False
        said = self.__tests__.order("is", value.__number__, self.__number__)
        return said == ["value", True]


class Held:
    """An object of a class of the program's."""

    def __init__(self, tests: Tests, number: int, name: str) -> None:
        vars(self).update(__tests__=tests, __number__=number, __kind__=name)

    def __getattr__(self, name: str) -> Any:
        return self.__tests__.get(self.__number__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__tests__.put(self.__number__, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__tests__.call(self.__number__, "object", args, named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and bool(self.__tests__.special("__eq__", self, [other]))

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        return self.__getattr__("__exit__")(None if kind is None else str(error), None, None)


def _operator(name: str) -> Callable[..., Any]:
    def asked(self: Held, *args: Any) -> Any:
        return self.__tests__.special(name, self, args)

    return asked


for _name in _KEPT | _ASKED:
    setattr(Held, _name, _operator(_name))


class Items:
    """An iterator of the program's, over plain values."""

    def __init__(self, tests: Tests, number: int) -> None:
        self.__tests__, self.__number__ = tests, number

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> Any:
        return self.__tests__.next(self.__number__)


class Module(types.ModuleType):
    """A module of the program's."""

    def __init__(
        self, name: str, tests: Tests, number: int, is_package: bool, names: list[str]
    ) -> None:
        super().__init__(name)
        vars(self).update(__tests__=tests, __number__=number, __all__=names)
        self.is_package_ = is_package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__tests__.get(self.__number__, name)


class Finder:
    """Finds modules for `import`: those of Python and of the tests here, others in the program."""

    def __init__(self, tests: Tests) -> None:
        self._tests = tests
        self._paths = [*sys.path]
        self._locate = importlib.util.spec_from_file_location
        self._found: dict[str, Module] = {}

    def install(self) -> None:
        """First in the line, so that no path that a test adds leads to the program's text."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        importlib.util.spec_from_file_location = self._from_file  # type: ignore[assignment]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parent = sys.modules.get(name.rpartition(".")[0])
        is_own = name.partition(".")[0] in sys.stdlib_module_names
        if is_own or (parent is not None and not isinstance(parent, Module)):
            return None
        if parent is None and (own := importlib.machinery.PathFinder.find_spec(name, self._paths)):
            return own
        return self._spec(name, self._tests.module(name))

    def _from_file(self, name: str, location: Any = None, **more: Any) -> Any:
        if str(location).startswith(f"{protocol.TESTS}/"):
            return self._locate(name, location, **more)
        return self._spec(name, self._tests.module(name, os.path.abspath(location)))

    def _spec(self, name: str, module: Module | None) -> Any:
        if module is None:
            return None
        self._found[name] = module
        is_package = module.is_package_
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Module:
        return self._found[spec.name]

    def exec_module(self, module: Module) -> None:
        """It has been run where it belongs."""


def _names_left_open(source: bytes) -> set[str]:
    """Names that a test's text uses and that neither it nor Python defines: all that `from answer
    import *` may bring, or a program's own `abs` would be the one that the test compares with."""
    used: set[str] = set()
    defined = set(vars(builtins))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return used - defined


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _builtin_error(name: str) -> type[BaseException]:
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, BaseException):
        return RuntimeError
    return RuntimeError if issubclass(kind, _ENDS) else kind


def _message(error: BaseException) -> str:
    return str(vars(error).get("__said__", error.args))


def _renew(old: Any, new: Any) -> Any:
    """Change the test's own object as a call has changed the argument, and return it; `new` where
    it cannot be changed in place."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        old[:] = [_renew(old[n], each) if n < len(old) else each for n, each in enumerate(new)]
    elif isinstance(old, dict):
        changed = {key: _renew(old.get(key), each) for key, each in new.items()}
        old.clear()
        old.update(changed)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    else:
        return new
    return old
