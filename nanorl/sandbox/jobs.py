"""What a confined process does for a session: run a program, a command, a test, or move files.

Like program.py this is trusted with nothing but itself: by now the process has no rights beyond
those of a program, so a path that leads astray leads to what a program could reach anyway. The
session's folder comes onto the import path only here, and only where a program is to run.

    PYTHON, SHELL, REPL   what an agent's tools ask for
    READ, WRITE           one file
    PACK, UNPACK          the whole folder as a tar archive
    TEST, CALL, VERIFY    grading (grading.py says what each can promise)
"""

from __future__ import annotations

import _socket
import ast
import builtins
import io
import json
import linecache
import os
import signal
import socket
import stat
import sys
import tarfile
import traceback
import types
import unittest
from contextlib import suppress
from typing import Any, NoReturn

from nanorl.sandbox import protocol
from nanorl.sandbox.confine import Confinement, close_from
from nanorl.sandbox.program import (
    execute,
    exit_now,
    flush,
    leave,
    new_main,
    read_payload,
    renew_streams,
    report,
)
from nanorl.sandbox.protocol import DONE, GO, receive
from nanorl.sandbox.worker import connect, limit_cpu, take_order

_PROGRAM = "<program>"
_LEFT = b"\nthe script left processes running"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of every class that Python code defines


def main(confinement: Confinement, sock: _socket.socket) -> None:
    """The whole life of one confined process: takes one order and carries it out."""
    message, descriptors = take_order(confinement, sock)
    _, limit_s, job, _ = GO.unpack(message)
    if job == protocol.REPL:
        serve_repl(descriptors[0], confinement.folder)
    limit_cpu(limit_s)
    parts = dict(read_payload(descriptors[0]))
    connect(descriptors)
    perform(job, parts, confinement.folder)


def perform(job: int, parts: dict[str, bytes], folder: str) -> NoReturn:
    if job == protocol.PYTHON:
        _run_python(parts["code"], folder)
    if job == protocol.SHELL:
        _run_shell(parts["command"])
    if job == protocol.TEST:
        _run_test(parts, folder)
    if job == protocol.CALL:
        _run_call(parts["code"], folder)
    if job == protocol.VERIFY:
        _verify(parts["command"])
    try:
        if job == protocol.READ:
            _read(parts)
        elif job == protocol.WRITE:
            _write(parts)
        elif job == protocol.PACK:
            _pack(folder)
        else:
            os.chdir(folder if job == protocol.UNPACK else protocol.TESTS)
            _unpack(parts["archive"], is_tests=job == protocol.LAY_TESTS)
    except (OSError, ValueError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        os.write(2, reason.encode(errors="replace"))
        exit_now(1)
    exit_now(0)


# Programs.


def _run_python(code: bytes, folder: str) -> NoReturn:
    sys.path[0] = folder
    _show_lines(_PROGRAM, code)
    execute(code, _PROGRAM)


def _show_lines(name: str, code: bytes) -> None:
    """Lets tracebacks show the lines of a text that is in no file."""
    lines = code.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[name] = (len(code), None, lines, name)
    sys.excepthook = traceback.print_exception


def _run_shell(command: bytes) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and children inherit that
    shell = b"/bin/bash" if os.path.exists("/bin/bash") else b"/bin/sh"
    try:
        os.execv(shell, [shell, b"-c", command])
    except (OSError, ValueError) as error:  # too long, or a null byte
        os.write(2, str(error).encode())
        exit_now(126)


def serve_repl(talk: int, folder: str) -> NoReturn:
    """Runs one piece of code after the other in the same `__main__`, for as long as it lives."""
    os.dup2(talk, 3)
    close_from(4)
    channel = socket.socket(fileno=3)
    sys.path[0] = folder
    namespace = new_main().__dict__
    count, streams = 0, _streams()
    while True:
        message, descriptors = receive(channel)
        if not message:
            leave(0)
        run_id = GO.unpack(message)[0]
        code = dict(read_payload(descriptors[0]))["code"]
        null = os.open("/dev/null", os.O_RDWR)
        for target, descriptor in enumerate((null, *descriptors[1:])):
            os.dup2(descriptor, target)
        close_from(4)
        if _are_changed(streams):
            renew_streams()
            streams = _streams()
        count += 1
        exit_code = _run_cell(code, f"<cell {count}>", namespace)
        flush(sys.stdout)
        flush(sys.stderr)
        null = os.open("/dev/null", os.O_RDWR)
        for target in (1, 2):  # what it does from now on is nobody's output
            os.dup2(null, target)
        os.close(null)
        channel.send(DONE.pack(run_id, exit_code))


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr


def _are_changed(streams: tuple[Any, ...]) -> bool:
    """True if the last piece of code replaced, closed or took apart a standard stream."""
    try:
        return streams != _streams() or any(stream.closed for stream in streams)
    except ValueError:  # detached
        return True


def _run_cell(code: bytes, name: str, namespace: dict[str, Any]) -> int:
    """Runs one piece; the value of an expression at its end is shown, as at Python's prompt."""
    _show_lines(name, code)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), namespace))
    except SystemExit as error:
        leave(report(error))
    except BaseException as error:
        return report(error) & 0xFF
    return 0


# Files.


def _inside(parts: dict[str, bytes]) -> str:
    """The real path, if it is inside of the folder that the host allows."""
    root, path = parts["root"].decode(), os.fsdecode(parts["path"])
    real = os.path.realpath(os.path.join(root, path))
    if real != root and not real.startswith(root + "/"):
        raise ValueError(f"the path is outside of the working folder {root}")
    return real


def _read(parts: dict[str, bytes]) -> None:
    descriptor = os.open(_inside(parts), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError("it is a folder or no regular file")
    while chunk := os.read(descriptor, 1 << 20):
        _write_all(1, chunk)


def _write(parts: dict[str, bytes]) -> None:
    path = _inside(parts)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError("it is no regular file")
    _write_all(descriptor, parts["data"])


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _pack(folder: str) -> None:
    """The folder as a tar stream; what the program made unreadable, and sockets, are left out."""
    with (
        open(1, "wb", closefd=False) as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, errorlevel=0) as archive,
    ):
        for parent, folders, files in os.walk(folder):
            for name in sorted(folders) + sorted(files):
                path = os.path.join(parent, name)
                try:
                    archive.add(path, os.path.relpath(path, folder), recursive=False)
                except PermissionError:
                    continue


def _unpack(data: bytes, is_tests: bool) -> None:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(".", filter="tar") if hasattr(tarfile, "tar_filter") else (
            archive.extractall(".")
        )
    if is_tests:
        os.makedirs(f"{protocol.LOGS}/verifier")


# Grading.


def _private_output() -> int:
    """Takes standard output away from the program: what it prints goes where errors go."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def _run_call(code: bytes, folder: str) -> NoReturn:
    """Runs the code and reports its `result`, or the exception's name, as JSON. No verdict."""
    output = _private_output()
    sys.path.append(folder)
    namespace: dict[str, Any] = {"__name__": "__call__"}
    try:
        exec(compile(code, "<call>", "exec", dont_inherit=True), namespace)
        said = json.dumps({"value": namespace["result"]}, sort_keys=True)
    except BaseException as error:
        report(error)
        said = json.dumps({"raises": type(error).__name__})
    _write_all(output, said.encode(errors="replace"))
    exit_now(0)


def _verify(command: bytes) -> NoReturn:
    """Runs a script; fails where it was killed, or where processes outlived it: they could still
    have written what it has just written."""
    pid = os.fork()
    if pid == 0:
        _run_shell(command)
    ended, status = 0, 0
    while ended != pid:
        ended, status = os.waitpid(pid, 0)
    others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}
    alive = [each for each in others if not _is_zombie(each)]
    if others:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    if os.WIFSIGNALED(status) or alive:
        os.write(2, b"\nthe script was killed" if os.WIFSIGNALED(status) else _LEFT)
        exit_now(1)
    exit_now(0)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _run_test(parts: dict[str, bytes], folder: str) -> NoReturn:
    """Runs one test function or method; only one that ran to its end reports the nonce."""
    output = _private_output()
    sys.dont_write_bytecode = True
    tree = _strict_equality(ast.parse(parts["source"]))
    unittest.TestCase.assertEqual = _assert_equal  # type: ignore[method-assign]
    trusted = _trusted_names(tree)
    # After the standard library: a module `unittest` in the folder is not what a test imports.
    sys.path[0] = protocol.TESTS
    sys.path.append(folder)
    module = types.ModuleType(parts["file"].decode().removesuffix(".py"))
    module.__dict__.update(__file__=f"{protocol.TESTS}/{parts['file'].decode()}", __same__=_same)
    sys.modules[module.__name__] = module
    try:
        exec(compile(tree, module.__file__ or "", "exec"), module.__dict__)
        _call_test(module, parts["name"].decode())
    except BaseException as error:
        report(error)
        exit_now(1)
    for owner, name, value in trusted:
        if owner.get(name) is not value:
            os.write(2, f"{name} of the standard library was replaced".encode())
            exit_now(1)
    _write_all(output, parts["nonce"])
    exit_now(0)


def _call_test(module: types.ModuleType, name: str) -> None:
    first, _, method = name.partition("::")
    subject = getattr(module, first)
    if not method:
        subject()
        return
    if not issubclass(subject, unittest.TestCase):
        getattr(subject(), method)()
        return
    result = unittest.TestResult()
    subject(method).run(result)
    problems = [*result.errors, *result.failures, *result.skipped]
    if problems or result.testsRun != 1 or result.expectedFailures:
        raise AssertionError(problems[0][1] if problems else "the test did not run")


def _trusted_names(tree: ast.AST) -> list[tuple[Any, str, Any]]:
    """(owner's names, name, value) of all that a test relies on, loaded before the program is."""
    owners: list[Any] = [vars(builtins), vars(unittest.TestCase)]
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] in sys.stdlib_module_names:
                owners.append(vars(__import__(name, fromlist=["_"])))
    return [(o, name, value) for o in owners for name, value in o.items() if callable(value)]


class _StrictEquality(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            same = ast.Name("__same__", ast.Load())
            call = ast.Call(same, [node.left, node.comparators[0]], [])
            if isinstance(node.ops[0], ast.Eq):
                return call
            return ast.UnaryOp(ast.Not(), call)
        return node


def _strict_equality(tree: ast.Module) -> ast.Module:
    """The test with `a == b` decided by `_same`."""
    return ast.fix_missing_locations(_StrictEquality().visit(tree))


def _same(left: Any, right: Any) -> bool:
    """`left == right`, except that a built-in value equals no object whose class decides equality
    in Python: that class could say yes to everything."""
    if _decides_itself(type(left)) != _decides_itself(type(right)):
        return False
    for kind in (list, tuple):
        if isinstance(left, kind) and isinstance(right, kind):
            return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    return bool(left == right)


_assert_equal_of_unittest = unittest.TestCase.assertEqual


def _assert_equal(self: unittest.TestCase, first: Any, second: Any, msg: Any = None) -> None:
    _assert_equal_of_unittest(self, first, second, msg)
    if not _same(first, second):
        self.fail("equal by the word of the folder's own class")


def _decides_itself(kind: type) -> bool:
    bases = type.__dict__["__mro__"].__get__(kind)  # not what a metaclass says they are
    owner = next(base for base in bases if "__eq__" in vars(base))
    return bool(owner.__flags__ & _HEAP_TYPE)
