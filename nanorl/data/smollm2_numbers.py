"""The `smollm2` family, part one: kinds about single numbers that one execution solves.

Answers have enough entropy that neither a constant nor the mental arithmetic of a small model
scores; the tests measure it.
"""

from __future__ import annotations

import random

from nanorl.data.problem import Problem, make_problem


def arithmetic(rng: random.Random) -> Problem:
    a, c = rng.randint(112, 989), rng.randint(112, 989)
    b = rng.randint(12, 98)
    expression, answer = rng.choice(
        [
            (f"{a} * {b} + {c}", a * b + c),
            (f"{a} * {b} - {c}", a * b - c),
            (f"({a} + {c}) * {b}", (a + c) * b),
        ]
    )
    ask = rng.choice(["What is {}?", "Compute {}.", "Calculate the value of {}."])
    return make_problem(
        "arithmetic",
        ask.format(expression),
        answer,
        f"print({expression})",
        f"result = {expression}\nprint(result)",
        habit=f"print({a} * {b})",
    )


def counting(rng: random.Random) -> Problem:
    low, high = rng.randint(12, 199), rng.randint(300, 1999)
    k = rng.randint(3, 9)
    ask = rng.choice(
        [
            "How many integers from {} to {} are divisible by {}?",
            "Count the whole numbers from {} to {} that are divisible by {}.",
        ]
    )
    return make_problem(
        "counting",
        ask.format(low, high, k),
        high // k - (low - 1) // k,
        f"print(len([n for n in range({low}, {high} + 1) if n % {k} == 0]))",
        habit=f"print(sum([n for n in range({low}, {high} + 1) if n % {k} == 0]))",
    )


def digits(rng: random.Random) -> Problem:
    number, other = rng.randint(10**5, 10**7), rng.randint(112, 989)
    figures = [int(c) for c in str(number)]
    if rng.random() < 0.5:
        return make_problem(
            "digits",
            f"What is the sum of the squares of the digits of {number}?",
            sum(d * d for d in figures),
            f"print(sum(int(d) ** 2 for d in str({number})))",
            habit=f"print(sum(int(d) for d in str({number})))",
        )
    return make_problem(
        "digits",
        f"What is the sum of the digits of {number}, multiplied by {other}?",
        sum(figures) * other,
        f"print(sum(int(d) for d in str({number})) * {other})",
        habit=f"print({number} * {other})",
    )


def divisors(rng: random.Random) -> Problem:
    if rng.random() < 0.5:
        divisor, p, q = rng.randint(12, 97), *rng.sample([5, 7, 9, 11, 13, 16, 17, 19], 2)
        a, b = divisor * p, divisor * q  # p and q share no factor
        name, function, answer = "greatest common divisor", "gcd", divisor
        habit = f"print({max(a, b)} % {min(a, b)})"
    else:
        a, b = rng.randint(24, 198), rng.randint(24, 198)
        name, function = "least common multiple", "lcm"
        answer = next(n for n in range(a, a * b + 1, a) if n % b == 0)
        habit = f"print({a} * {b})"
    ask = rng.choice(["What is the {} of {} and {}?", "Find the {} of {} and {}."])
    return make_problem(
        "divisors",
        ask.format(name, a, b),
        answer,
        f"import math\nprint(math.{function}({a}, {b}))",
        f"from math import {function}\nprint({function}({a}, {b}))",
        habit=habit,
    )


def in_base(number: int, base: int) -> str:
    text = ""
    while number:
        number, figure = divmod(number, base)
        text = "0123456789abcdef"[figure] + text
    return text


def bases(rng: random.Random) -> Problem:
    if rng.random() < 0.5:
        name, call, base = rng.choice(
            [("binary", "bin", 2), ("octal", "oct", 8), ("hexadecimal", "hex", 16)]
        )
        number = rng.randint(130, 999) if base == 2 else rng.randint(3000, 60000)
        return make_problem(
            "bases",
            rng.choice(["Write {} in {}.", "Convert {} to {}."]).format(number, name),
            in_base(number, base),
            f"print({call}({number})[2:])",
            habit=f"print({call}({number}))",
        )
    number, base = rng.randint(300, 9999), rng.randint(5, 9)
    text = in_base(number, base)
    return make_problem(
        "bases",
        f"The number {text} is written in base {base}. What is it in decimal?",
        number,
        f"print(int('{text}', {base}))",
        f"n = int('{text}', {base})\nprint(n)",
        habit=f"print({text} // {base})",
    )
