"""Small mistakes: edits of a program, of a value, and answers out of thin air.

Edits work on the text, so they fit any Python program; some give a syntax error, which is a
mistake too. All draw from the caller's generator.
"""

from __future__ import annotations

import random
import re

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


def replace_one(pattern: re.Pattern[str], text: str, replace, rng: random.Random) -> str:  # type: ignore[no-untyped-def]
    """Replace one random match."""
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
