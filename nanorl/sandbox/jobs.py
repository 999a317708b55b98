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
import io
import json
import linecache
import os
import signal
import socket
import stat
import sys
import tarfile
import time
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
from nanorl.sandbox.program_side import Program
from nanorl.sandbox.protocol import DONE, GO, receive
from nanorl.sandbox.stream_frames import write_all
from nanorl.sandbox.tests_side import Finder, Tests
from nanorl.sandbox.worker import connect, limit_cpu, take_order

_PROGRAM = "<program>"


def main(confinement: Confinement, sock: _socket.socket) -> None:
    """The whole life of one confined process: takes one order and carries it out."""
    _live(confinement, sock)


def main_of_grader(confinement: Confinement, sock: _socket.socket) -> None:
    """The same for a test, whose memory holds the right values, and for who waits for a script."""
    confinement.stand_apart()
    _live(confinement, sock)


def _live(confinement: Confinement, sock: _socket.socket) -> None:
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
        _run_test(parts)
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
    except BaseException as error:  # as at a prompt, also KeyboardInterrupt
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
        write_all(1, chunk)


def _write(parts: dict[str, bytes]) -> None:
    path = _inside(parts)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError("it is no regular file")
    write_all(descriptor, parts["data"])


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
    except BaseException as error:  # the judged code may raise SystemExit too
        report(error)
        said = json.dumps({"raises": type(error).__name__})
    write_all(output, said.encode(errors="replace"))
    exit_now(0)


def _verify(command: bytes) -> NoReturn:
    """Runs a script; fails where another than the script may have had the last word on its reward.

    Orphans come to this process, so that it knows when the last of them ended.
    """
    pid = os.fork()
    if pid == 0:
        _run_shell(command)
    ended, status, last_ns = 0, 0, 0
    while ended != pid:
        ended, status = os.waitpid(-1, 0)
        last_ns = last_ns if ended == pid else time.time_ns()
    if any(not _is_zombie(each) for each in _others()):
        last_ns = time.time_ns()
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            last_ns = time.time_ns()
    why = "the script was killed" if os.WIFSIGNALED(status) else _doubt(last_ns)
    os.write(2, f"\n{why}".encode())
    exit_now(1 if why else 0)


def _others() -> set[int]:
    """Processes in this namespace beside its init and this one."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _doubt(last_ns: int) -> str:
    """Why the reward need not be the script's word; empty: it must be.

    `last_ns`: when the last process was seen to end that was not the script's own child. A program
    that ran before the script wrote can still have kept it from writing.
    """
    folder = f"{protocol.LOGS}/verifier"
    try:
        mode = os.lstat(folder).st_mode
        found = [os.lstat(path) for path in protocol.REWARDS if os.path.lexists(path)]
        space = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if not stat.S_ISDIR(mode) or stat.S_IMODE(mode) & 0o300 != 0o300:
        return f"{folder} is no folder that the script can write to"
    if not (space.f_bavail and space.f_favail):
        return f"{folder} has no room for what the script writes"
    for one in found:
        if not stat.S_ISREG(one.st_mode):
            return "the reward is in no regular file"
        if not one.st_mode & stat.S_IWUSR:
            return "the script cannot write to the file of its reward"
    # The time of the last change is the kernel's: no program can set it.
    if found and last_ns >= found[0].st_ctime_ns:
        return "a process that the script did not wait for could have written its reward"
    return ""


def serve_program(confinement: Confinement, sock: _socket.socket) -> None:
    """The process that a test asks: it has the session's folder, and nothing of the tests'."""
    confinement.unmount(protocol.TESTS)
    confinement.unmount(protocol.LOGS)
    _, descriptors = take_order(confinement, sock)
    answer_tests(descriptors[0], confinement.folder)


def answer_tests(channel: int, folder: str) -> NoReturn:
    """Serves a test's questions until it ends. Nothing that the program prints is a result."""
    os.dup2(channel, 3)
    close_from(4)
    null = os.open("/dev/null", os.O_RDWR)
    for target in range(3):
        os.dup2(null, target)
    os.close(null)
    renew_streams()
    new_main()
    sys.dont_write_bytecode = True
    # After the standard library: a module `unittest` in the folder is not what a test imports.
    sys.path[0] = folder
    sys.path.append(sys.path.pop(0))
    Program(socket.socket(fileno=3), folder).serve()


def _run_test(parts: dict[str, bytes]) -> NoReturn:
    """Runs one test function or method; only one that ran to its end reports the nonce.

    Standard input is the channel to the program, whose code never runs here.
    """
    output, channel = _private_output(), socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.dont_write_bytecode = True
    sys.path[0] = protocol.TESTS
    Finder(Tests(channel, parts["source"])).install()
    module = types.ModuleType(parts["file"].decode().removesuffix(".py"))
    module.__dict__.update(__file__=f"{protocol.TESTS}/{parts['file'].decode()}")
    sys.modules[module.__name__] = module
    try:
        exec(compile(parts["source"], module.__file__ or "", "exec"), module.__dict__)
        _call_test(module, parts["name"].decode())
    except BaseException as error:  # SystemExit too: a test that ends early has failed
        report(error)
        exit_now(1)
    write_all(output, parts["nonce"])
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
