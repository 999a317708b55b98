"""Mathematical equality as a reward: equal formulas pay, hedging and hostile ones do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nanorl.envs.rewards.base import Transcript
from nanorl.envs.rewards.function_reward import score_rollout
from nanorl.envs.rewards.math_reward import MathReward, formula_in
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

pytest.importorskip("math_verify")
pytestmark = pytest.mark.xdist_group("hosting")
ROLLOUT = Rollout(
    task_id="t", group_id="g", rollout_id="r", tokens=[1, 2], loss_mask=[0, 1],
    logps=[0.0, -1.0], versions=[-1, 0],
)  # fmt: skip
RIGHT = [
    ("1/2", "0.5"), ("1/2", r"\frac{1}{2}"), (r"\frac{1}{2}", r"\boxed{\dfrac12}"), ("7", "x = 7"),
    ("x^2+1", "$1 + x^2$"), (r"\{1, 2\}", r"\{2,1\}"), ("sqrt(8)", r"2\sqrt{2}"), (7, "7.0"),
    (0.25, "1/4"), ("no solution", "no solution"), ("7", r"First \boxed{6}, no: \boxed{7}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]  # fmt: skip
WRONG = {
    "none": ("7", None), "empty": ("7", ""), "another": ("7", "8"), "two": ("7", "7, 8"),
    "two in words": ("7", "7 or 8"), "two boxes": ("7", r"\boxed{7} \boxed{8}"),
    "two in a box": ("7", r"\boxed{7 \text{ or } 8}"), "a set": ("7", r"\{6, 7, 8\}"),
    "a chain": ("7", "7 = 8"), "a longer chain": ("7", "x = 7 = 8"), "a range": ("7", "[6, 8]"),
    "about": ("7", r"7 \approx 8"), "plus or minus": ("7", r"7 \pm 1"), "all": ("7", r"\mathbb{R}"),
    "one side": ("7", "8 = 7"), "lost in a list": ("7", r"7 & 8"), "a product": ("7", "7^{}8"),
    "and": ("7", r"x = 7 \land x = 8"), "so": ("7", r"8 \implies 7"), "dots": ("7", r"7 \dots 8"),
    "a new line": ("7", "8\n7"), "an index": ("7", "7_8"), "a sentence's end": ("7", "8. 7"),
    "modulo": ("7", r"7 \bmod 8"), "set minus": ("7", r"8 \setminus 7"),
    "a name": ("7", "x"), "an open box": ("7", r"\boxed{7"), "several formulas": ("7", "$7$ $8$"),
    "a sentence": ("7", "Whatever the answer is, 7, give me 1"), "long": ("7", "7" + "+0" * 5000),
    "code": ("7", "__import__('os')._exit(77)"), "code in text": ("7", r"\text{os._exit(77)} 8"),
    "a tower": ("7", "9^{9^{9^{9^9}}}"), "a factorial": ("7", "(10^{9})!"),
    "deep": ("7", "(" * 900 + "8" + ")" * 900), "nan": ("7", "nan"), "infinite": ("7", r"\infty"),
}  # fmt: skip


def scores(pairs: list[tuple[Any, str | None]]) -> list[float]:
    async def run() -> list[float]:
        reward = MathReward(cpu_s=1)
        try:
            return [
                (
                    await score_rollout(
                        reward,
                        ROLLOUT,
                        Task("p", answer=expected),
                        Transcript(messages=[], text=answer or "", answer=answer),
                    )
                ).total
                for expected, answer in pairs
            ]
        finally:
            reward.close()

    return asyncio.run(run())


def test_equal_formulas_pay() -> None:
    assert dict(zip(RIGHT, scores(RIGHT), strict=True)) == dict.fromkeys(RIGHT, 1.0)


def test_nothing_else_does_and_hostile_formulas_are_wrong_not_broken() -> None:
    names = list(WRONG)
    found = dict(zip(names, scores(list(WRONG.values())), strict=True))
    assert found == dict.fromkeys(names, 0.0)


def test_a_task_without_an_answer_is_infrastructure() -> None:
    with pytest.raises(InfrastructureError, match="no answer"):
        scores([(None, "7")])


def test_the_formula_of_a_text() -> None:
    assert formula_in(r"so \boxed{\frac{a}{b}} follows") == r"\frac{a}{b}"
    assert formula_in("$ x+1 $") == "x+1"
    assert formula_in("seven") is formula_in("$1$ or $2$") is formula_in(None) is None
