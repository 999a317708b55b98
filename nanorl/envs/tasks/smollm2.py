"""The `smollm2` family: plain English for a small instruction-tuned model with its own template.

Nine kinds take one execution. Five take more: `inspect_file` has a data file with an unknown
separator and `inspect_module` a module with an unknown function, so the agent has to look before it
computes; in `repair_lines`, `repair_keys` and `repair_types` the natural first program raises, and
the agent has to mend it. A program that foresees everything may solve some of these at once; that
is allowed, and rare.
Answers have enough entropy that neither a constant nor the mental arithmetic of a small model
scores; the tests measure it. Numbers avoid leading zeros (`07` is a syntax error in Python) except
inside strings.
"""

from __future__ import annotations

import json
import random

from nanorl.envs.tasks.family import Family
from nanorl.envs.tasks.problem import Problem, in_base, make_problem


def smollm2_family() -> Family:
    """Nine kinds of one execution, five that must look or repair first."""
    single = (arithmetic, counting, digits, divisors, bases, lists, strings, times, filtering)
    several = (inspect_file, inspect_module, repair_lines, repair_keys, repair_types)
    return Family(
        name="smollm2",
        generators={g.__name__: g for g in single + several},
        several_turns=frozenset(g.__name__ for g in several),
    )


# -- single numbers, one execution -----------------------------------------------------------------


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


def bases(rng: random.Random) -> Problem:
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


# -- lists, strings and times, one execution -------------------------------------------------------


def comma(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def pseudo_word(rng: random.Random, syllables: int) -> str:
    """A pronounceable word that is in no dictionary, such as `kabotu`."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))


def lists(rng: random.Random) -> Problem:
    nums = [rng.randint(11, 99) for _ in range(rng.randint(5, 8))]
    ordered = sorted(nums)
    text, code, answer = rng.choice(
        [
            ("sum of the squares", "sum(n * n for n in nums)", sum(n * n for n in nums)),
            (
                "product of the largest and the smallest number",
                "max(nums) * min(nums)",
                ordered[-1] * ordered[0],
            ),
        ]
    )
    return make_problem(
        "lists",
        f"For the list {comma(nums)}, what is the {text}?",
        answer,
        f"nums = [{comma(nums)}]\nprint({code})",
        habit=f"nums = [{comma(nums)}]\nprint(sum(nums))",
    )


def strings(rng: random.Random) -> Problem:
    word = pseudo_word(rng, rng.randint(3, 4))
    times = rng.randint(13, 99)
    letter = max(word, key=word.count)
    if rng.random() < 0.5:
        return make_problem(
            "strings",
            rng.choice(["Reverse the string '{}'.", "Write '{}' backwards."]).format(word),
            "".join(reversed(word)),
            f"print('{word}'[::-1])",
            habit=f"print('{word}')",
        )
    while word.count(letter) < 2:  # with one, the answer stands in the question
        word = pseudo_word(rng, 4)
        letter = max(word, key=word.count)
    return make_problem(
        "strings",
        f"The string '{word}' is written {times} times in a row. How often does '{letter}' occur?",
        times * word.count(letter),
        f"print(('{word}' * {times}).count('{letter}'))",
        habit=f"print('{word}'.count('{letter}'))",
    )


def times(rng: random.Random) -> Problem:
    if rng.random() < 0.5:
        h1, h2 = rng.randint(1, 11), rng.randint(12, 23)
        m1, m2 = rng.randint(10, 59), rng.randint(10, 59)
        return make_problem(
            "times",
            f"How many minutes pass between {h1}:{m1} and {h2}:{m2} on the same day?",
            (h2 - h1) * 60 + m2 - m1,
            f"print(({h2} * 60 + {m2}) - ({h1} * 60 + {m1}))",
            habit=f"print({h2} * 60 - {h1} * 60)",
        )
    hours, minutes, seconds = rng.randint(2, 23), rng.randint(11, 59), rng.randint(11, 59)
    return make_problem(
        "times",
        f"How many seconds are {hours} hours, {minutes} minutes and {seconds} seconds?",
        seconds + 60 * (minutes + 60 * hours),
        f"print({hours} * 3600 + {minutes} * 60 + {seconds})",
        habit=f"print({hours} * 60 + {minutes} * 60 + {seconds})",
    )


def filtering(rng: random.Random) -> Problem:
    limit = rng.randint(30, 60)
    text, test = rng.choice(
        [
            (f"greater than {limit}", f"n > {limit}"),
            (f"less than {limit}", f"n < {limit}"),
            ("odd", "n % 2 == 1"),
        ]
    )
    keeps = {
        "greater": lambda n: n > limit,
        "less": lambda n: n < limit,
        "odd": lambda n: bool(n & 1),
    }[text.split()[0]]
    nums: list[int] = []
    kept: list[int] = []
    while not 2 <= len(kept) < 7:
        nums = [rng.randint(11, 99) for _ in range(7)]
        kept = [n for n in nums if keeps(n)]
    return make_problem(
        "filtering",
        f"What is the sum of those numbers that are {text}? {comma(nums)}",
        sum(kept),
        f"nums = [{comma(nums)}]\nprint(sum(n for n in nums if {test}))",
        habit=f"nums = [{comma(nums)}]\nprint(sum(nums))",
    )


# -- files and modules, more than one execution ----------------------------------------------------

TOPICS = ("orders", "prices", "scores", "stock", "costs", "votes", "rain", "miles")


def file_name(rng: random.Random, suffix: str) -> str:
    return f"{rng.choice(TOPICS)}_{rng.randint(100, 999)}.{suffix}"


def inspect_file(rng: random.Random) -> Problem:
    name = file_name(rng, "txt")
    nums = [rng.randint(12, 98) for _ in range(rng.randint(12, 16))]
    separator = rng.choice(",;|:")
    asked, code, answer = rng.choice(
        [
            ("sum", "sum(nums)", sum(nums)),
            (
                "product of the largest and the smallest",
                "max(nums) * min(nums)",
                sorted(nums)[-1] * sorted(nums)[0],
            ),
        ]
    )
    ask = rng.choice(
        [
            "The file {} holds numbers with an unknown separator. What is their {}?",
            "Find the {1} of the numbers in {0}. Their separator is unknown.",
        ]
    )
    read = f"t = open('{name}').read()\n"
    compute = f"{read}nums = [int(x) for x in t.split('{separator}')]\nprint({code})"
    return make_problem(
        "inspect_file",
        ask.format(name, asked),
        answer,
        (f"print(open('{name}').read()[:30])", compute),
        (f"{read}print(t[:24])", compute),
        files={name: separator.join(map(str, nums))},
        habit=f"{read}nums = [int(x) for x in t.split()]\nprint({code})",
    )


def inspect_module(rng: random.Random) -> Problem:
    function = f"{rng.choice(['get', 'calc', 'do', 'make', 'run'])}_{pseudo_word(rng, 2)}"
    x, a, b = rng.randint(1012, 9989), rng.randint(12, 98), rng.randint(112, 989)
    modulus = rng.randint(1000, 9999)
    ask = rng.choice(
        [
            "The module helper has one function of unknown name. What does it return for {}?",
            "helper.py defines a single function. Call it with {} and report the result.",
        ]
    )
    call = f"import helper\nprint(helper.{function}({x}))"
    return make_problem(
        "inspect_module",
        ask.format(x),
        (x * a + b) % modulus,
        ("import helper\nprint(dir(helper)[-1])", call),
        ("print(open('helper.py').read()[:24])", call),
        files={"helper.py": f"def {function}(x):\n    return (x * {a} + {b}) % {modulus}\n"},
        habit=f"import helper\nprint(helper.{rng.choice(['helper', 'run', 'main'])}({x}))",
    )


def repair_lines(rng: random.Random) -> Problem:
    name = file_name(rng, "txt")
    nums = [rng.randint(12, 980) for _ in range(rng.randint(6, 9))]
    bad = rng.choice(["n/a", "none", "?", "-", "missing", "error"])
    lines = [str(n) for n in nums]
    lines.insert(rng.randrange(len(lines)), bad)
    naive = f"print(sum(int(x) for x in open('{name}')))"
    ask = rng.choice(
        [
            "{} has one number on each line. What is their sum? Ignore bad lines.",
            "Add up the numbers in {}, one on each line. Ignore bad lines.",
        ]
    )
    return make_problem(
        "repair_lines",
        ask.format(name),
        sum(nums),
        (naive, f"print(sum(int(x) for x in open('{name}') if x.strip().isdigit()))"),
        (naive, f"print(sum(int(x) for x in open('{name}') if '{bad}' not in x))"),
        files={name: "\n".join(lines) + "\n"},
        habit=naive,
    )


def repair_keys(rng: random.Random) -> Problem:
    name = file_name(rng, "json")
    key = rng.choice(["qty", "price", "size", "cost"])
    rows = [{"id": i, key: rng.randint(12, 980)} for i in range(rng.randint(5, 8))]
    answer = sum(row[key] for row in rows)
    rows.insert(rng.randrange(len(rows)), {"id": len(rows)})
    load = f"import json\nrows = json.load(open('{name}'))\n"
    naive = f"{load}print(sum(r['{key}'] for r in rows))"
    return make_problem(
        "repair_keys",
        f"{name} is a list of JSON records. What is the sum of '{key}'? A missing one counts 0.",
        answer,
        (naive, f"{load}print(sum(r.get('{key}', 0) for r in rows))"),
        (naive, f"{load}print(sum(r['{key}'] for r in rows if '{key}' in r))"),
        files={name: json.dumps(rows)},
        habit=naive,
    )


def repair_types(rng: random.Random) -> Problem:
    name = file_name(rng, "json")
    nums = [rng.randint(12, 980) for _ in range(rng.randint(6, 9))]
    strings = set(rng.sample(range(len(nums)), 3))
    mixed = [str(n) if i in strings else n for i, n in enumerate(nums)]
    load = f"import json\nnums = json.load(open('{name}'))\n"
    naive = f"{load}print(sum(nums))"
    ask = rng.choice(
        ["What is the sum of the numbers in {}, a JSON list?", "Add up the JSON list in {}."]
    )
    return make_problem(
        "repair_types",
        ask.format(name),
        sum(nums),
        (naive, f"{load}print(sum(int(n) for n in nums))"),
        (naive, f"{load}print(sum(map(int, nums)))"),
        files={name: json.dumps(mixed)},
        habit=naive,
    )
