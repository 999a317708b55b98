"""Scripted teachers for the supervised warm start, and the mistakes that they make.

A teacher acts turn by turn on real observations, so its trace is a rollout like the policy's own.
It may be wrong on purpose, and in many ways: a habit of its kind, a slip in the program, a guess
without running, a miscopied value. A warm start of many traces from such a one knows the manners of
tool use but not the best choices; one of few traces of a right one knows the manners alone. Both
leave reinforcement learning room. All draw from the caller's random generator.
Left out: any model (the scripts are the solutions that each `Problem` carries), and playing a
script in an environment (nanorl/distributed/warm_start.py).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanorl.envs.actions import ActionFormat, program
from nanorl.envs.env_episode import TOOL_UNAVAILABLE
from nanorl.envs.tasks.problem import Problem
from nanorl.envs.tools.result_text import KILLED, NO_OUTPUT
from nanorl.task import Task


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Weights of the ways to act; they need not add up to one."""

    right: float = 0.3
    """Run a solution and report what it printed."""
    habit: float = 0.22
    """Run what careless solvers of this kind run."""
    slip: float = 0.25
    """Run a solution with one thing wrong: an operator, a digit, an item, a missing print."""
    guess: float = 0.13
    """Answer at once."""
    miscopy: float = 0.08
    """Run a solution and report another value than it printed."""
    persistence: float = 0.3
    """Chance to run a solution after a failed program that was not planned to fail."""
    stubborn: frozenset[str] = frozenset()
    """Kinds whose habit is stronger than the right way: after the warm start they fail mostly."""
    stubborn_habit: float = 0.6
    """Weight of the habit in those kinds."""

    def __post_init__(self) -> None:
        for name in ("right", "habit", "slip", "guess", "miscopy", "stubborn_habit"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)} is negative or not finite; weights start at 0"
                )
        if not 0 <= self.persistence <= 1:
            raise ValueError(f"persistence={self.persistence} must lie between 0 and 1")

    def script(self, form: ActionFormat, task: Task, rng: random.Random) -> Script:
        """One trace of a teacher that acts so. ValueError for a task without solutions."""
        return SloppyTeacher(form, self).trace(task, rng)


def smollm2_teacher() -> TeacherConfig:
    """Always right: of each kind it shows two traces, and a mistake in both would be all that the
    policy ever sees of it.
    """
    return TeacherConfig(right=1.0, habit=0.0, slip=0.0, guess=0.0, miscopy=0.0)


def tiny_teacher() -> TeacherConfig:
    """Right about half the time; in half of the kinds the habit is the most frequent way.

    Greedy decoding after the warm start follows the most frequent way, so those kinds fail until
    reinforcement learning finds that the rarer way pays.
    """
    return TeacherConfig(
        # Few slips and no miscopies: so small a model learns copying from the traces themselves.
        right=0.5,
        habit=0.12,
        slip=0.03,
        guess=0.03,
        miscopy=0.0,
        # Kinds that are easy to copy for: the right way must stay frequent enough to be sampled.
        stubborn=frozenset(
            {"product", "modulo", "mul_add", "add_mul", "range_sum", "octal"}
            | {"top_two", "squares", "evens", "look_file", "repair_lines"}
        ),
        stubborn_habit=1.0,
    )


NOTICES = (NO_OUTPUT, TOOL_UNAVAILABLE, *KILLED.values())
"""All that an observation says in the environment's own words: a teacher knows failures by them."""


class SloppyTeacher:
    """Shows how to use the tool, not always well."""

    def __init__(self, form: ActionFormat, config: TeacherConfig | None = None) -> None:
        self.form = form
        self.config = config or TeacherConfig()

    def trace(self, task: Task, rng: random.Random) -> Script:
        """A script for one trace. Needs a generated task: others carry no solutions."""
        if not isinstance(task, Problem):
            raise ValueError(
                f"task {task.task_id!r} holds no solutions, so no teacher can show how to solve "
                "it; warm-start from a generated family, then train on your own tasks"
            )
        manner = self._manner(task, rng)
        return Script(task, self.form, manner, self.config.persistence, rng)

    def _manner(self, problem: Problem, rng: random.Random) -> str:
        c = self.config
        is_stubborn = problem.kind in c.stubborn
        weights = {
            "right": c.right,
            "habit": c.stubborn_habit if is_stubborn else c.habit,
            "slip": c.slip,
            "guess": c.guess,
            "miscopy": c.miscopy,
        }
        return rng.choices(list(weights), list(weights.values()))[0]


class Script:
    """One trace in the making: call `next_action` with all observations so far."""

    def __init__(
        self,
        problem: Problem,
        form: ActionFormat,
        manner: str,
        persistence: float,
        rng: random.Random,
    ) -> None:
        self.problem = problem
        self.form = form
        self.manner = manner
        self.persistence = persistence
        self.rng = rng
        self.solution = rng.choice(problem.solutions)
        self.programs = self._plan()

    def next_action(self, history: Sequence[str]) -> str:
        """The next program, or the final answer; deterministic given the rng and the history."""
        turn = len(history)
        if turn < len(self.programs):
            return self.form.write(program(self.programs[turn]))
        if not history:
            return self.form.write_answer(wild_guess(self.problem.answer, self.rng))
        if is_failure(history[-1]):
            return self._after_failure()
        value = last_line(history[-1])
        if self.manner == "miscopy":
            value = miscopy(value, self.rng)
        return self.form.write_answer(value)

    def _plan(self) -> list[str]:
        if self.manner == "guess":
            return []
        if self.manner == "habit":
            return list(self.problem.habit)
        *before, last = self.solution
        return [*before, slip(last, self.rng) if self.manner == "slip" else last]

    def _after_failure(self) -> str:
        if self.rng.random() < self.persistence:
            self.programs.append(self.solution[-1])
            self.persistence = 0.0
            return self.form.write(program(self.programs[-1]))
        return self.form.write_answer(wild_guess(self.problem.answer, self.rng))


def is_failure(observation: str) -> bool:
    """True if an observation shows an error, a broken limit, or nothing at all."""
    text = observation.strip()
    has_error = re.search(r"Error\b", text) is not None
    return not text or has_error or any(notice in text for notice in NOTICES)


def last_line(observation: str) -> str:
    return observation.strip().splitlines()[-1].strip()


# The mistakes are edits of the text, so they fit any Python program; some give a syntax error, and
# that is a mistake too.

OPERATORS = ("+", "-", "*", "//", "%", "<", ">")
BETWEEN_OPERANDS = re.compile(r"(?<=[\w)\]])( ?)(//|[-+*%<>])( ?)(?=[\w(\[])")
NUMBER = re.compile(r"(?<![\w.])\d+(?!\w)")
ITEM = re.compile(r", ?\d+(?=[,\]])")
LAST_PRINT = re.compile(r"print\((.*)\)$")


def slip(code: str, rng: random.Random) -> str:
    """The program with one mistake; unchanged only if no kind of mistake fits it."""
    edits = [wrong_operator, off_by_one, miscopied_number, dropped_item, forgotten_print]
    rng.shuffle(edits)
    return next((new for edit in edits if (new := edit(code, rng)) != code), code)


def wrong_operator(code: str, rng: random.Random) -> str:
    def replace(match: re.Match[str]) -> str:
        other = rng.choice([o for o in OPERATORS if o != match[2]])
        return f"{match[1]}{other}{match[3]}"

    return replace_one(BETWEEN_OPERANDS, code, replace, rng)


def off_by_one(code: str, rng: random.Random) -> str:
    return replace_one(NUMBER, code, lambda m: str(abs(int(m[0]) + rng.choice([-1, 1]))), rng)


def miscopied_number(code: str, rng: random.Random) -> str:
    return replace_one(NUMBER, code, lambda m: miscopy(m[0], rng), rng)


def dropped_item(code: str, rng: random.Random) -> str:
    return replace_one(ITEM, code, lambda m: "", rng)


def forgotten_print(code: str, rng: random.Random) -> str:
    return replace_one(LAST_PRINT, code, lambda m: m[1], rng)


def replace_one(
    pattern: re.Pattern[str],
    text: str,
    replace: Callable[[re.Match[str]], str],
    rng: random.Random,
) -> str:
    """The text with one random match replaced."""
    matches = list(pattern.finditer(text))
    if not matches:
        return text
    match = rng.choice(matches)
    return text[: match.start()] + replace(match) + text[match.end() :]


def miscopy(value: str, rng: random.Random) -> str:
    """The value with one letter or digit changed; never equal to it."""
    places = [i for i, c in enumerate(value) if c.isalnum()]
    if not places:
        return f"{value}0"
    i = rng.choice(places)
    pool = "123456789" if value[i].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    if value[i].isupper():
        pool = pool.upper()
    return value[:i] + rng.choice([c for c in pool if c != value[i]]) + value[i + 1 :]


def wild_guess(answer: str, rng: random.Random) -> str:
    """A value that looks like the answer and is not it."""
    while True:
        guess = "".join(
            rng.choice("123456789") if c.isdigit() else rng.choice("aeiou") if c.isalpha() else c
            for c in answer
        )
        if guess != answer:
            return guess
        answer = f"{answer}0"
