"""`math`: problems whose answer is a formula, compared by value through math-verify.

The answer is the last \\boxed{...} of a turn, or what follows its last "Answer:". It pays 1 if it
equals the task's (1/2, 0.5 and \\frac{1}{2} are one answer), else nothing; an answer with words, or
with several formulas, is none (rewards/math_reward.py). Problems of your own come with --tasks, a
prompt and an answer each; without, small ones are drawn: equations, fractions, powers, percentages
and derivatives.

    nanorl train --env math --tasks problems.jsonl

The teacher boxes the right answer without a derivation. Left out: proofs, and answers in sentences.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Env
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.rewards.math_reward import MathReward
from nanorl.task import Task


class MathProblems(Env):
    """Problems of `kinds` (names with commas between; all of them by default)."""

    system = "Solve the problem. Put the final answer into \\boxed{}."
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turns": 1,
            "agent.max_turn_tokens": 64,
            "agent.max_context_tokens": 384,
            "warm_start.steps": 40,
        }
    )

    def __init__(self, kinds: str = "") -> None:
        self.kinds = tuple(kinds.split(",")) if kinds else tuple(PROBLEMS)
        for kind in self.kinds:
            if kind not in PROBLEMS:
                raise ValueError(f"--env-args kinds={kinds}: {kind!r} is none of {list(PROBLEMS)}")

    def setup(self) -> MathReward:
        return MathReward()

    def tasks(self, rng: random.Random) -> Task:
        kind = rng.choice(self.kinds)
        prompt, answer = PROBLEMS[kind](rng)
        return Task(prompt, answer, kind=kind)

    async def score(self, transcript: Transcript) -> Score:
        return await self.shared.score(self.rollout, self.task, transcript)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        return f"\\boxed{{{self.task.answer_text}}}"


def _equation(rng: random.Random) -> tuple[str, str]:
    a, root, b = rng.randint(2, 9), rng.randint(-12, 12), rng.randint(1, 30)
    return f"Solve ${a}x + {b} = {a * root + b}$ for $x$.", str(root)


def _fractions(rng: random.Random) -> tuple[str, str]:
    one, other = (Fraction(rng.randint(1, 9), rng.randint(2, 9)) for _ in range(2))
    return f"What is ${_latex(one)} + {_latex(other)}$?", _latex(one + other)


def _power(rng: random.Random) -> tuple[str, str]:
    base, exponent = rng.randint(2, 12), rng.randint(2, 3)
    less = rng.randint(1, 20)
    return f"What is ${base}^{exponent} - {less}$?", str(base**exponent - less)


def _percentage(rng: random.Random) -> tuple[str, str]:
    share, whole = rng.randrange(5, 100, 5), rng.randrange(20, 400, 10)
    return f"What is ${share}\\%$ of ${whole}$?", _latex(Fraction(share * whole, 100))


def _derivative(rng: random.Random) -> tuple[str, str]:
    a, b, at = rng.randint(2, 6), rng.randint(2, 9), rng.randint(1, 6)
    return f"Let $f(x) = {a}x^2 + {b}x$. What is $f'({at})$?", str(2 * a * at + b)


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


PROBLEMS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {
        "equation": _equation,
        "fractions": _fractions,
        "power": _power,
        "percentage": _percentage,
        "derivative": _derivative,
    }
)
"""What is drawn where nobody brings problems: a question and its answer, by kind."""
