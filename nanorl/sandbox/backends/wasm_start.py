"""The first program of an instance: loads what programs often use, asks for one, and becomes it.

It runs inside WebAssembly, in another version of Python, as text (wasm_guest.py); standard library
only. Opening the order's path is how the process around it knows that all is loaded: what comes
after that happens in a fork.
"""

from __future__ import annotations

import gc
import io
import json
import linecache
import os
import random
import sys
import traceback
import types
from typing import Any, NoReturn

PRELOADED = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "heapq", "itertools", "math", "operator", "re", "statistics", "string"),
    *("textwrap", "time", "typing"),
)


def main(program_source: str, order_path: str) -> NoReturn:
    program = _load_program(program_source)
    for name in PRELOADED:
        __import__(name)
    try:
        os.listdir("/nothing there")
    except OSError as error:  # what a traceback needs is loaded as well
        traceback.print_exception(error, file=io.StringIO())
    gc.collect()
    gc.freeze()
    with open(order_path, "rb") as file:
        order = json.load(file)
    random.seed(0)
    os.chdir(order["folder"])
    _become(program, order)


def _load_program(source: str) -> dict[str, Any]:
    """program.py, which ends a program as the interpreter would, without the package around it."""
    protocol = types.ModuleType("nanorl.sandbox.protocol")
    protocol.__dict__.update(PAYLOAD=None, PROGRAM_NAME="program.py")
    sys.modules[protocol.__name__] = protocol
    found: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program", "exec"), found)
    del sys.modules[protocol.__name__]
    return found


def _become(program: dict[str, Any], order: dict[str, Any]) -> NoReturn:
    code = order["code"].encode("utf-8", "surrogateescape")
    if order["is_call"]:
        sys.path.append(order["folder"])
        _call(program, code)
    sys.path.insert(0, order["folder"])
    sys.argv[:] = [order["name"]]
    if order["is_shown"]:  # its text is in no file
        lines = code.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[order["name"]] = (len(code), None, lines, order["name"])
        sys.excepthook = traceback.print_exception
    program["execute"](code, order["name"])
    raise AssertionError("a program ends its process")


def _call(program: dict[str, Any], code: bytes) -> NoReturn:
    """As `_run_call` of jobs.py: `result`, or the exception's name, as JSON."""
    output, sys.stdout = sys.stdout, io.StringIO()
    names: dict[str, Any] = {"__name__": "__call__"}
    try:
        exec(compile(code, "<call>", "exec", dont_inherit=True), names)
        said = json.dumps({"value": names["result"]}, sort_keys=True)
    except BaseException as error:  # the judged code may raise SystemExit too
        program["report"](error)
        said = json.dumps({"raises": type(error).__name__})
    output.write(said)
    output.flush()
    os._exit(0)
