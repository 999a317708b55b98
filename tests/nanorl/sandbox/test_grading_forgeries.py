"""Hidden tests compare plain values: an object that says yes to everything passes none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from forged_answers import FORGED, IDIOMS

from nanorl.sandbox import SandboxPool, SandboxSpec
from nanorl.sandbox.grading import Verdict, grade

pytestmark = pytest.mark.sandbox
TESTS = {f"test_{n}.py": idiom.test() for n, idiom in enumerate(IDIOMS)}


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxSpec(timeout_s=60.0, tmp_bytes=16 << 20)) as pool:
        yield pool


def graded(pool: SandboxPool, files: dict[str, str], tests: dict[str, str]) -> Verdict:
    async def main() -> Verdict:
        async with await pool.open_session(files) as session:
            return await grade(session, tests, 60)

    return asyncio.run(main())


def test_there_are_enough_idioms() -> None:
    assert len(IDIOMS) >= 14 and len({idiom.name for idiom in IDIOMS}) == len(IDIOMS)


def test_the_right_value_passes_every_idiom(pool: SandboxPool) -> None:
    files, tests = {}, {}
    for n, idiom in enumerate(IDIOMS):
        files[f"answer_{n}.py"] = f"def f(x): return {idiom.right}\n"
        tests[f"test_{n}.py"] = idiom.test().replace("from answer ", f"from answer_{n} ")
    verdict = graded(pool, files, tests)
    assert verdict.failed == {} and len(verdict.passed) == len(IDIOMS)


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_object_passes_no_idiom(pool: SandboxPool, name: str) -> None:
    verdict = graded(pool, {"answer.py": FORGED[name]}, TESTS)
    numbers = [int(one.partition(".")[0].removeprefix("test_")) for one in verdict.passed]
    assert [IDIOMS[n].name for n in numbers] == []
    assert len(verdict.failed) == len(IDIOMS)


def test_the_report_is_the_number_and_nothing_else(pool: SandboxPool) -> None:
    """A test that adds to its own report: whoever can add could have written the number, too."""
    adds = "import os\nfrom answer import f\ndef test_f():\n    assert f(1) == 3\n"
    noise = "    for n in range(3, 32):\n        try: os.write(n, b'{}')\n"
    noise += "        except OSError: pass\n"
    files = {"answer.py": "def f(x): return 3\n"}
    assert graded(pool, files, {"test_f.py": adds}).is_passed
    for said in "!", "\\n":
        assert not graded(pool, files, {"test_f.py": adds + noise.format(said)}).passed


PROGRAM = """
from collections import Counter, OrderedDict, namedtuple
class EmptyError(LookupError): pass
class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items: raise EmptyError("nothing", 7)
        return self.items.pop()
    @classmethod
    def of(cls, *items): return cls(items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return self.items == other.items
    def __add__(self, other): return Stack(self.items + other.items)
    def __repr__(self): return f"Stack({self.items})"
    def __enter__(self): return self
    def __exit__(self, *what): self.items.clear()
Pair = namedtuple("Pair", "a b")
VERSION = (1, 2)
def double(numbers):
    for n, each in enumerate(numbers): numbers[n] = 2 * each
def apply(function, items): return [function(each) for each in items]
def adder(n): return lambda x: x + n
def count(n):
    for each in range(n): yield each
def tally(text): return Counter(text)
def pair(): return Pair(1, 2)
def say(text): print(text)
def fail(kind): raise {"own": EmptyError, "python": ValueError, "exit": SystemExit}[kind]("why")
def big(n): return 10 ** n
def cast(text, kind): return kind(text)
def wrap(stack): return len(stack)
"""
WORKS = """
import contextlib, io, unittest
import lib.tools
from lib.tools import *
from lib import tools
from lib.tools import EmptyError, Stack
class TestAll(unittest.TestCase):
    def test_values(self):
        self.assertEqual(tools.VERSION, (1, 2))
        self.assertEqual(tally("aab"), {"a": 2, "b": 1})
        self.assertEqual(pair(), (1, 2))
        self.assertEqual(big(9000), 10 ** 9000)
        self.assertEqual(cast("12", int), 12)
        self.assertIs(lib.tools.cast("", bool), False)
    def test_arguments(self):
        numbers, held = [1, 2], {"deep": [3]}
        same = numbers
        double(numbers)
        self.assertEqual(same, [2, 4])
        double(held["deep"])
        self.assertEqual(held, {"deep": [6]})
    def test_functions(self):
        self.assertEqual(apply(lambda x: x + 1, [1, 2]), [2, 3])
        self.assertEqual(adder(3)(4), 7)
        with self.assertRaises(ZeroDivisionError):
            apply(lambda x: 1 / x, [0])
    def test_iterators(self):
        self.assertEqual(list(count(3)), [0, 1, 2])
        self.assertIn(2, count(3))
        self.assertNotIn(5, count(3))
        with self.assertRaises(StopIteration):
            next(count(0))
    def test_errors(self):
        with self.assertRaises(EmptyError) as caught:
            Stack().pop()
        self.assertEqual(caught.exception.args, ("nothing", 7))
        with self.assertRaisesRegex(LookupError, "why"):
            fail("own")
        for kind, name in ((ValueError, "python"), (SystemExit, "exit")):
            with self.assertRaises(kind):
                fail(name)
    def test_printing(self):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            say("hello")
        self.assertEqual(said.getvalue(), "hello\\n")
    def test_objects(self):
        stack = Stack([1])
        self.assertIs(stack.push(2), stack)
        self.assertEqual((len(stack), list(stack)), (2, [1, 2]))
        self.assertEqual((2 in stack, 3 in stack), (True, False))
        self.assertEqual(stack, Stack([1, 2]))
        self.assertNotEqual(stack, Stack([1]))
        self.assertNotEqual(stack, [1, 2])
        self.assertEqual(str(stack + stack), "Stack([1, 2, 1, 2])")
        self.assertEqual((wrap(stack), stack.pop(), stack.items, Stack.limit), (2, 2, [1], 3))
        self.assertIsInstance(stack, Stack)
        self.assertNotIsInstance([1], Stack)
        with stack as inside:
            self.assertIs(inside, stack)
        self.assertFalse(stack)
        stack.items = [7]
        self.assertEqual(stack.pop(), 7)
"""
LOADED = """
import importlib.util, subprocess, sys
def test_by_path():
    spec = importlib.util.spec_from_file_location("own", "lib/tools.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.big(2) == 100
def test_by_its_folder():
    sys.path.insert(0, "/work/lib")
    import tools
    assert tools.big(3) == 1000 and "Program" not in str(type(tools.Stack([1]).items))
def test_as_a_command():
    done = subprocess.run(["python3", "-c", "import sys; sys.path.append('lib'); import tools; "
        "print(tools.big(1))"], capture_output=True, text=True)
    assert done.stdout == "10\\n", done
def test_helpers():
    from helper import ten
    from lib.tools import big
    assert big(1) == ten
"""


def test_what_honest_tests_do_still_works(pool: SandboxPool) -> None:
    files = {"lib/__init__.py": "", "lib/tools.py": PROGRAM}
    tests = {"test_all.py": WORKS, "test_loaded.py": LOADED, "helper.py": "ten = 10\n"}
    verdict = graded(pool, files, tests)
    assert verdict.failed == {} and len(verdict.passed) == 11


NOT_PLAIN = """
class Own:
    value = 3
    def __init__(self, *a): self.inner = type("Inner", (), {"startswith": lambda *a: True})()
    def method(self): return self.inner
def f(): return Own()
def g(): return Own
own = Own()
"""


@pytest.mark.parametrize(
    "line",
    [
        "m.f() or True",
        "str(m.f()) or True",
        "m.own or True",
        "m.Own().inner.startswith('x')",
        "m.Own().method().startswith('x')",
        "m.g().value == 3",
        "m.f(object()) or True",
    ],
)
def test_what_is_not_plain_is_refused_and_said(pool: SandboxPool, line: str) -> None:
    tests = {"test_m.py": f"import m\ndef test_m():\n    assert {line}\n"}
    verdict = graded(pool, {"m.py": NOT_PLAIN}, tests)
    (why,) = verdict.failed.values()
    assert "plain value" in why or "attribute" in why or "handed to the program" in why


@pytest.mark.parametrize(
    "line",
    [
        "exec(open('m.py').read())",
        "assert eval(m.f())",
        "import pickle",
        "from runpy import run_path",
    ],
)
def test_tests_that_would_run_the_program_among_themselves_are_refused(
    pool: SandboxPool, line: str
) -> None:
    with pytest.raises(ValueError, match="would run the folder's code among the tests"):
        graded(pool, {}, {"test_m.py": f"import m\ndef test_m():\n    {line}\n"})


HIDES = """
def f(x): return 7.0
def abs(x): return 0.0
def sorted(x): return [1, 2]
def isclose(*a): return True
def right(x): return 3.0
def len(x): return 2
class TestCase:
    def assertEqual(self, *a): pass
class math:
    isclose = staticmethod(isclose)
"""


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        ("from answer import *", "assert abs(f(1) - 3.0) < 1e-6"),
        ("from answer import *", "assert sorted([2, 3]) == [1, 2]"),
        ("from math import isclose\nfrom answer import *", "assert isclose(f(1), 3.0)"),
        ("import math\nfrom answer import *", "assert math.isclose(f(1), 3.0)"),
        ("def right(x): return x\nfrom answer import *", "assert right(7.0) == 3.0"),
        ("from unittest import TestCase\nfrom answer import *",
         "TestCase().assertEqual(f(1), 3.0)"),
    ],
)  # fmt: skip
def test_a_program_cannot_replace_the_names_that_a_test_has(
    pool: SandboxPool, first: str, lines: str
) -> None:
    tests = {"test_f.py": f"{first}\ndef test_f():\n    {lines}\n"}
    assert not graded(pool, {"answer.py": HIDES}, tests).passed


SEARCHES = """
import glob, os
def f(x):
    seen = [n for n in os.listdir("/proc") if n.isdigit()]
    return [os.path.exists("/tests/data.txt"), os.listdir("/tests"), len(seen), os.getpid()]
"""
SEES_LITTLE = """
from answer import f
def test_f():
    assert open("/tests/data.txt").read() == "secret"
    assert f(1) == [False, [], 2, 2], f(1)
"""


def test_the_program_sees_neither_the_tests_files_nor_their_process(pool: SandboxPool) -> None:
    tests = {"test_f.py": SEES_LITTLE, "data.txt": "secret"}
    verdict = graded(pool, {"answer.py": SEARCHES}, tests)
    assert verdict.is_passed, verdict


LOOKS_INSIDE = """
import os
found = []
for pid in range(1, os.getpid()):
    for name in "mem", "environ":
        try: open(f"/proc/{pid}/{name}", "rb").read(1); found.append((pid, name))
        except OSError: pass
print(found)
"""
AS_A_COMMAND = """
import subprocess
def test_f():
    done = subprocess.run(["python3", "answer.py"], capture_output=True, text=True)
    assert done.stdout == "[]\\n", done
"""


def test_a_command_that_a_test_starts_cannot_look_into_it(pool: SandboxPool) -> None:
    verdict = graded(pool, {"answer.py": LOOKS_INSIDE}, {"test_f.py": AS_A_COMMAND})
    assert verdict.is_passed, verdict
