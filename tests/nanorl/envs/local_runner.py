"""Runs trusted teacher programs in this process, for tests only: it isolates nothing."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanoinfer.chat.base import ToolCall
from nanorl.envs.actions import ActionFormat
from nanorl.envs.tasks.teachers import SloppyTeacher
from nanorl.task import Task


def run_program(code: str, files: Mapping[str, str], folder: Path) -> str:
    """What the program prints, then the last line of its traceback if it raises."""
    for old in folder.iterdir():
        old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    out = io.StringIO()
    before, modules = os.getcwd(), set(sys.modules)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(folder))
    sys.path_importer_cache.pop(str(folder), None)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(code, "program", "exec"), {"__name__": "__main__"})
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = writes_bytecode
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) in {str(folder / f) for f in files}:
                del sys.modules[name]
    return out.getvalue().strip()


@dataclass(kw_only=True)
class PlayedTrace:
    """`observations[i]` answers `actions[i]`; the last action, the answer, has none."""

    task: Task
    manner: str
    actions: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    answer: str | None = None

    @property
    def is_correct(self) -> bool:
        return self.answer is not None and self.answer.strip() == self.task.answer


def play_trace(
    task: Task, form: ActionFormat, teacher: SloppyTeacher, folder: Path, rng: random.Random
) -> PlayedTrace:
    """Play at most eight turns of a teacher; what `form` writes is read back by it."""
    script = teacher.trace(task, rng)
    trace = PlayedTrace(task=task, manner=script.manner)
    while len(trace.actions) < 8:
        trace.actions.append(script.next_action(trace.observations))
        calls = form.read(trace.actions[-1])
        if not calls:
            trace.answer = form.answer_in(trace.actions[-1])
            assert trace.answer is not None
            assert form.write_answer(trace.answer) == trace.actions[-1]
            break
        (call,) = calls
        assert isinstance(call, ToolCall) and form.write(call) == trace.actions[-1]
        trace.observations.append(run_program(call.arguments["code"], task.files, folder))
    return trace
