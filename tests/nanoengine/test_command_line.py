"""How commands end, what they are called, and what is said of a wrong one."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

from nanoengine import command_line
from nanoengine.command_line import (
    READER_LEFT,
    WRONG,
    gives_back,
    plain_errors,
    program,
    run_command,
)

ROOT = Path(__file__).resolve().parents[2]


def measure(place: tyro.conf.Positional[Path], /, *, num: int = 3, kind: str = "a") -> int:
    """Measure.

    Args:
        place: Where it lies.
        num: How many there are, whose text is long enough to be broken over two lines of a box.
        kind: Of which kind.
    """
    return num


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["x", "--nun", "4"], ["--nun", "did you mean --num?"]),
        (["x", "--num", "4.5"], ["--num: '4.5' is not a whole number"]),
        (["x", "--num"], ["--num"]),
        ([], ["PATH"]),
        (["x", "y" * 200], ["y" * 200]),
    ],
)
def test_a_box_becomes_one_line_whatever_the_width_of_the_terminal(
    words: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(ValueError) as caught, plain_errors(words):
        tyro.cli(measure, args=words, prog="nanorl measure")
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message and message.endswith("nanorl measure --help lists what there is")


def test_what_is_right_goes_through_and_help_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_errors(["x"]):
        assert tyro.cli(measure, args=["x", "--num", "4"]) == 4
        print("a warning", file=sys.stderr)
    with pytest.raises(SystemExit, match="0"), plain_errors(["--help"]):
        tyro.cli(measure, args=["--help"])
    shown = capsys.readouterr()
    assert shown.err == "a warning\n" and "Where it lies" in shown.out


def test_errors_that_a_user_can_mend_end_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> int:
        raise error

    for error in (ValueError("no such thing"), OSError("no such thing"), LookupError("a bug")):
        if isinstance(error, LookupError):
            with pytest.raises(LookupError):
                run_command(lambda error=error: fail(error))
        else:
            assert run_command(lambda error=error: fail(error)) == WRONG
            assert capsys.readouterr().err == "error: no such thing\n"
    assert run_command(lambda: fail(RuntimeError("r")), lambda: (RuntimeError,)) == WRONG
    assert run_command(lambda: 1) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_a_terminal_lacks_are_shown_as_escapes(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    said = "\u96ea \udcfc"  # snow, and a byte of a path that is no UTF-8
    assert run_command(lambda: int(bool(print(said)))) == 0
    shown = "\u96ea" if encoding == "utf-8" else r"\u96ea"
    assert written.getvalue().decode(encoding) == f"{shown} \\udcfc\n"


def test_without_a_stdout_a_command_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # Python's, where it was started with >&-
    assert run_command(lambda: int(bool(print("done")))) == 0


def test_a_working_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run_command(lambda: 0) == WRONG
    assert capsys.readouterr().err.startswith("error: the working folder was removed")


def test_a_path_in_the_home_of_nobody_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: int(bool(Path("~no_such_user_here/x").expanduser()))) == WRONG
    said = capsys.readouterr().err
    assert said.startswith("error: a path begins with ~") and "set HOME" in said


@pytest.mark.parametrize("words", ["--help", "train --help", "tran"])
def test_a_reader_that_leaves_is_no_error(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "nanorl", *words.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    status, said = done.returncode, done.stderr.splitlines()
    if words == "tran":  # its message has a reader
        assert said == ["error: nanorl tran: no such verb; did you mean train?"] and status == WRONG
    else:
        assert (said, status) == ([], READER_LEFT)


def test_a_program_is_called_as_its_user_can_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_ = tmp_path / ".venv" / "bin"
    bin_.mkdir(parents=True)
    monkeypatch.setattr(command_line, "sys", SimpleNamespace(executable=str(bin_ / "python")))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/python -m nanorl", "nobody has installed it"
    (bin_ / "nanorl").touch(mode=0o755)
    assert program() == ".venv/bin/nanorl"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program() == str(bin_ / "nanorl")
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin")
    assert program() == "nanorl"
    other = tmp_path / "other"
    other.mkdir()
    (other / "nanorl").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{other}:{bin_}")
    assert program() == str(bin_ / "nanorl"), "another one comes first"


def test_a_warning_of_ours_is_one_line_and_python_s_own_keep_their_place() -> None:
    program = (
        "import sys, warnings\n"
        "from nanoengine.command_line import run_command\n"
        "def work():\n"
        "    warnings.warn('no compiler: install g++')\n"
        "    warnings.warn('use the other', FutureWarning)\n"
        "    return 0\n"
        "run_command(work)\n"
        "warnings.warn('after it')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second, third = done.stderr.splitlines()[:3]
    assert first == "warning: no compiler: install g++"
    assert second == "<string>:5: FutureWarning: use the other"
    assert third == "<string>:8: UserWarning: after it"


def test_sigterm_ends_a_program_once_it_has_given_back_what_it_held() -> None:
    program = (
        "import signal, sys\n"
        "from nanoengine.command_line import gives_back, run_command\n"
        "def work():\n"
        "    try:\n"
        "        with gives_back():\n"
        "            signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n"
        "        print('given back')\n"
        "if 'first' in sys.argv:\n"
        "    signal.raise_signal = lambda number, send=signal.raise_signal: (\n"
        "        signal.getsignal(number) and send(number))\n"
        "sys.exit(run_command(work))\n"
    )
    words = [sys.executable, "-c", program]
    ended = [
        subprocess.run([*words, *how], capture_output=True, text=True) for how in ([], ["first"])
    ]
    assert [one.stdout for one in ended] == ["given back\n"] * 2
    assert [one.returncode for one in ended] == [-15, 143], (
        "no signal ends a container's first process"
    )


def test_whoever_handles_sigterm_goes_on_to() -> None:
    """As a program that uses the library does, whose threads have no say in signals at all."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with gives_back():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]

    def in_a_thread() -> None:
        with gives_back():
            seen.append(0)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == [signal.SIGTERM, 0]
