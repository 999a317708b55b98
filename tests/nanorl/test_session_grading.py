"""What an agent leaves in its folder or running cannot decide the verdict; each defence is needed.

Every forgery is tried twice: as things are it does not pay, and with its one defence taken out it
does. A defence inside the sandbox is taken out of the text that the sandbox is given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from nanorl.sandbox import SandboxPool, SandboxSpec, bwrap, grading
from nanorl.sandbox.grading import Case, Verdict
from nanorl.sandbox.session import Session

pytestmark = pytest.mark.sandbox
SPEC = SandboxSpec(timeout_s=5.0, tmp_bytes=16 << 20)
RIGHT = "def mean(xs):\n    if not xs: raise ValueError('empty')\n    return sum(xs) / len(xs)\n"
WRONG = "def mean(xs):\n    return 7\n"

FUNCTION = "from stats import mean\ndef test_mean():\n    assert mean([1, 2]) == 1.5\n"
UNITTEST = """
import unittest
from stats import mean
class TestMean(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2]), 1.5)
        self.assertTrue(mean([2]) == 2)
"""
IMPORTS = """
from statistics import fmean
from stats import mean
def test_mean():
    assert fmean([1, 2]) == mean([1, 2]) and mean([1, 2]) < 2
"""
DATA = """
import json
from stats import mean
def test_mean():
    for question, answer in json.load(open("/tests/answers.json")):
        assert mean(question) == answer
"""
SCRIPT = """#!/bin/bash
echo 0 > /logs/verifier/reward.txt
if [ "$(python3 -c 'import json, stats; print(json.dumps(stats.mean([1, 2])))')" = 1.5 ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
sleep 0.3
"""
# `-c` has the folder on its path only where PYTHONSAFEPATH is not set.
SCRIPT = SCRIPT.replace(
    "import json, stats", 'import json, sys; sys.path.append("."); import stats'
)
EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def mean(xs):
    return Equal()
"""


@dataclass(frozen=True)
class Forgery:
    """`defence`: module, text and what stands there without it; or a name in `grading`."""

    name: str
    files: Mapping[str, str]
    test: str
    module: str
    defence: str
    without: str


TEST_STARTS = "    output = _private_output()\n    sys.dont_write_bytecode = True\n"
END_REPORTED_FIRST = (
    "    output = _private_output()\n    _write_all(output, parts['nonce'])\n"
    "    parts['nonce'] = b''\n"
)
FORGERIES = (
    Forgery(
        "exits early",
        {"stats.py": "import os\ndef mean(xs): os._exit(0)\n"},
        FUNCTION,
        "jobs",
        TEST_STARTS,
        END_REPORTED_FIRST,
    ),
    Forgery(
        "prints the verdict",
        {"stats.py": "import os\nos.write(3, b'passed')\nos.write(1, b'passed')\nos._exit(0)\n"},
        FUNCTION,
        "grading",
        "secrets",
        "passed",
    ),
    Forgery(
        "equals everything",
        {"stats.py": EQUAL},
        FUNCTION,
        "jobs",
        '_strict_equality(ast.parse(parts["source"]))',
        "ast.parse(parts['source'])",
    ),
    Forgery(
        "equals everything, to unittest",
        {"stats.py": EQUAL},
        UNITTEST.replace("        self.assertTrue(mean([2]) == 2)\n", ""),
        "jobs",
        "    unittest.TestCase.assertEqual = _assert_equal  # type: ignore[method-assign]\n",
        "",
    ),
    Forgery(
        "patches assertions",
        {
            "stats.py": WRONG + "import unittest\nfor name in 'assertEqual', 'assertTrue':\n"
            "    setattr(unittest.TestCase, name, lambda *a: None)\n"
        },
        UNITTEST,
        "jobs",
        "        if owner.get(name) is not value:",
        "        if False:",
    ),
    Forgery(
        "patches the standard library",
        {"stats.py": WRONG + "import math\nmath.isclose = lambda *a: True\n"},
        "import math\nfrom stats import mean\ndef test_mean():\n"
        "    assert math.isclose(mean([1, 2]), 1.5)\n",
        "jobs",
        "        if owner.get(name) is not value:",
        "        if False:",
    ),
    Forgery(
        "shadows the standard library",
        {"stats.py": WRONG.replace("7", "1"), "statistics.py": "def fmean(xs): return 1\n"},
        IMPORTS,
        "jobs",
        "    sys.path.append(folder)\n    module =",
        "    sys.path.insert(0, folder)\n    trusted = []\n"
        "    sys.modules.pop('statistics', None)\n    module =",
    ),
    Forgery(
        "reads the tests",
        {
            "stats.py": "import glob, re\ndef mean(xs):\n"
            "    for name in glob.glob('/tests/*.py'):\n"
            "        text = open(name).read()\n"
            "        return float(re.search(r'== ([0-9.]+)', text)[1])\n"
        },
        FUNCTION,
        "grading",
        "archive_of",
        "",
    ),
    Forgery(
        "rewrites what the tests read",
        {
            "stats.py": "import json\njson.dump([[[1], 7]], open('/tests/answers.json', 'w'))\n"
            + WRONG
        },
        DATA,
        "keeper",
        "            self.confinement.make_read_only(protocol.TESTS)",
        "            pass",
    ),
    Forgery(
        "shadows what the script imports",
        {
            "stats.py": WRONG,
            "json.py": "import os, sys\nprint(1.5)\nsys.stdout.flush()\nos._exit(0)\n",
        },
        SCRIPT,
        "grading",
        "_SCRIPT",
        "exec {shell} /tests/{script}\n",
    ),
    Forgery(
        "kills the script",
        {
            "stats.py": "import os, signal\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
            "for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):\n"
            "    if b'/tests/test.sh' in open(f'/proc/{pid}/cmdline', 'rb').read():\n"
            "        os.kill(pid, signal.SIGKILL)\n"
        },
        SCRIPT,
        "jobs",
        "    if os.WIFSIGNALED(status) or alive:",
        "    if False:",
    ),
    Forgery(
        "waits behind the script",
        {
            "stats.py": "import os, subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 0.1; "
            "echo 1 > /logs/verifier/reward.txt; sleep 9'], stdout=2, start_new_session=True)\n"
            + WRONG
        },
        SCRIPT,
        "jobs",
        "    if os.WIFSIGNALED(status) or alive:",
        "    if os.WIFSIGNALED(status):",
    ),
)


def laid(test: str) -> tuple[dict[str, str | bytes], bool]:
    is_script = test.startswith("#!")
    answers = json.dumps([[[1, 2], 1.5], [[3], 3]])
    return {"test.sh" if is_script else "test_stats.py": test, "answers.json": answers}, is_script


async def verdict_on(pool: SandboxPool, files: Mapping[str, str], test: str) -> Verdict:
    async with await pool.open_session(files) as session:
        tests, is_script = laid(test)
        if is_script:
            return await grading.verify(session, tests, "test.sh", 10)
        return await grading.grade(session, tests, 10)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SPEC) as pool:
        yield pool


def play(pool: SandboxPool, files: Any, script: Callable[[Session], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with await pool.open_session(files) as session:
            return await script(session)

    return asyncio.run(main())


@pytest.mark.parametrize("test", [FUNCTION, UNITTEST, IMPORTS, DATA, SCRIPT])
def test_right_code_passes_and_wrong_code_fails(pool: SandboxPool, test: str) -> None:
    right = asyncio.run(verdict_on(pool, {"stats.py": RIGHT}, test))
    assert right.is_passed and right.reward == 1.0, right
    wrong = asyncio.run(verdict_on(pool, {"stats.py": WRONG}, test))
    assert not wrong.is_passed and wrong.reward == 0.0, wrong


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda f: f.name)
def test_a_forgery_does_not_pay(pool: SandboxPool, forgery: Forgery) -> None:
    verdict = asyncio.run(verdict_on(pool, forgery.files, forgery.test))
    assert verdict.reward == 0.0 and not verdict.is_passed, verdict


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda f: f.name)
def test_without_its_defence_the_forgery_pays(
    forgery: Forgery, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgery.module != "grading":
        path = f"/sbx/nanorl/sandbox/{forgery.module}.py"
        data = bwrap.worker_data()
        text = data[path].decode()
        assert forgery.defence in text, "the defence has moved"
        data[path] = text.replace(forgery.defence, forgery.without).encode()
        monkeypatch.setattr(bwrap, "worker_data", lambda: data)
    elif forgery.defence == "archive_of":
        whole = laid(forgery.test)[0]
        archive_of = grading.archive_of
        monkeypatch.setattr(grading, "archive_of", lambda files, spec: archive_of(whole, spec))
    elif forgery.defence == "secrets":
        monkeypatch.setattr(grading.secrets, "token_bytes", lambda n: forgery.without.encode())
    else:
        monkeypatch.setattr(grading, forgery.defence, forgery.without)
    with SandboxPool(replace(SPEC, warm_sessions=0)) as pool:
        verdict = asyncio.run(verdict_on(pool, forgery.files, forgery.test))
    assert verdict.reward == 1.0, verdict


LEFT_BEHIND = """
import builtins, os, subprocess, sys, unittest
builtins.float = builtins.round = lambda x: 1.5
unittest.TestCase.run = lambda *a: None
os.environ.update(PYTHONPATH="/work", PYTHONSTARTUP="/work/right.py", BASH_ENV="/work/right.sh")
for name in "conftest", "sitecustomize", "usercustomize", "pytest":
    open(f"{name}.py", "w").write("import stats; stats.mean = lambda xs: 1.5")
open("/tmp/stats.py", "w").write("def mean(xs): return sum(xs) / len(xs)")
loop = "while true; do cp /tmp/stats.py stats.py; echo 1 > /logs/verifier/reward.txt; done"
subprocess.Popen(["sh", "-c", loop], start_new_session=True)
"""


def test_what_runs_or_was_patched_in_the_session_does_not_reach_the_verdict(
    pool: SandboxPool,
) -> None:
    async def script(session: Session) -> None:
        assert (await session.repl(LEFT_BEHIND, 5)).status == "ok"
        await session.run(LEFT_BEHIND, 5)
        await session.write("stats.py", WRONG)
        for test in (FUNCTION, UNITTEST, SCRIPT):
            tests, is_script = laid(test)
            graded = (
                await grading.verify(session, tests, "test.sh", 10)
                if is_script
                else await grading.grade(session, tests, 10)
            )
            assert graded.reward == 0.0, graded
        checked = await grading.check(session, CASES, 5)
        assert checked.reward == 0.0, checked

    play(pool, {"stats.py": WRONG}, script)


CASES = [
    Case("from stats import mean\nresult = mean([1, 2])", expected=1.5),
    Case("from stats import mean\nresult = mean([])", raises="ValueError"),
]


def test_cases_compare_values_outside(pool: SandboxPool) -> None:
    async def script(session: Session) -> Verdict:
        return await grading.check(session, CASES, 5)

    assert play(pool, {"stats.py": RIGHT}, script).is_passed
    half = play(pool, {"stats.py": RIGHT.replace("ValueError", "KeyError")}, script)
    assert half.reward == 0.5 and list(half.failed) == ["case 1"]


WITHOUT_THE_VALUE = (
    EQUAL,
    WRONG,
    "import os\nos._exit(0)",
    "raise SystemExit(0)",
    "import os\nos.write(1, b'{}')\nos.write(3, b'null')\nos._exit(0)",
    "import os\nos.write(3, b'[' * 50000)\nos._exit(0)",
    "import os\nos.write(3, b'9' * 50000)\nos._exit(0)",
    "import json\njson.dumps = lambda *a, **k: 'passed'\ndef mean(xs): return 1",
    "import time\ntime.sleep(60)",
    "print('x' * 100_000)",
)


def test_no_code_passes_a_case_but_by_the_value(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        for source in WITHOUT_THE_VALUE:
            await session.write("stats.py", source)
            assert (await grading.check(session, CASES[:1], 1)).reward == 0.0, source

    play(pool, {}, script)


REWARDS = (
    ("echo 0.25 > $V/reward.txt", 0.25),
    ("""echo '{"reward": 0.5, "style": 1}' > $V/reward.json""", 0.5),
    ("""echo '{"speed": 2}' > $V/reward.json""", 2.0),
    ("""echo '{"a": 1, "b": 1}' > $V/reward.json""", 0.0),
    ("echo yes > $V/reward.txt", 0.0),
    ("echo NaN > $V/reward.txt", 0.0),
    ("echo true > $V/reward.txt", 0.0),
    ("head -c 50000 /dev/zero | tr '\\0' '[' > $V/reward.txt", 0.0),
    ("head -c 999999 /dev/zero > $V/reward.txt", 0.0),
    ("ln -s /work/one $V/reward.txt; echo 1 > /work/one", 0.0),
    ("sleep 60", 0.0),
    ("exit 0", 0.0),
    ("echo 1 > $V/reward.txt; exit 3", 1.0),
)


def test_a_scripts_reward_is_a_number_in_its_file(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        for written, reward in REWARDS:
            tests = {"test.sh": f"#!/bin/sh\nV=/logs/verifier\n{written}\n"}
            graded = await grading.verify(session, tests, "test.sh", 2)
            assert graded.reward == reward, (written, graded)

    play(pool, {}, script)


def test_a_folder_that_cannot_be_copied_is_a_failed_one(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.shell("for i in 1 2 3 4; do truncate -s 15M sparse$i; done", 5)
        assert (await grading.check(session, CASES, 5)).reward == 0.0
        assert (await grading.grade(session, laid(FUNCTION)[0], 5)).reward == 0.0
        assert (await grading.verify(session, laid(SCRIPT)[0], "test.sh", 5)).reward == 0.0

    play(pool, {"stats.py": RIGHT}, script)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", "no test_"),
        ("def test_a(tmp_path): pass", "takes fixtures"),
        ("async def test_a(): pass", "is async"),
        ("def test_a(: pass", "line 1"),
    ],
)
def test_tests_that_cannot_be_run_are_refused(pool: SandboxPool, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        play(pool, {}, lambda session: grading.grade(session, {"test_a.py": text}, 5))
