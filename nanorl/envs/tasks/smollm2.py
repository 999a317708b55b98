"""The `smollm2` family: plain English for a small instruction-tuned model with its own template.

A task names a file, and the file holds a question: the agent has to look, to write a program for
what it read, to read what that printed, and to answer. The six kinds of questions share that way
and differ in what has to be understood: what two sorts of things cost, or what is left of a note.
The model knows such things from its pretraining, so a teacher need not show more than the form.
Answers have enough entropy that neither a constant nor the mental arithmetic of a small model
scores; the tests measure it. Numbers avoid leading zeros, which are a syntax error in Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from nanorl.envs.tasks.family import Family
from nanorl.envs.tasks.problem import Problem, ProblemGenerator, make_problem
from nanorl.task import split_of

TOPICS = ("orders", "prices", "scores", "stock", "costs", "votes", "rain", "miles")
"""What files are called after; nothing follows from it."""
THINGS = ("pen", "book", "cup", "lamp", "bag", "ball", "hat", "plate")


@dataclass(frozen=True, kw_only=True)
class FileQuestion:
    """A question with its answer, the expression that solves it, and one that careless solvers
    write."""

    text: str
    answer: int
    expression: str
    careless: str


QuestionGenerator = Callable[[random.Random], FileQuestion]


def smollm2_family() -> Family:
    """Six kinds of questions, each in a file."""
    questions = (arithmetic, area, change, powers, remainders, shopping)
    generators = {one.__name__: in_a_file(one) for one in questions}
    return Family(name="smollm2", generators=generators, several_turns=frozenset(generators))


def in_a_file(question_of: QuestionGenerator) -> ProblemGenerator:
    """Problems of two executions: one shows the question that a file holds, one solves it."""

    def generator(rng: random.Random) -> Problem:
        question = question_of(rng)
        name = file_name(rng, question.text)
        look = look_at(name)
        return make_problem(
            question_of.__name__,
            prompt_of(name),
            question.answer,
            (look, f"print({question.expression})"),
            files={name: question.text},
            habit=(look, f"print({question.careless})"),
        )

    return generator


def prompt_of(name: str) -> str:
    """How a task says where its question is, and how one looks."""
    return f"{look_at(name)} shows a question. Answer it."


def look_at(name: str) -> str:
    return f"print(open('{name}').read())"


def file_name(rng: random.Random, content: str) -> str:
    """A name such as `rain_480.txt`. The prompt with it falls into the same split as the content,
    so that neither a question nor a name occurs in both."""
    while True:
        name = f"{rng.choice(TOPICS)}_{rng.randint(100, 999)}.txt"
        if split_of(prompt_of(name)) == split_of(content):
            return name


# -- questions -------------------------------------------------------------------------------------


def arithmetic(rng: random.Random) -> FileQuestion:
    a, c = rng.randint(112, 989), rng.randint(112, 989)
    b = rng.randint(12, 98)
    expression, answer = rng.choice(
        [
            (f"{a} * {b} + {c}", a * b + c),
            (f"{a} * {b} - {c}", a * b - c),
        ]
    )
    ask = rng.choice(["What is {}?", "Compute {}.", "Calculate the value of {}."])
    return FileQuestion(
        text=ask.format(expression), answer=answer, expression=expression, careless=f"{a} * {b}"
    )


def area(rng: random.Random) -> FileQuestion:
    a, b = rng.randint(112, 989), rng.randint(12, 98)
    return FileQuestion(
        text=f"A field is {a} long and {b} wide. What is its area?",
        answer=a * b,
        expression=f"{a} * {b}",
        careless=f"{a} + {b}",
    )


def change(rng: random.Random) -> FileQuestion:
    price, count, paid = rng.randint(12, 98), rng.randint(12, 48), rng.randint(5000, 9999)
    thing = rng.choice(THINGS)
    return FileQuestion(
        text=f"You buy {count} {thing}s for {price} each and pay with {paid}. What is left?",
        answer=paid - count * price,
        expression=f"{paid} - {count} * {price}",
        careless=f"{paid} - {price}",
    )


def powers(rng: random.Random) -> FileQuestion:
    base, exponent, other = rng.randint(3, 19), rng.randint(4, 9), rng.randint(112, 989)
    word, sign, answer = rng.choice(
        [("plus", "+", base**exponent + other), ("minus", "-", base**exponent - other)]
    )
    ask = rng.choice(["What is", "Compute"])
    end = "?" if ask == "What is" else "."
    return FileQuestion(
        text=f"{ask} {base} to the power of {exponent}, {word} {other}{end}",
        answer=answer,
        expression=f"{base} ** {exponent} {sign} {other}",
        careless=f"{base} * {exponent}",
    )


def remainders(rng: random.Random) -> FileQuestion:
    a, b = rng.randint(1_001, 9_999), rng.randint(112, 989)
    ask = rng.choice(
        [
            "What is the remainder when {} is divided by {}?",
            "Find the remainder of {} divided by {}.",
        ]
    )
    return FileQuestion(
        text=ask.format(a, b), answer=a % b, expression=f"{a} % {b}", careless=f"{a} // {b}"
    )


def shopping(rng: random.Random) -> FileQuestion:
    one, other = rng.sample(THINGS, 2)
    price, other_price = rng.randint(12, 98), rng.randint(112, 489)
    count, other_count = rng.randint(3, 48), rng.randint(3, 48)
    return FileQuestion(
        text=f"A {one} costs {price} and a {other} costs {other_price}. "
        f"What do {count} {one}s and {other_count} {other}s cost?",
        answer=count * price + other_count * other_price,
        expression=f"{count} * {price} + {other_count} * {other_price}",
        careless=f"{price} + {other_price}",
    )
