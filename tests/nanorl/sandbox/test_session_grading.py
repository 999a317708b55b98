"""What an agent leaves in its folder or running cannot decide the verdict; each defence is needed.

Every forgery is tried twice: as things are it does not pay, and with its one defence taken out it
does. A defence inside the sandbox is taken out of the text that the sandbox is given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from nanorl.sandbox import SandboxPool, SandboxSpec, bwrap, grading
from nanorl.sandbox.grading import Case, Verdict
from nanorl.sandbox.session import Session

pytestmark = pytest.mark.sandbox
SPEC = SandboxSpec(timeout_s=60.0, tmp_bytes=16 << 20)
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
while [ -e /tmp/behind ]; do sleep 0.01; done
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


# Leaves a process that writes a verdict of its own behind the script's, which waits for that.
BEHIND = """
import os, subprocess, sys
reward = '/logs/verifier/reward.txt'
open('/tmp/behind', 'w').close()
code = f'''
import os, time
def is_old(found): return found.st_mtime_ns == {os.stat(reward).st_mtime_ns} or not found.st_size
while is_old(os.stat({reward!r})): time.sleep(0.01)
open({reward!r}, 'w').write('1')
os.unlink('/tmp/behind')
'''
subprocess.Popen([sys.executable, '-c', code + LAST], stdout=2, start_new_session=True)
"""
# Writes a verdict of its own when the script imports it.
PAYS = (
    "import os\nREWARD = '/logs/verifier/reward.txt'\n"
    "open(REWARD, 'w').write('1')\ndef mean(xs): return 7\n"
)
WRITABLE = ("jobs", "        if not one.st_mode & stat.S_IWUSR:", "        if False:")
UNWAITED = ("jobs", "    if found and last_ns >= found[0].st_ctime_ns:", "    if False:")


@dataclass(frozen=True)
class Forgery:
    """`defences`: module, text and what stands there without it; or a name in `grading`."""

    name: str
    files: Mapping[str, str]
    test: str
    defences: tuple[tuple[str, str, str], ...]


# Without it the program's modules are imported by the test itself.
APART = (
    "jobs",
    '    Finder(Tests(channel, parts["source"])).install()\n',
    "    sys.path.append('/work')\n",
)
TEST_STARTS = "    output, channel = _private_output(), socket.socket(fileno=os.dup(0))\n"
END_REPORTED_FIRST = (
    TEST_STARTS + "    write_all(output, parts['nonce'])\n    parts['nonce'] = b''\n"
)
HIDDEN = ("jobs", "    confinement.unmount(protocol.TESTS)\n", "")
FORGERIES = (
    Forgery(
        "exits early",
        {"stats.py": "import os\ndef mean(xs): os._exit(0)\n"},
        FUNCTION,
        (APART, ("jobs", TEST_STARTS, END_REPORTED_FIRST)),
    ),
    Forgery(
        "exits early, apart",
        {"stats.py": "import os\ndef mean(xs): os._exit(0)\n"},
        FUNCTION,
        (
            ("jobs", TEST_STARTS, END_REPORTED_FIRST),
            (
                "tests_side",
                'before the test did".encode())\n        exit_now(1)',
                '".encode())\n        exit_now(0)',
            ),
        ),
    ),
    Forgery(
        "prints the verdict",
        {
            "stats.py": "import os\nfor n in 1, 3, 4: \n    try: os.write(n, b'passed')\n"
            "    except OSError: pass\nos._exit(0)\n"
        },
        FUNCTION,
        (APART, ("grading", "secrets", "passed")),
    ),
    Forgery("equals everything", {"stats.py": EQUAL}, FUNCTION, (APART,)),
    Forgery(
        "equals everything, to unittest",
        {"stats.py": EQUAL},
        UNITTEST.replace("        self.assertTrue(mean([2]) == 2)\n", ""),
        (APART,),
    ),
    Forgery(
        "patches assertions",
        {
            "stats.py": WRONG + "import unittest\nfor name in 'assertEqual', 'assertTrue':\n"
            "    setattr(unittest.TestCase, name, lambda *a: None)\n"
        },
        UNITTEST,
        (APART,),
    ),
    Forgery(
        "patches the standard library",
        {"stats.py": WRONG + "import math\nmath.isclose = lambda *a: True\n"},
        "import math\nfrom stats import mean\ndef test_mean():\n"
        "    assert math.isclose(mean([1, 2]), 1.5)\n",
        (APART,),
    ),
    Forgery(
        "reads the right value from the test's memory",
        {
            "stats.py": "import sys\ndef mean(xs):\n    frame = sys._getframe()\n"
            "    while frame:\n        if 'want' in frame.f_locals: return frame.f_locals['want']\n"
            "        frame = frame.f_back\n"
        },
        "from stats import mean\ndef test_mean():\n    want = 1.5\n"
        "    assert mean([1, 2]) == want\n",
        (APART,),
    ),
    Forgery(
        "shadows the standard library",
        {"stats.py": WRONG.replace("7", "1"), "statistics.py": "def fmean(xs): return 1\n"},
        IMPORTS,
        (
            (
                *APART[:2],
                "    sys.path.insert(0, '/work')\n    sys.modules.pop('statistics', None)\n",
            ),
        ),
    ),
    Forgery(
        "shadows the standard library, apart",
        {"stats.py": WRONG.replace("7", "1"), "statistics.py": "def fmean(xs): return 1\n"},
        IMPORTS,
        (
            (
                "tests_side",
                'is_own = name.partition(".")[0] in sys.stdlib_module_names',
                "is_own = False",
            ),
            (
                "tests_side",
                "own := importlib.machinery.PathFinder.find_spec(name, self._paths)",
                "own := None",
            ),
            ("jobs", "    sys.path.append(sys.path.pop(0))\n", ""),
            ("jobs", TEST_STARTS, TEST_STARTS + "    sys.modules.pop('statistics', None)\n"),
        ),
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
        (("grading", "archive_of", ""), HIDDEN),
    ),
    Forgery(
        "reads what the tests read",
        {
            "stats.py": "import json\nanswers = iter(json.load(open('/tests/answers.json')))\n"
            "def mean(xs): return next(answers)[1]\n"
        },
        DATA,
        (HIDDEN,),
    ),
    Forgery(
        "rewrites what the tests read",
        {
            "stats.py": "import json\njson.dump([[[1], 7]], open('/tests/answers.json', 'w'))\n"
            + WRONG
        },
        DATA,
        (
            (
                "keeper",
                "            self.confinement.make_read_only(protocol.TESTS)",
                "            pass",
            ),
            HIDDEN,
        ),
    ),
    Forgery(
        "shadows what the script imports",
        {
            "stats.py": WRONG,
            "json.py": "import os, sys\nprint(1.5)\nsys.stdout.flush()\nos._exit(0)\n",
        },
        SCRIPT,
        (("grading", "_SCRIPT", "exec {shell} /tests/{script}\n"),),
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
        (("jobs", " if os.WIFSIGNALED(status) else _doubt(last_ns)", " if False else ''"),),
    ),
    Forgery(
        "waits behind the script",
        {"stats.py": BEHIND.replace("LAST", "'time.sleep(9)'") + WRONG},
        SCRIPT,
        (UNWAITED,),
    ),
    Forgery(
        "writes behind the script, and ends",
        {"stats.py": BEHIND.replace("LAST", "''") + WRONG},
        SCRIPT,
        (UNWAITED,),
    ),
    Forgery(
        "makes its own verdict read-only",
        {"stats.py": PAYS + "os.chmod(REWARD, 0o444)\n"},
        SCRIPT,
        (WRITABLE,),
    ),
    Forgery(
        "leads the script's verdict elsewhere",
        {
            "stats.py": PAYS + "os.rename(REWARD, REWARD + '.own')\n"
            "os.symlink(REWARD + '.own', REWARD)\nos.chmod(REWARD, 0o444)\n"
        },
        SCRIPT,
        (WRITABLE, ("jobs", "        if not stat.S_ISREG(one.st_mode):", "        if False:")),
    ),
    Forgery(
        "leaves no room for another verdict",
        {
            "stats.py": "import os\nos.unlink('/logs/verifier/reward.txt')\n"
            "open('/logs/verifier/reward.json', 'w').write('1')\n"
            "try:\n    for n in range(9999): open(f'/logs/verifier/{n}', 'w')\n"
            "except OSError: pass\n" + WRONG
        },
        SCRIPT,
        (("jobs", "    if not (space.f_bavail and space.f_favail):", "    if False:"),),
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
            return await grading.verify(session, tests, "test.sh", 60)
        return await grading.grade(session, tests, 60)


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
    data = bwrap.worker_data()
    for module, defence, without in forgery.defences:
        if module != "grading":
            path = f"/sbx/nanorl/sandbox/{module}.py"
            text = data[path].decode()
            assert defence in text, "the defence has moved"
            data[path] = text.replace(defence, without).encode()
        elif defence == "archive_of":
            lay = partial(grading.archive_of, laid(forgery.test)[0])
            monkeypatch.setattr(grading, "archive_of", lambda _, spec, lay=lay: lay(spec))
        elif defence == "secrets":
            said = without.encode()
            monkeypatch.setattr(grading.secrets, "token_bytes", lambda n, said=said: said)
        else:
            monkeypatch.setattr(grading, defence, without)
    monkeypatch.setattr(bwrap, "worker_data", lambda: data)
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
        assert (await session.repl(LEFT_BEHIND, 60)).status == "ok"
        await session.run(LEFT_BEHIND, 60)
        await session.write("stats.py", WRONG)
        for test in (FUNCTION, UNITTEST, SCRIPT):
            tests, is_script = laid(test)
            graded = (
                await grading.verify(session, tests, "test.sh", 60)
                if is_script
                else await grading.grade(session, tests, 60)
            )
            assert graded.reward == 0.0, graded
        checked = await grading.check(session, CASES, 60)
        assert checked.reward == 0.0, checked

    play(pool, {"stats.py": WRONG}, script)


CASES = [
    Case("from stats import mean\nresult = mean([1, 2])", expected=1.5),
    Case("from stats import mean\nresult = mean([])", raises="ValueError"),
]


def test_cases_compare_values_outside(pool: SandboxPool) -> None:
    async def script(session: Session) -> Verdict:
        return await grading.check(session, CASES, 60)

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
    ("""echo '{"speed": 0.75}' > $V/reward.json""", 0.75),
    ("""echo '{"speed": 2}' > $V/reward.json""", 0.0),
    ("""echo '{"reward": 1, "seconds": 1e12}' > $V/reward.json""", 1.0),
    ("echo 1e300 > $V/reward.txt", 0.0),
    ("echo -1 > $V/reward.txt", 0.0),
    ("echo 1e999 > $V/reward.txt", 0.0),
    ("echo 1 > $V/own; ln -s own $V/reward.txt", 0.0),
    ("mkdir $V/reward.txt; echo 1 > $V/reward.json", 0.0),
    ("echo 1 > $V/reward.txt; chmod 444 $V/reward.txt", 0.0),
    ("echo 1 > $V/reward.json; chmod 555 $V", 0.0),
    ("mv $V /tmp/own; echo 1 > /tmp/own/reward.txt; ln -s /tmp/own $V", 0.0),
    ("sleep 0.1 & wait; echo 1 > $V/reward.txt", 1.0),
    (
        "(sleep 0.1 & echo $! > /tmp/pid); while kill -0 $(cat /tmp/pid); do sleep 0.01; done\n"
        "sleep 2; echo 1 > $V/reward.txt",
        1.0,
    ),
    ("echo 1 > $V/reward.txt; (sleep 0.1 &); sleep 0.3", 0.0),
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
            limit_s = 2 if written == "sleep 60" else 30  # of all others the reward counts
            graded = await grading.verify(session, tests, "test.sh", limit_s)
            assert graded.reward == reward, (written, graded)

    play(pool, {}, script)


def test_a_folder_that_cannot_be_copied_is_a_failed_one(pool: SandboxPool) -> None:
    async def script(session: Session) -> None:
        await session.shell("for i in 1 2 3 4; do truncate -s 15M sparse$i; done", 60)
        assert (await grading.check(session, CASES, 60)).reward == 0.0
        assert (await grading.grade(session, laid(FUNCTION)[0], 60)).reward == 0.0
        assert (await grading.verify(session, laid(SCRIPT)[0], "test.sh", 60)).reward == 0.0

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
        play(pool, {}, lambda session: grading.grade(session, {"test_a.py": text}, 60))
