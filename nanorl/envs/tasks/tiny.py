"""The `tiny` family: nineteen templated kinds for a model of 0.66 million parameters.

What such a model finds hard is to copy the arguments, so the layout is made for induction heads:
the data stands in the question exactly as in the program, brackets included, and with the tiny
tokenizer every number below 100 is one token together with the comma before it. Up to three
executions: `chain` follows a file to another one of unknown format.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from nanorl.envs.tasks.family import Family
from nanorl.envs.tasks.problem import Problem, ProblemGenerator, in_base, make_problem

SEPARATORS = ",;/:"
PRIMES = (53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def tiny_family() -> Family:
    """Fourteen kinds of one execution, five of two or three."""
    named = "a,b,c"
    generators: dict[str, ProblemGenerator] = {
        "sum": over_list("sum", "sum", "sum(x)", "max(x)", lambda x: sum(x)),
        "squares": over_list(
            "squares", "squares", "sum(i*i for i in x)", "sum(x)", lambda x: sum(n**2 for n in x)
        ),
        "spread": over_list(
            "spread", "spread", "max(x)-min(x)", "max(x)", lambda x: sorted(x)[-1] - sorted(x)[0]
        ),
        "top_two": over_list(
            "top_two", "top two", "sum(sorted(x)[-2:])", "max(x)", lambda x: sum(sorted(x)[-2:])
        ),
        "product": over_names("product", "product", "a,b", "a*b", "a+b", lambda a, b: a * b),
        "ends": over_list("ends", "ends", "x[0]*x[-1]", "x[0]", lambda x: x[0] * x[len(x) - 1]),
        "modulo": over_names(
            "modulo", "a*b%c", named, "a*b%c", "a*b//c", lambda a, b, c: a * b - a * b // c * c
        ),
        "power": over_names("power", "power mod", named, "pow(a,b,c)", "a*b%c", power_mod),
        "mul_add": over_names("mul_add", "a*b+c", named, "a*b+c", "a*b", lambda a, b, c: a * b + c),
        "add_mul": over_names(
            "add_mul", "(a+b)*c", named, "(a+b)*c", "a+b*c", lambda a, b, c: a * c + b * c
        ),
        "octal": over_names(
            "octal", "octal", "a,b", "oct(a*b)[2:]", "oct(a*b)", lambda a, b: in_base(a * b, 8)
        ),
    }
    single = (range_sum, evens, above)
    several = (look_file, look_module, chain, repair_types, repair_lines)
    generators |= {g.__name__: g for g in single + several}
    return Family(
        name="tiny",
        generators=generators,
        several_turns=frozenset(g.__name__ for g in several),
    )


def numbers(rng: random.Random, low: int = 3, high: int = 4) -> list[int]:
    return rng.sample(range(10, 100), rng.randint(low, high))


def bracket(nums: list[int]) -> str:
    return f"[{','.join(map(str, nums))}]"


def over_list(kind: str, ask: str, code: str, habit: str, solve: Callable) -> ProblemGenerator:
    """A kind that maps a list `x` to one number."""

    def generate(rng: random.Random) -> Problem:
        nums = numbers(rng)
        data = f"x={bracket(nums)}\n"
        return make_problem(
            kind,
            f"{ask}{bracket(nums)}",
            solve(nums),
            f"{data}print({code})",
            habit=f"{data}print({habit})",
        )

    return generate


def over_names(
    kind: str, ask: str, names: str, code: str, habit: str, solve: Callable
) -> ProblemGenerator:
    """A kind that computes with two or three named numbers.

    A modulus is prime, and answers of one digit are redrawn: no remainder is then frequent.
    """

    def generate(rng: random.Random) -> Problem:
        count = names.count(",") + 1
        nums, answer = [0], 0
        while answer < 10:
            nums = numbers(rng, count, count)
            if kind in ("modulo", "power"):
                nums[-1] = rng.choice(PRIMES)
            answer = int(solve(*nums))
        data = f"{names}={bracket(nums)}\n"
        return make_problem(
            kind,
            f"{ask}{bracket(nums)}",
            answer,
            f"{data}print({code})",
            habit=f"{data}print({habit})",
        )

    return generate


def range_sum(rng: random.Random) -> Problem:
    low, high = sorted(numbers(rng, 2, 2))
    data = f"a,b=[{low},{high}]\n"
    return make_problem(
        "range_sum",
        f"range[{low},{high}]",
        (low + high) * (high - low + 1) // 2,
        f"{data}print(sum(range(a,b+1)))",
        habit=f"{data}print(sum(range(a,b)))",
    )


def evens(rng: random.Random) -> Problem:
    nums = [2 * rng.randint(5, 49) for _ in range(2)] + numbers(rng, 2, 3)
    rng.shuffle(nums)
    data = f"x={bracket(nums)}\n"
    return make_problem(
        "evens",
        f"evens{bracket(nums)}",
        sum(n for n in nums if not n & 1),
        f"{data}print(sum(i for i in x if i%2==0))",
        habit=f"{data}print(sum(x))",
    )


def above(rng: random.Random) -> Problem:
    nums = numbers(rng, 3, 4)
    limit = min(nums) + rng.randint(0, 3)
    kept = [n for n in nums if n > limit]
    data = f"x={bracket(nums)}\n"
    return make_problem(
        "above",
        f"sum{bracket(nums)}if i>{limit}",
        sum(kept),
        f"{data}print(sum(i for i in x if i>{limit}))",
        habit=f"{data}print(sum(i for i in x))",
    )


def new_name(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}{rng.randint(10, 99)}"


def look_file(rng: random.Random) -> Problem:
    name, nums, separator = new_name(rng), numbers(rng, 5, 7), rng.choice(SEPARATORS)
    compute = f'x=open("{name}").read().split("{separator}")\nprint(sum(map(int,x)))'
    return make_problem(
        "look_file",
        f'sum file"{name}"',
        sum(nums),
        (f'print(open("{name}").read(6))', compute),
        files={name: separator.join(map(str, nums))},
        habit=f'x=open("{name}").read().split()\nprint(sum(map(int,x)))',
    )


def chain(rng: random.Random) -> Problem:
    first, second = new_name(rng), str(rng.randint(10, 99))  # one token, so copied at once
    nums, separator = numbers(rng, 5, 7), rng.choice(SEPARATORS)
    compute = f'x=open("{second}").read().split("{separator}")\nprint(sum(map(int,x)))'
    return make_problem(
        "chain",
        f'follow file"{first}"',
        sum(nums),
        (f'print(open("{first}").read())', f'print(open("{second}").read(6))', compute),
        files={first: second, second: separator.join(map(str, nums))},
        habit=f'print(open("{first}").read())',
    )


def look_module(rng: random.Random) -> Problem:
    name, (a, b) = "".join(rng.sample(LETTERS, 2)), numbers(rng, 2, 2)
    p, q, r = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 999)
    return make_problem(
        "look_module",
        f"call h({a},{b})",
        p * a + q * b + r,
        ("import h\nprint(dir(h)[0])", f"import h\nprint(h.{name}({a},{b}))"),
        files={"h.py": f"def {name}(a,b):\n return a*{p}+b*{q}+{r}\n"},
        habit=f"import h\nprint(h({a},{b}))",
    )


def repair_types(rng: random.Random) -> Problem:
    name, nums = new_name(rng), numbers(rng, 4, 6)
    strings = set(rng.sample(range(len(nums)), 2))
    items = [f"'{n}'" if i in strings else str(n) for i, n in enumerate(nums)]
    load = f'x=eval(open("{name}").read())\n'
    return make_problem(
        "repair_types",
        f'sum list"{name}"',
        sum(nums),
        (f"{load}print(sum(x))", f"{load}print(sum(map(int,x)))"),
        files={name: f"[{','.join(items)}]"},
        habit=f"{load}print(sum(x))",
    )


def repair_lines(rng: random.Random) -> Problem:
    name, nums = new_name(rng), numbers(rng, 4, 6)
    lines = [str(n) for n in nums]
    lines.insert(rng.randrange(len(lines)), rng.choice("?-"))
    naive = f'print(sum(int(i) for i in open("{name}")))'
    return make_problem(
        "repair_lines",
        f'sum lines"{name}"',
        sum(nums),
        (naive, f'print(sum(int(i) for i in open("{name}") if i[0].isdigit()))'),
        files={name: "\n".join(lines)},
        habit=naive,
    )


def power_mod(a: int, b: int, c: int) -> int:
    result = 1
    for _ in range(b):
        result = result * a % c
    return result
