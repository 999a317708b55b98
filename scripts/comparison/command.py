"""What the commands that run a matrix of runs share: their words, the folder's lock, their end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import tyro
from comparison.matrix import Matrix, RunJob

from nanoengine.command_line import WRONG, plain_errors
from nanoengine.state.run_folder import LOCK, take_lock
from nanoengine.stop_signals import EXIT_STATUS
from nanosched.resources import Resources

Options = TypeVar("Options")


def main_of(
    command: Callable[[Options, Sequence[str]], int],
    options: type[Options],
    program: str,
    words: Sequence[str],
) -> int:
    """Call `command` with the options and with the words after --, which go to every run.

    Returns the exit status: the command's, WRONG where it raised ValueError or OSError or an option
    is wrong, EXIT_STATUS after Ctrl-C."""
    words = list(words)
    cut = words.index("--") if "--" in words else len(words)
    try:
        with plain_errors(words[:cut]):
            given = tyro.cli(options, args=words[:cut], prog=program)
        return command(given, words[cut + 1 :])
    except KeyboardInterrupt:
        print("stopped; the runs are saved: the same command goes on", file=sys.stderr)
        return EXIT_STATUS
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG


def run_all(
    jobs: Sequence[RunJob],
    out: Path,
    *,
    num_parallel: int,
    on_finished: Callable[[RunJob], None] = lambda job: None,
) -> int:
    """Run what is not finished, holding `out` against a second such command; the CPU's cores are
    divided among the runs. Returns 1 if some failed, which are named, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    threads = max(1, int(Resources.of_machine().num_cpus) // num_parallel)
    lock = take_lock(out / LOCK)
    try:
        matrix = Matrix(
            jobs,
            num_parallel=num_parallel,
            threads=threads,
            say=say,
            on_finished=on_finished,
        )
        failed = matrix.run()
    finally:
        os.close(lock)
    for job in failed:
        say(f"{job.name} failed: {job.error}; see {job.log}")
    return 1 if failed else 0


def say(line: str) -> None:
    print(line, flush=True)
