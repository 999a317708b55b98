"""Runs trusted teacher programs in this process, for tests only: it isolates nothing."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nanorl.envs.actions import ActionFormat


@dataclass
class LocalStep:
    observation: str | None = None
    answer: str | None = None


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


class LocalEnv:
    """The environment's side of a trace: runs programs, ends at an answer."""

    def __init__(self, form: ActionFormat, files: Mapping[str, str], folder: Path) -> None:
        self.form, self.files, self.folder = form, files, folder

    async def step(self, action: str) -> LocalStep:
        code = action.removeprefix(self.form.program_open)
        if code != action and code.endswith(self.form.program_close):
            code = code.removesuffix(self.form.program_close)
            return LocalStep(observation=run_program(code, self.files, self.folder))
        assert action.startswith(self.form.answer_open), action
        return LocalStep(answer=action.removeprefix(self.form.answer_open))
