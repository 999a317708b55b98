"""`Repair`: a small repository with a bug; hidden calls say whether it was repaired.

    nanorl train --env repair

Tasks are made: a module of a few functions, one of which is changed for the worse, with its names
and numbers drawn anew. The right values of the hidden calls are computed here, from the module
before the change; they never enter the sandbox, so nothing in the folder can decide the verdict
(`check` in nanorl/sandbox/grading.py). One task in four, by its content, is held out.
The reward is 1 if every call is answered rightly, else 0; the share is recorded as a part.
Left out: bugs across several functions, and repositories of the user's own (envs/harbor.py).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.tools.workspace import bash, edit, read, submit, write
from nanorl.sandbox.grading import Case, check
from nanorl.task import Task

_NUM_CASES = 12
_CASE_LIMIT_S = 5.0

Draw = Callable[[random.Random], list[Any]]


@dataclass(frozen=True)
class _Function:
    """A right function: `$a`, `$b`... are names, `#n` a number; `bugs` are (right, wrong)."""

    name: str
    does: str
    text: str
    bugs: tuple[tuple[str, str], ...]
    arguments: Draw


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-9, 9) for _ in range(rng.randint(1, 7))]


def _words(rng: random.Random) -> str:
    words = ["red", "blue", "oak", "level", "noon", "tree", "stats", "sun", "Anna", "map"]
    return " ".join(rng.choices(words, k=rng.randint(1, 6)))


_FUNCTIONS = (
    _Function(
        "largest_gap",
        "returns the largest difference between two neighbours of the sorted list, 0 for one item",
        """def largest_gap($a):
    $b = sorted($a)
    return max(($b[i + 1] - $b[i] for i in range(len($b) - 1)), default=0)
""",
        (
            ("sorted($a)", "list($a)"),
            ("max(", "min("),
            ("default=0", "default=1"),
            ("len($b) - 1", "len($b) - 2"),
        ),
        lambda rng: [_numbers(rng)],
    ),
    _Function(
        "running_total",
        "returns the list of sums of the first 1, 2, 3... items",
        """def running_total($a):
    $b, total = [], 0
    for item in $a:
        total += item
        $b.append(total)
    return $b
""",
        (
            ("total += item", "total = item"),
            ("$b.append(total)", "$b.append(item)"),
            ("    return $b", "        return $b"),
            ("total = [], 0", "total = [], 1"),
        ),
        lambda rng: [_numbers(rng)],
    ),
    _Function(
        "count_words",
        "returns how often each word longer than #n letters occurs, by the word in lower case",
        """def count_words($a):
    $b = {}
    for word in $a.lower().split():
        if len(word) > #n:
            $b[word] = $b.get(word, 0) + 1
    return $b
""",
        (
            (".lower()", ""),
            ("> #n", ">= #n"),
            ("> #n", "< #n"),
            (", 0) + 1", ", 1) + 1"),
            ("$b.get(word, 0) + 1", "1"),
        ),
        lambda rng: [_words(rng)],
    ),
    _Function(
        "clamp_all",
        "returns the items of the list, each no less than -#n and no more than #n",
        """def clamp_all($a):
    $b = []
    for item in $a:
        $b.append(max(-#n, min(#n, item)))
    return $b
""",
        (
            ("max(-#n, min(#n, item))", "min(-#n, max(#n, item))"),
            ("min(#n, item)", "item"),
            ("max(-#n", "max(#n"),
            ("max(-#n", "max(0"),
        ),
        lambda rng: [_numbers(rng)],
    ),
    _Function(
        "rotate",
        "returns the list turned by `steps` to the right, the last items first",
        """def rotate($a, steps):
    if not $a:
        return []
    $b = steps % len($a)
    return $a[-$b:] + $a[:-$b] if $b else list($a)
""",
        (
            ("$a[-$b:] + $a[:-$b]", "$a[$b:] + $a[:$b]"),
            ("steps % len($a)", "steps"),
            ("if not $a:", "if len($a) < 3:"),
            ("$a[:-$b] if", "$a[:$b] if"),
        ),
        lambda rng: [_numbers(rng), rng.randint(0, 9)],
    ),
    _Function(
        "digits_in_base",
        "returns the digits of a number of 0 or more in base #n, the highest first",
        """def digits_in_base($a):
    $b = []
    while $a > 0:
        $a, digit = divmod($a, #n)
        $b.append(digit)
    return $b[::-1] or [0]
""",
        (
            ("$b[::-1]", "$b"),
            (" or [0]", ""),
            ("$a > 0", "$a > 1"),
            ("divmod($a, #n)", "divmod($a, 10)"),
        ),
        lambda rng: [rng.choice([0, 1, rng.randint(2, 999)])],
    ),
    _Function(
        "initials",
        "returns the first letters of the words in capitals, joined by the sign #s",
        """def initials($a):
    $b = [word[0].upper() for word in $a.split()]
    return "#s".join($b)
""",
        (
            ("word[0]", "word[-1]"),
            (".upper()", ""),
            ('"#s".join', '"".join'),
            ("word[0].upper()", "word.upper()"),
        ),
        lambda rng: [_words(rng)],
    ),
)
_FIRST_NAMES = ("values", "items", "data", "given", "source", "entries")
_SECOND_NAMES = ("result", "found", "out", "collected", "done", "kept")
_MODULES = ("tools", "helpers", "core", "library", "util")


class Repair(Env):
    """One repository with a bug."""

    system = (
        "There is a bug in the code of the working folder. Find it, repair it in the file, and "
        "submit. Your repair is tested with calls that you do not see."
    )
    tools = (bash, read, write, edit, submit)

    def tasks(self, rng: random.Random) -> Task:
        return draw_repair(rng)

    def step(self, text: str) -> Done:
        """A turn without a call hands in what there is."""
        return self.done(answer=text)

    async def score(self, transcript: Transcript) -> Score:
        cases = [Case(**case) for case in self.task.data["cases"]]
        verdict = await check(await self.session(), cases, _CASE_LIMIT_S)
        return Score(float(verdict.is_passed), parts={"share_of_calls": verdict.reward})


def draw_repair(rng: random.Random) -> Task:
    """A task whose bug is seen by at least one of its hidden calls."""
    while True:
        chosen = rng.sample(_FUNCTIONS, 2)
        names = {
            "$a": rng.choice(_FIRST_NAMES),
            "$b": rng.choice(_SECOND_NAMES),
            "#n": str(rng.randint(2, 5)),
            "#s": rng.choice("-.+/"),
        }
        broken, module = rng.choice(chosen), rng.choice(_MODULES)
        right, wrong = rng.choice(broken.bugs)
        sound = "\n\n".join(_filled(one.text, names) for one in chosen)
        bad = "\n\n".join(
            _filled(one.text.replace(right, wrong) if one is broken else one.text, names)
            for one in chosen
        )
        calls = [(one.name, one.arguments(rng)) for one in chosen for _ in range(_NUM_CASES // 2)]
        expected = [_value(sound, name, arguments) for name, arguments in calls]
        if expected != [_value(bad, name, arguments) for name, arguments in calls]:
            break
    does = "\n".join(f"{one.name} {_filled(one.does, names)}." for one in chosen)
    cases = [
        {"code": f"from {module} import {name}\nresult = {name}(*{arguments!r})", "expected": value}
        for (name, arguments), value in zip(calls, expected, strict=True)
    ]
    return Task(
        f"{module}.py should do this:\n{does}\nOne of them does not. Repair it.",
        kind=f"repair/{broken.name}",
        files={f"{module}.py": bad},
        data={"cases": cases, "right": sound},
    )


def _filled(text: str, names: dict[str, str]) -> str:
    return re.sub(r"[$#][abns]", lambda found: names[found[0]], text)


def _value(module: str, name: str, arguments: list[Any]) -> Any:
    """Make a call and return its value, as JSON has it; the module is one of the texts above."""
    namespace: dict[str, Any] = {}
    exec(module, namespace)
    try:
        return json.loads(json.dumps(namespace[name](*json.loads(json.dumps(arguments)))))
    except Exception as error:  # a bug may raise: that is a value like any other
        return f"raises {type(error).__name__}"
