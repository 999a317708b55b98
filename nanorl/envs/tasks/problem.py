"""A problem: a task together with programs that solve it, and the usual wrong way to try.

Generators are plain functions `(rng) -> Problem`; they compute the answer themselves, never by
running the program text, so that executing a solution is an independent check of the answer. Only
the teacher of the warm start reads `habit`, and it and hindsight (algorithms/hindsight.py) read
`solutions`; the policy and the environment see a `Task`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from nanorl.task import Task, content_id, split_of


@dataclass(frozen=True, kw_only=True)
class Problem(Task):
    """A task with its solutions.

        Problem(task_id="lists-5f0c...", kind="lists", prompt="For the list 3, 4, what is the sum?",
                answer="7", solutions=(("print(3 + 4)",), ("nums = [3, 4]\\nprint(sum(nums))",)),
                habit=("print(3 * 4)",))

    solutions  alternatives; each is the programs of one trace in order, the last prints the answer
    habit      programs a careless solver tends to run instead; empty: no typical mistake is known
    """

    prompt: str
    answer: str
    solutions: tuple[tuple[str, ...], ...]
    habit: tuple[str, ...] = ()


ProblemGenerator = Callable[[random.Random], Problem]


def make_problem(
    kind: str,
    prompt: str,
    answer: int | str,
    *solutions: str | tuple[str, ...],
    files: dict[str, str] | None = None,
    habit: str | tuple[str, ...] = (),
) -> Problem:
    """A problem with its id and split; a solution given as one string is a single execution."""
    return Problem(
        task_id=content_id(kind, prompt, str(answer), files or {}),
        kind=kind,
        prompt=prompt,
        answer=str(answer),
        files=files or {},
        split=split_of(prompt),  # whatever the answer: no text occurs in both
        solutions=tuple((s,) if isinstance(s, str) else s for s in solutions),
        habit=(habit,) if isinstance(habit, str) else habit,
    )


def in_base(number: int, base: int) -> str:
    """The figures of a positive number in a base up to ten."""
    text = ""
    while number:
        number, figure = divmod(number, base)
        text = str(figure) + text
    return text
