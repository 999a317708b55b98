"""Runs inside the sandbox for tests.py, in two programs that never meet: candidate and grader.

candidate   has the policy's code and the arguments of calls; it writes what the calls returned
grader      has the tests and what the candidate wrote; it writes the verdict, and which calls it
            still wants to know the results of

Between them travel plain values as JSON, rebuilt from their content: an object that claims to equal
everything does not survive the way. Standard library only; Python 3.8 or newer.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
from typing import Any

INPUT = "input.json"
_MAX_CALLS = 2000
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Any:
    """A plain value as JSON; TypeError for one that is not plain."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__repr__(value)]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", encode(value.real), encode(value.imag)]
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    if isinstance(value, dict):
        return ["dict", *([encode(key), encode(one)] for key, one in dict.items(value))]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *(encode(one) for one in kind.__iter__(value))]
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode(data: Any) -> Any:
    """The value that was encoded; ValueError for anything else."""
    if data is None or isinstance(data, (bool, str)):
        return data
    if not isinstance(data, list) or not data:
        raise ValueError(f"no value: {data!r:.80}")
    name, *rest = data
    if name == "int":
        return int(rest[0])
    if name == "float":
        return float(rest[0])
    if name == "complex":
        return complex(decode(rest[0]), decode(rest[1]))
    if name == "bytes":
        return bytes.fromhex(rest[0])
    if name == "dict":
        return {decode(key): decode(one) for key, one in rest}
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(one) for one in rest)
    raise ValueError(f"no value: {data!r:.80}")


class Unknown:
    """The result of a call that nobody has made yet: it lets the tests run on, to see what they
    call. A pass in which one of them appeared proves nothing."""

    def __getattr__(self, name: str) -> Unknown:
        return self

    def __getitem__(self, index: Any) -> Unknown:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Unknown:
        return self

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    __index__ = __int__
    __len__ = __int__

    def __hash__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def __contains__(self, one: object) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return True

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def _same(self, *others: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _same
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __abs__ = __round__ = __invert__ = _same


class Grader:
    """Runs the tests against the results that are known."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._known = given["known"]
        self._wanted: dict[str, None] = {}

    def judge(self) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "tests"}
        error = ""
        try:
            exec(compile(self._given["helpers"], "helpers", "exec"), names)
            names[self._given["entry_point"]] = self._candidate
            exec(compile(self._given["tests"], "tests", "exec"), names)
            if callable(names.get("check")):
                names["check"](self._candidate)
        except BaseException as raised:  # a failed assertion, and whatever a result led to
            error = f"{type(raised).__name__}: {raised}"
        is_passed = not error and not self._wanted and bool(self._known)
        return {"is_passed": is_passed, "wanted": list(self._wanted), "error": error[:500]}

    def _candidate(self, *args: Any, **kwargs: Any) -> Any:
        call = json.dumps([encode(list(args)), encode(kwargs)])
        if call not in self._known:
            self._wanted[call] = None
            if len(self._wanted) >= _MAX_CALLS:
                raise RuntimeError("the tests make too many calls")
            return Unknown()
        kind, content = self._known[call]
        if kind == "value":
            return decode(content)
        raised = getattr(builtins, str(content), None)
        # In a test's `for got in map(f, ...)` an end would end the test, in silence.
        is_end = raised in (StopIteration, StopAsyncIteration)
        if isinstance(raised, type) and issubclass(raised, Exception) and not is_end:
            raise raised("raised by the code under test")
        raise RuntimeError("raised by the code under test")


def candidate(given: dict[str, Any]) -> list[Any]:
    """Run each of the calls, and return what each returned or raised."""
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(given["helpers"], "helpers", "exec"), names)
    try:
        code = compile(given["source"], "solution", "exec")
    except SyntaxError:  # the rest of the function that the prompt began
        code = compile(given["helpers"] + given["source"], "solution", "exec")
    exec(code, names)
    function = names[given["entry_point"]]
    return [_outcome(function, *json.loads(call)) for call in given["calls"]]


def _outcome(function: Any, args: Any, kwargs: Any) -> Any:
    try:
        return ["value", encode(function(*decode(args), **decode(kwargs)))]
    except Exception as error:  # what the judged code raises is its answer
        return ["raises", type(error).__name__]


def main() -> None:
    """Read the input, write the output; what the code prints goes nowhere."""
    with open(INPUT) as file:
        given = json.load(file)
    try:
        output = os.dup(1)
    except OSError:  # WebAssembly knows no second number of a stream
        output = 1
    sys.stdout = io.StringIO()
    is_grader = "tests" in given
    result = Grader(given).judge() if is_grader else candidate(given)
    text = json.dumps(result).encode()
    while text:
        text = text[os.write(output, text) :]


if __name__ == "__main__":
    main()
