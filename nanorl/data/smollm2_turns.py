"""The `smollm2` family, part three: kinds that take more than one execution.

inspect_file    a data file with an unknown separator: look at it, then compute
inspect_module  a module with an unknown function: find its name, then call it
repair_lines, repair_keys, repair_types   the natural first program raises; mend it

A program that foresees everything may solve some of these at once; that is allowed, and rare.
"""

from __future__ import annotations

import json
import random

from nanorl.data.problem import Problem, make_problem
from nanorl.data.smollm2_sequences import pseudo_word

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
