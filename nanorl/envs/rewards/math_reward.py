"""Mathematical equality through the package math-verify: 1/2, 0.5 and \\frac{1}{2} are one answer.

What the policy wrote is parsed in a process of its own with a limit of CPU seconds and of memory,
so an answer such as 9^{9^{9^9}} is wrong on a busy machine and on an idle one alike; only the time
of the wall, which the machine is to blame for, is infrastructure.
Left out: answers in sentences. An answer is a formula or the last \\boxed{...}; a text with words
earns something only where it equals the expected one, so naming several answers does not pay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nanoengine.extras import missing
from nanorl.envs.hosting.fork import NoResultError, call_in_fork
from nanorl.envs.hosting.host_pool import HostingLimits, WorkerPool
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.rewards.rule import RuleReward
from nanorl.task import Task
from nanorl.types import Rollout

_MAX_CHARACTERS = 2000
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "sec", "csc", "cot", "log", "ln", "exp", "sqrt", "pi", "oo", "inf"]
)
_NAME = re.compile(r"\\?[a-zA-Z]+")
_TEXT = re.compile(r"\\(?:text|mathrm|operatorname|mathbf|begin|end)\s*\{[^{}]*\}")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\.\s|\.\.|\{\s*\}|.", re.DOTALL)
# math-verify reads one side of "7 \\approx 8", and of much else; these leave nothing unread.
_COMMANDS = (
    *(*_FUNCTIONS, "frac", "dfrac", "tfrac", "cdot", "times", "div", "binom", "left", "right"),
    *("infty", "alpha", "beta", "gamma", "theta", "lambda", "mu", "phi", "omega"),
    *("{", "}", ",", "!", " "),
)
_PLAIN_TOKENS = frozenset(
    (
        *"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/^(){}[]=,.! ",
        *(f"\\{name}" for name in _COMMANDS),
    )
)


class MathReward:
    """Compares `transcript.answer` with `task.answer`, both LaTeX or plain formulas."""

    def __init__(self, *, cpu_s: int = 5, memory_mb: int = 2048, num_workers: int = 1) -> None:
        """`cpu_s` and `memory_mb`: what one comparison may take."""
        _require_math_verify()
        self._rule = RuleReward()
        limits = HostingLimits(deadline_s=60.0 + 20 * cpu_s)
        self._pool = WorkerPool(
            MathComparison, (cpu_s, memory_mb << 20), num_workers=num_workers, limits=limits
        )

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        given = formula_in(transcript.answer)
        is_right = (await self._rule.score(rollout, task, transcript)).total == 1.0
        if not is_right and given is not None:
            expected = formula_in(str(task.answer))
            if expected is not None and is_one_formula(given, expected):
                is_right = await self._pool.call("compare", given, expected)
        return Score(float(is_right))

    def close(self) -> None:
        """End the workers. Closing twice is fine."""
        self._pool.close()


@dataclass(frozen=True)
class MathComparison:
    """Lives in a worker, which has imported math-verify; every comparison is a fork of it."""

    cpu_s: int
    memory_bytes: int

    def compare(self, given: str, expected: str) -> bool:
        """Say whether the formulas are equal; False where there is no verdict."""
        verify = _require_math_verify()

        def is_equal() -> bool:
            wanted, said = _parse(verify, expected), _parse(verify, given)
            return bool(wanted and said and verify.verify(wanted, said, timeout_seconds=None))

        try:
            result = call_in_fork(is_equal, cpu_s=self.cpu_s, memory_bytes=self.memory_bytes)
        except NoResultError:  # no verdict
            return False
        return bool(result)


def formula_in(text: str | None) -> str | None:
    """The formula that a text is, or the last that it puts into a box; None for another text."""
    if text is None or len(text) > _MAX_CHARACTERS:
        return None
    if "\\boxed" in text:
        text = _last_box(text)
    text = text.strip().strip("$").strip()
    words = set(_WORD.findall(_TEXT.sub("", text))) - _FUNCTIONS
    return None if not text or words or "$" in text else text


def is_one_formula(given: str, expected: str) -> bool:
    """Say whether nothing in the formula could be left unread: its tokens are plain, or the
    expected one has them too; an equation names a single letter on its left, as in x = 7."""
    if not set(_TOKEN.findall(given)) <= _PLAIN_TOKENS | set(_TOKEN.findall(expected)):
        return False
    names, *rest = given.split("=")
    return "=" in expected or not rest or (len(rest) == 1 and bool(_NAME.fullmatch(names.strip())))


def _last_box(text: str) -> str:
    """The content of the last \\boxed{...}; empty for one that is not closed."""
    rest = text.rpartition("\\boxed")[2].lstrip()
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i]
    return ""


def _parse(verify: Any, formula: str) -> list[Any]:
    return verify.parse(f"${formula}$", parsing_timeout=None)


def _require_math_verify() -> Any:
    try:
        import math_verify  # here: an extra
    except ImportError as error:
        raise missing("the reward 'math'", "math-verify", extra="math") from error
    return math_verify
