"""Turns a confined process into the program: its files, its streams, its `__main__`, its exit.

Nothing here is trusted with anything: by now the process has no rights, and what the program does
to this code it does to itself. The aim is that a program cannot tell it from `python program.py`.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import types
from typing import Any, NoReturn

from nanorl.sandbox.protocol import PAYLOAD, PROGRAM_NAME

exit_now = os._exit  # a program may replace the attribute


def read_payload(descriptor: int) -> list[tuple[str, bytes]]:
    """The named parts that `protocol.pack` framed, from a descriptor."""
    return parts_of(_read_all(descriptor))


def parts_of(payload: bytes) -> list[tuple[str, bytes]]:
    """The named parts that `protocol.pack` framed."""
    parts, position = [], 0
    while position < len(payload):
        name_bytes, text_bytes = PAYLOAD.unpack_from(payload, position)
        middle = position + PAYLOAD.size + name_bytes
        name = payload[position + PAYLOAD.size : middle].decode()
        position = middle + text_bytes
        parts.append((name, payload[middle:position]))
    return parts


def lay_files(descriptor: int) -> bytes:
    """Writes the payload's files into the working directory; returns the program's text."""
    files = read_payload(descriptor)
    for name, text in files:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        written = 0
        while written < len(text):
            written += os.write(file, text[written:])
        os.close(file)
    return files[0][1]


def ready_streams() -> None:
    """In the server: makes the streams that programs without input use, since making them takes a
    tenth of an execution. They are made over what a program will have there, /dev/null and pipes,
    which they look at; and they stay those of the server's own errors."""
    kept = [os.dup(number) for number in range(3)]
    ends = [os.open("/dev/null", os.O_RDONLY), *os.pipe()]
    for number in range(3):
        os.dup2(ends[0 if number == 0 else 2], number)
    renew_streams()
    for number, descriptor in enumerate(kept):
        os.dup2(descriptor, number)
    for descriptor in (*kept, *ends):
        os.close(descriptor)


def renew_streams() -> None:
    """Standard streams over the descriptors, configured as `python program.py` has them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
        buffered: Any = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        errors = "backslashreplace" if number == 2 else "strict"
        stream = io.TextIOWrapper(buffered, "utf-8", errors, line_buffering=number == 2)
        raw.name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def new_main(file: str | None = None) -> types.ModuleType:
    """A fresh `__main__`, and the process as a program expects to find it. `file`: where its text
    is; None: in no file, as with `python -c`."""
    gc.enable()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    if file is not None:
        main.__file__ = file
    sys.modules["__main__"] = main
    return main


def execute(code: bytes, name: str = PROGRAM_NAME) -> NoReturn:
    """Runs the text as `__main__` and leaves the way the interpreter would."""
    main = new_main(name if name == PROGRAM_NAME else None)
    exit_code = 0
    try:
        exec(compile(code, name, "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:  # as the interpreter: SystemExit is a status, too
        exit_code = report(error)
    leave(exit_code)


def leave(exit_code: int) -> NoReturn:
    """Ends the process as the interpreter would: threads, exit handlers, buffers."""
    exit_code = _shut_down(exit_code)
    exit_now(exit_code & 0xFF)


def report(error: BaseException) -> int:
    """Writes what the interpreter would about an uncaught exception; its exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        flush(sys.stdout)
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__.tb_next if error.__traceback__ else None
    flush(sys.stdout)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _shut_down(exit_code: int) -> int:
    """Threads, exit handlers, buffers: in the order of Py_FinalizeEx."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:  # an exit handler's: the interpreter prints it, goes on
        sys.excepthook(type(error), error, error.__traceback__)
    is_flushed = flush(sys.stdout)
    flush(sys.stderr)
    return exit_code if is_flushed else exit_code or 120


def flush(stream: Any) -> bool:
    """False if what is buffered could not be written."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except BaseException:  # the program's own stream object: whatever it raises is its failure
        return False
    return True


def _read_all(descriptor: int) -> bytes:
    """The whole of an anonymous file, or, in a box, of a pipe. (Asking for much makes Python
    allocate and touch as much.)"""
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
    except OSError:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    chunks, position = [], 0
    while position < size:
        chunks.append(os.pread(descriptor, size - position, position))
        position += len(chunks[-1])
    return b"".join(chunks)
