"""The `smollm2` family, part one: kinds about single numbers that one execution solves.

Answers have enough entropy that neither a constant nor the mental arithmetic of a small model
scores; the tests measure it.
"""

from __future__ import annotations

import math
import random

from nanorl.data.problem import Problem, make_problem


def arithmetic(rng: random.Random) -> Problem:
    a, c = rng.randint(112, 989), rng.randint(112, 989)
    b, d = rng.randint(12, 98), rng.randint(12, 98)
    expression, answer, habit = rng.choice(
        [
            (f"{a} * {b} + {c}", a * b + c, f"{a} * {b} - {c}"),
            (f"{a} * {b} - {c}", a * b - c, f"{a} * {b} + {c}"),
            (f"({a} + {c}) * {b}", (a + c) * b, f"{a} + {c} * {b}"),
            (f"({a} - {c}) * {b} + {d}", (a - c) * b + d, f"{a} - {c} * {b} + {d}"),
            (f"{a} * {b} + {c} * {d}", a * b + c * d, f"{a} * {b} + {c}"),
            (f"{a} * {c} % {b * 100 + d}", a * c % (b * 100 + d), f"{a} * {c} // {b * 100 + d}"),
        ]
    )
    ask = rng.choice(["What is {}?", "Compute {}.", "Calculate the value of {}."])
    return make_problem(
        "arithmetic",
        ask.format(expression),
        answer,
        f"print({expression})",
        f"result = {expression}\nprint(result)",
        habit=f"print({habit})",
    )


def counting(rng: random.Random) -> Problem:
    low, high = rng.randint(12, 199), rng.randint(300, 1999)
    k, m = rng.sample([3, 4, 5, 6, 7, 8, 9], 2)

    def multiples(of: int) -> int:
        return high // of - (low - 1) // of

    if rng.random() < 0.5:
        text, test, answer = f"divisible by {k}", f"n % {k} == 0", multiples(k)
    else:
        text = f"divisible by {k} or by {m}"
        test = f"n % {k} == 0 or n % {m} == 0"
        answer = multiples(k) + multiples(m) - multiples(math.lcm(k, m))
    ask = rng.choice(
        [
            "How many integers from {} to {} are {}?",
            "Count the whole numbers from {} to {} that are {}.",
        ]
    )
    return make_problem(
        "counting",
        ask.format(low, high, text),
        answer,
        f"print(len([n for n in range({low}, {high} + 1) if {test}]))",
        habit=f"print(sum(n for n in range({low}, {high} + 1) if {test}))",
    )


def digits(rng: random.Random) -> Problem:
    number, other = rng.randint(10**5, 10**7), rng.randint(112, 989)
    figures = [int(c) for c in str(number)]
    choice = rng.randrange(3)
    if choice == 0:
        return make_problem(
            "digits",
            f"What is the sum of the squares of the digits of {number}?",
            sum(d * d for d in figures),
            f"print(sum(int(d) ** 2 for d in str({number})))",
            habit=f"print(sum(int(d) for d in str({number})))",
        )
    if choice == 1:
        backwards = sum(d * 10**i for i, d in enumerate(figures))
        return make_problem(
            "digits",
            f"Write the digits of {number} in reverse order and add {other}. What is the result?",
            backwards + other,
            f"print(int(str({number})[::-1]) + {other})",
            habit=f"print({number} + {other})",
        )
    return make_problem(
        "digits",
        f"What is the sum of the digits of {number}, multiplied by {other}?",
        sum(figures) * other,
        f"print(sum(int(d) for d in str({number})) * {other})",
        f"total = sum(int(d) for d in str({number}))\nprint(total * {other})",
        habit=f"print({number} * {other})",
    )


def primes(rng: random.Random) -> Problem:
    if rng.random() < 1 / 3:
        return prime_sum(rng)
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
        "primes",
        ask.format(name, a, b),
        answer,
        f"import math\nprint(math.{function}({a}, {b}))",
        f"from math import {function}\nprint({function}({a}, {b}))",
        habit=habit,
    )


def prime_sum(rng: random.Random) -> Problem:
    low, high = rng.randint(11, 60), rng.randint(80, 199)
    is_prime = [True] * (high + 1)
    for n in range(2, 15):
        is_prime[n * n :: n] = [False] * len(is_prime[n * n :: n])
    return make_problem(
        "primes",
        f"What is the sum of all prime numbers from {low} to {high}?",
        sum(n for n in range(low, high + 1) if is_prime[n]),
        f"print(sum(n for n in range({low}, {high} + 1) if all(n % d for d in range(2, n))))",
        habit=f"print(sum(n for n in range({low}, {high} + 1) if n % 2))",
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
