"""`wordle`: a word of five letters in six guesses, with a verdict on every letter.

A verdict is `here` (right letter, right place), `else` (the word has it elsewhere) or `no`; a
letter that is guessed more often than the word has it is `no` the further times, as in the game.
The word pays 1 and ends the episode; every other guess costs 0.02, and the sixth ends it with
nothing. A turn that is not one word of five letters is a guess that says nothing. An episode that
a limit cuts off costs all six: where giving up was cheaper, a policy learned to give up.
The teacher says words that the verdicts leave, and forgets them now and then.

    nanorl train --env wordle                         # the game, over common words
    nanorl train --env wordle --env-args words=short  # for a small model: 12 words are named
    nanorl train --env wordle --env-args words=my_words.txt num_choices=0

Left out: a dictionary. Any five letters are a guess.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.envs.shipped.words import COMMON_WORDS, SHORT_WORDS
from nanorl.task import Task

_FIVE_LETTERS = re.compile(r"[a-zA-Z]{5}")
_NUM_GUESSES = 6
_COST = 0.02
_SHOWN_OF_SHORT = 12
_CARELESS = 0.15
"""How often the teacher forgets the verdicts."""


class Wordle(Env):
    """`words`: common, short, or a file with a word a line. `num_choices`: so many of them, drawn
    for each task, are named in the question; 0: none, the game as it is known."""

    system = "Find the word of five letters. Say one word and nothing else."
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turns": _NUM_GUESSES,
            "agent.max_turn_tokens": 8,
            "agent.max_context_tokens": 384,
            "warm_start.steps": 40,
            "rl.temperature": 1.0,
        }
    )

    def __init__(self, words: str = "common", num_choices: int | None = None) -> None:
        self.words = _words(str(words))
        shown = _SHOWN_OF_SHORT if words == "short" else 0
        self.num_choices = shown if num_choices is None else num_choices
        if not 0 <= self.num_choices <= len(self.words):
            raise ValueError(
                f"--env-args num_choices={num_choices}: must be from 0 to {len(self.words)}, the "
                "number of words"
            )
        self._num_said = 0
        self._shown: list[str] = []

    def tasks(self, rng: random.Random) -> Task:
        if not self.num_choices:
            return Task("First guess?", rng.choice(self.words), kind="wordle")
        choices = rng.sample(self.words, self.num_choices)
        prompt = f"It is one of: {', '.join(choices)}."
        return Task(prompt, rng.choice(choices), kind="wordle", data={"choices": choices})

    def step(self, text: str) -> Done | str:
        guess = text.strip().strip(".!?\"'`*").lower()
        if guess == self.task.answer:
            return self.done(reward=1.0, answer=guess)
        self.reward(-_COST)
        self._num_said += 1
        if self._num_said == _NUM_GUESSES:
            return self.done(reward=0.0)
        if _FIVE_LETTERS.fullmatch(guess) is None:
            return "Say one word of five letters."
        return verdict(guess, self.task.answer)

    def score(self, transcript: object) -> float:
        """An episode that a limit cut off costs the guesses that were left."""
        return -_COST * (_NUM_GUESSES - self._num_said)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """A word that all verdicts leave."""
        if not observations:
            self._shown = []
        left = self.task.data.get("choices") or list(self.words)
        if rng.random() >= _CARELESS:
            seen = list(zip(self._shown, observations, strict=False))
            left = [word for word in left if all(verdict(one, word) == said for one, said in seen)]
        self._shown.append(rng.choice(left))
        return self._shown[-1]


def verdict(guess: str, word: str) -> str:
    """The verdict on each letter: "e:no e:no r:else i:no e:here" of eerie where it is crane."""
    marks = ["here" if one == other else "no" for one, other in zip(guess, word, strict=True)]
    left = Counter(other for one, other in zip(guess, word, strict=True) if one != other)
    for place, letter in enumerate(guess):
        if marks[place] == "no" and left[letter] > 0:
            marks[place] = "else"
            left[letter] -= 1
    return " ".join(f"{letter}:{mark}" for letter, mark in zip(guess, marks, strict=True))


def _words(name: str) -> Sequence[str]:
    """The list of that name, or of that file. ValueError names a line that is no such word."""
    if name in ("common", "short"):
        return COMMON_WORDS if name == "common" else SHORT_WORDS
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"--env-args words={name}: no such file; or use common, or short")
    words = path.read_text(encoding="utf-8").split()
    for number, word in enumerate(words, 1):
        if _FIVE_LETTERS.fullmatch(word) is None:
            raise ValueError(f"{path}, word {number}: {word!r} is not five letters from a to z")
    if not words:
        raise ValueError(f"{path}: holds no word")
    return sorted({word.lower() for word in words})
