"""The `smollm2` family, part two: kinds about lists, strings and times that one execution solves.

Numbers avoid leading zeros (`07` is a syntax error in Python) except inside strings.
"""

from __future__ import annotations

import random

from nanorl.data.problem import Problem, make_problem


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
