"""Verdicts about a session's folder that what the agent left there does not decide.

Every grader works on a copy of the folder in a sandbox of its own, started for it: nothing that the
agent left running, in /tmp, in the interpreter or in the environment gets there. Three kinds, the
strongest first:

check    Cases: the folder's code runs in a process that gets the question and never the expected
         value; what it returns is data, and the host compares. Code can pass only by the right
         value. What it could still do: look up values in its own folder.
grade    Test functions in Python. Each runs in a process of its own, in which no code of the folder
         ever runs: what it imports from there is called in another one, which has nothing of the
         tests, and only plain values come back (tests_side.py says which, and what of tests it
         cannot do). The host reads the tests' names from their text, so none can be hidden from
         it; the text never is a file in there; a test passes only if it came to its end and says
         so with a number that is new each time. So exiting early, printing, fake modules, conftest
         and sitecustomize, patched assertions, a search of the tests' memory and objects that
         equal everything do not pay. Code can pass only by the right values.
verify   A script that writes its reward to a file, as Harbor has it: a number from 0 to 1. Its
         tests are read-only, its environment is clean, its folder for the reward is new. There is
         no reward where the script was killed, where a process that it did not wait for ended after
         the reward was written, or where it could not have written (a file or folder that is
         read-only, a link, no room). What is left to forge: what the script itself concludes from
         code that it runs, since that runs beside it with its rights.

Raises SandboxFailure where the machinery failed: that is no verdict. A folder that cannot be
copied is a failed one.
"""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanorl.sandbox import protocol
from nanorl.sandbox.base import ExecResult, ExecStatus
from nanorl.sandbox.session import Session, WorkspaceError, archive_of

_MAKES_CODE = ("exec", "eval", "compile")
_MODULES_THAT_MAKE_CODE = ("runpy", "pickle", "marshal", "shelve", "code", "imp")
_MAX_REWARD_BYTES = 1 << 16
_MAX_SCRIPT_OUTPUT_BYTES = 8 << 20  # nobody reads it; beyond it the script is killed
_SCRIPT = """
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 TEST_DIR=/tests
exec {shell} /tests/{script}
"""


@dataclass(frozen=True)
class Case:
    """Code that sets `result` from what is in the folder, and the value that it should have.

        Case("from stats import median\\nresult = median([3, 1, 2])", expected=2)
        Case("from stats import median\\nresult = median([])", raises="ValueError")

    Values are compared as JSON: a tuple equals a list, 1 does not equal True or 1.0.
    """

    code: str
    expected: Any = None
    raises: str = ""


@dataclass(frozen=True)
class Verdict:
    """Names of what passed and what failed, with the reasons of failures. `reward` is the share
    that passed, unless a script gave another one. Never show reasons to the policy."""

    reward: float
    passed: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    """All that a script's reward.json holds."""

    @property
    def is_passed(self) -> bool:
        return self.reward >= 1.0 and not self.failed


async def check(session: Session, cases: Sequence[Case], timeout_s: float) -> Verdict:
    """Asks the folder's code every case; `timeout_s` is for one of them."""
    if not cases:
        raise ValueError("cases is empty: nothing would be checked")
    said: dict[str, str] = {}
    try:
        async with await session.copy() as copy:
            for n, case in enumerate(cases):
                result = await copy.perform(protocol.CALL, {"code": case.code}, timeout_s)
                said[f"case {n}"] = _problem_of_case(case, result)
    except WorkspaceError as error:
        said = {f"case {n}": str(error) for n in range(len(cases))}
    return _verdict(said)


def _problem_of_case(case: Case, result: ExecResult) -> str:
    if result.status is not ExecStatus.OK:
        return f"it ended with {result.status}"
    expected = {"raises": case.raises} if case.raises else {"value": case.expected}
    try:
        is_right = _canonical(json.loads(result.stdout)) == _canonical(expected)
    except (ValueError, RecursionError):
        return "it returned nothing that can be read"
    return "" if is_right else f"another value than {expected}"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


async def grade(session: Session, tests: Mapping[str, str | bytes], timeout_s: float) -> Verdict:
    """Runs every test function and method in the Python files of `tests` named test_*.py.

    Other files lie in /tests, read-only. `timeout_s` is for one test.
    Raises ValueError where the tests hold no test, or need what this grader does not have.
    """
    sources = {name: _text(data) for name, data in tests.items() if _is_test_file(name)}
    names = [(file, name) for file, text in sources.items() for name in test_names(file, text)]
    if not names:
        raise ValueError("no test_* function or method in any file named test_*.py")
    others = {name: data for name, data in tests.items() if name not in sources}
    archive = archive_of(others, session.spec)
    said: dict[str, str] = {}
    try:
        async with await session.copy() as copy:
            await _lay_tests(copy, archive, timeout_s)
            for file, name in names:
                said[f"{file}::{name}"] = await _run_test(
                    copy, sources[file], file, name, timeout_s
                )
    except WorkspaceError as error:
        said = {f"{file}::{name}": str(error) for file, name in names}
    return _verdict(said)


async def _run_test(copy: Session, source: str, file: str, name: str, timeout_s: float) -> str:
    """Why the test failed; empty: it passed."""
    nonce = secrets.token_bytes(16)
    parts: dict[str, str | bytes] = {
        "nonce": nonce,
        "source": source,
        "file": file.rpartition("/")[2],
        "name": name,
    }
    result = await copy.perform(protocol.TEST, parts, timeout_s)
    if result.status is not ExecStatus.OK:
        return _last_line(result.stderr) or f"it ended with {result.status}"
    return "" if _is_end(result.stdout, nonce) else "the process ended before the test did"


def _is_end(said: bytes, nonce: bytes) -> bool:
    """The number alone: whoever can add to a test's report could have written all of it."""
    return said == nonce


def test_names(file: str, text: str) -> list[str]:
    """`name` and `Class::name` of all tests in a file, read from its text alone."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{file}: line {error.lineno}: {error.msg}") from error
    _refuse_foreign_code(file, tree)
    found = []
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            raise ValueError(f"{file}: {node.name} is async, which needs a plug-in of pytest")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.args.args:
                raise ValueError(f"{file}: {node.name} takes fixtures; use a test.sh with pytest")
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            found += [
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name.startswith("test")
            ]
    return found


def _refuse_foreign_code(file: str, tree: ast.AST) -> None:
    """The folder's code runs apart from the tests, unless they themselves make code of its text."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [name for name in _MAKES_CODE if name == node.func.id]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names if one.name in _MODULES_THAT_MAKE_CODE]
        elif isinstance(node, ast.ImportFrom) and node.module in _MODULES_THAT_MAKE_CODE:
            names = [node.module]
        elif isinstance(node, ast.Attribute) and node.attr.endswith("FileLoader"):
            names = [node.attr]
        if names:
            line = getattr(node, "lineno", 0)
            raise ValueError(
                f"{file}: line {line}: {names[0]} would run the folder's code among the tests; "
                "import the module that is tested, or use a test.sh"
            )


async def verify(
    session: Session, tests: Mapping[str, str | bytes], script: str, timeout_s: float
) -> Verdict:
    """Runs `script` of the tests, which lie read-only in /tests, in a copy of the folder.

    The reward is the number in /logs/verifier/reward.txt, or `reward` (or the only number) in
    reward.json beside it.
    """
    if script not in tests:
        raise ValueError(f"the tests hold no {script!r}, only {', '.join(sorted(tests))}")
    shell = "/bin/bash" if b"bash" in _bytes(tests[script]).partition(b"\n")[0] else "/bin/sh"
    archive = archive_of(tests, session.spec)
    try:
        async with await session.copy() as copy:
            await _lay_tests(copy, archive, timeout_s)
            command = _SCRIPT.format(shell=shell, script=script)
            result = await copy.perform(
                protocol.VERIFY, {"command": command}, timeout_s, _MAX_SCRIPT_OUTPUT_BYTES
            )
            if result.status is not ExecStatus.OK:
                reason = _last_line(result.stderr) or f"it ended with {result.status}"
                return _verdict({script: reason})
            return await _read_reward(copy, script, result)
    except WorkspaceError as error:
        return _verdict({script: str(error)})


async def _read_reward(copy: Session, script: str, result: ExecResult) -> Verdict:
    """Harbor's order: the text file first."""
    for path in protocol.REWARDS:
        name = path.rpartition("/")[2]
        parts = {"root": protocol.LOGS, "path": path}
        read = await copy.perform(protocol.READ, parts, 10.0, _MAX_REWARD_BYTES)
        if read.status is not ExecStatus.OK:
            continue
        try:
            content = json.loads(read.stdout)
        except (ValueError, RecursionError):
            return _verdict({script: f"{name} holds no number"})
        rewards = content if isinstance(content, dict) else {"reward": content}
        is_number = all(_is_number(value) for value in rewards.values())
        if not is_number or not ("reward" in rewards or len(rewards) == 1):
            return _verdict({script: f"{name} holds no number named reward"})
        reward = float(rewards.get("reward", next(iter(rewards.values()))))
        if not 0.0 <= reward <= 1.0:
            return _verdict({script: f"{name}: the reward {reward:g} is outside of [0, 1]"})
        return Verdict(reward, (script,), {}, {name: float(v) for name, v in rewards.items()})
    return _verdict({script: _last_line(result.stderr) or "it wrote no reward"})


def _is_number(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


async def _lay_tests(copy: Session, archive: bytes, timeout_s: float) -> None:
    result = await copy.perform(protocol.LAY_TESTS, {"archive": archive}, timeout_s + 10.0)
    if result.status is not ExecStatus.OK:
        raise ValueError(f"the tests do not fit: {result.stderr.decode(errors='replace')}")


def _verdict(said: Mapping[str, str]) -> Verdict:
    passed = tuple(name for name, problem in said.items() if not problem)
    failed = {name: problem for name, problem in said.items() if problem}
    return Verdict(len(passed) / len(said), passed, failed)


def _is_test_file(name: str) -> bool:
    return name.rpartition("/")[2].startswith("test_") and name.endswith(".py")


def _text(data: str | bytes) -> str:
    return data if isinstance(data, str) else data.decode()


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
