"""How a command ends, and what it is called.

    sys.exit(run_command(lambda: train(words)))

Exit status: 0 done; 1 the answer is no (what was checked cannot work, what was compared differs);
2 something was wrong, and one line on stderr, `error: ...`, says what and how to mend it; 130
stopped with Ctrl-C; 141 whoever read the output has left. A traceback is a bug of ours.

tyro and argparse have styles of their own: `plain_errors` makes one line of their boxes and usages.
Left out: the sections of a box that the help repeats (what an option is for).
"""

from __future__ import annotations

import io
import os
import re
import select
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

WRONG = 2
"""The exit status of a message that begins with `error:`; tyro's and argparse's, too."""
STOPPED = 130
READER_LEFT = 141
_STDOUT = 1
_NO_HOME = "Could not determine home directory."  # pathlib's, of `~` and `~NAME`; it has no class
_HOME_WANTED = (
    "a path begins with ~, and there is no home folder that it stands for: write the path in full, "
    "or set HOME to a folder that you may write to"
)
WIDE = "4096"  # columns: a box as wide as this breaks no line
_MOST_FLAGS = 3
_FRAME = " │|╭╮╰╯─-+"
_PLAIN = (
    (re.compile(r"invalid literal for int\(\) with base 10: (.+)"), r"\1 is not a whole number"),
    (re.compile(r"could not convert string to float: (.+)"), r"\1 is not a number"),
    (
        re.compile(r"no type matching \{None\}\|INT could be instantiated from \[(.+)\]"),
        r"\1 is not a whole number",
    ),
    (
        re.compile(r"no type matching \{None\}\|FLOAT could be instantiated from \[(.+)\]"),
        r"\1 is not a number",
    ),
    (re.compile(r"^argument (.*): invalid int value: (.+)"), r"\1: \2 is not a whole number"),
    (re.compile(r"^Error parsing \S+: --"), "--"),
    (re.compile(r"^Error parsing (\S+):"), r"\1:"),
    (re.compile(r"^invalid choice ('.*') for argument '(.*)'\. Expected"), r"\2 \1: expected"),
    (re.compile(r"'options\.(\w+)'"), r"'\1'"),
)


def run_command(
    action: Callable[[], int],
    mendable: Callable[[], tuple[type[RuntimeError], ...]] = tuple,
) -> int:
    """Run a command and return its exit status. `mendable` are the errors, besides ValueError and
    OSError, that a user can mend."""
    _print_anything()
    try:
        try:
            _require_working_folder()
            with _plain_warnings():
                return action()
        finally:
            if sys.stdout is not None:  # as where it was closed: `>&-`
                sys.stdout.flush()  # here, where a reader that has left is no traceback
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return READER_LEFT
        return _say(error)
    except RuntimeError as error:
        if str(error) == _NO_HOME:
            return _say(ValueError(_HOME_WANTED))
        if not isinstance(error, mendable()):
            raise
        return _say(error)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return STOPPED
    except Terminated as error:  # whoever sent it sees a process that it has ended
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        return int(error.code or 0)  # a container's first process, which no signal ends


class Terminated(SystemExit):
    """SIGTERM, in a block that has something to give back; `run_command` ends by it afterwards."""


@contextmanager
def gives_back() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` in the block; a second one ends the process at once. Outside
    of the main thread, and where somebody else handles the signal, it does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(128 + number)  # what a shell reports

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _require_working_folder() -> None:
    """FileNotFoundError where it was removed: MKL ends such a process, and blames torch."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            "the working folder was removed: change into one that is there, and try again"
        ) from error


def _print_anything() -> None:
    """Let a terminal of few letters (a locale without UTF-8, PYTHONIOENCODING) show an escape for
    what it lacks: what a model writes, or a path, is no reason to end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python does for stderr


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Make one line of our warnings, without a place in the code; Python's own keep theirs."""
    as_python_does = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], *place: Any) -> str:
        if category is UserWarning:
            return f"warning: {message}\n"
        return as_python_does(message, category, *place)

    warnings.formatwarning = formatted  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = as_python_does


def _say(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return WRONG


def _reader_left() -> bool:
    """Say whether nobody reads stdout any more, as in `| head`. If so, the rest goes to /dev/null:
    Python still writes it at its end."""
    watch = select.poll()
    watch.register(_STDOUT, 0)
    if not watch.poll(0):  # only errors are asked for
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return True


def program() -> str:
    """The command that calls `nanorl` here: its name where that finds it, else its path."""
    script = Path(sys.executable).with_name("nanorl")
    found = shutil.which("nanorl")
    if found is not None and Path(found).absolute() == script.absolute():
        return "nanorl"
    return short_path(script) if script.is_file() else f"{python()} -m nanorl"


def python() -> str:
    """The path of the Python that runs this, as a user would type it."""
    return short_path(Path(sys.executable))


def short_path(path: Path) -> str:
    """A path as one types it: from the working folder on where it lies below it."""
    here = Path.cwd()
    absolute = path.absolute()  # not resolved: .venv/bin/python is a link
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


@contextmanager
def plain_errors(words: Sequence[str]) -> Iterator[None]:
    """Turn what a parser prints before it ends the program into a ValueError. Whatever else it
    prints, warnings and help, is passed on."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), _columns(None if {"-h", "--help"} & set(words) else WIDE):
            yield
    except SystemExit as stop:
        if stop.code != WRONG:
            sys.stderr.write(said.getvalue())
            raise
        raise ValueError(plain_message(said.getvalue())) from None
    sys.stderr.write(said.getvalue())


@contextmanager
def _columns(number: str | None) -> Iterator[None]:
    """Let this be the terminal's width."""
    before = os.environ.get("COLUMNS")
    if number is not None:
        os.environ["COLUMNS"] = number
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = before


def plain_message(said: str) -> str:
    """One line of a box of tyro's, or of a usage of argparse's: what is wrong, what was meant
    perhaps, and where the help is."""
    usage = re.search(r"^\S.*: error: (.*)", said, re.MULTILINE)
    if usage:
        return _in_plain_words(usage[1])
    title, *sections = _sections(said)
    parts = [_in_plain_words(" ".join(sections[0] if sections else title)).rstrip(".")]
    flags = [row.split()[0] for part in sections[1:] for row in part if row.startswith("--")]
    if flags and sections[1][0].startswith("Perhaps"):
        wrong = re.findall(r"--[\w.-]+", parts[0])[0].split(".")[-1].strip("-")
        flags.sort(key=lambda flag: flag.split(".")[-1].strip("-") != wrong)
        parts.append(f"did you mean {' or '.join(flags[:_MOST_FLAGS])}?")
    if shown := re.search(r"(nanorl [\w-]+|\S+) --help", said):
        parts.append(f"{shown[0]} lists what there is")
    return "; ".join(parts)


def _sections(said: str) -> list[list[str]]:
    """The rows of a box without its frame, cut at the rules; its title first."""
    sections: list[list[str]] = [[]]
    for line in said.splitlines():
        row = line.strip("│| ")
        is_rule = not row.strip(_FRAME)
        if not sections[0]:
            sections = sections if is_rule else [[row.strip(_FRAME)], []]
        elif is_rule:
            sections.append([])
        else:
            sections[-1].append(row)
    return [part for part in sections if part] or [["wrong options"]]


def _in_plain_words(message: str) -> str:
    for pattern, words in _PLAIN:
        message = pattern.sub(words, message)
    return message
