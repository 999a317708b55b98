"""`reverse_text`: a short text letter by letter, the small task that prime-rl begins with.

The answer stands between <reversed_text> tags, once. It pays how alike it is to the right one:
twice the longest common subsequence over both lengths, so 1 for the right answer alone. A turn
without the tags, or with two pairs, pays nothing; saying letters twice makes the text longer and
pays less. `--tasks` brings texts of your own, as prompts whose answer is the reversed text.
The teacher is right two times in three, else slips with a letter.

    nanorl train --env reverse_text --env-args max_words=3

Left out: long texts by default, which a small model's tokens cannot spell.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.envs.rewards.base import Transcript
from nanorl.envs.shipped.tagged_text import lcs_ratio, tagged
from nanorl.envs.shipped.words import COMMON_WORDS
from nanorl.task import Task

_TAG = "reversed_text"
_SLIPS = 1 / 3


class ReverseText(Env):
    """Texts of `min_words` to `max_words` words, drawn from `num_words` common ones."""

    system = (
        "Reverse the text letter by letter: the last letter comes first. Write the result as "
        f"<{_TAG}>result</{_TAG}>."
    )
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turns": 1,
            "agent.max_turn_tokens": 40,
            "agent.max_context_tokens": 160,
            "warm_start.steps": 80,
            "rl.temperature": 1.0,
        }
    )

    def __init__(self, min_words: int = 1, max_words: int = 2, num_words: int = 64) -> None:
        if not 1 <= min_words <= max_words:
            raise ValueError(
                f"--env-args min_words={min_words} max_words={max_words}: the first must be at "
                "least 1, and the second no smaller"
            )
        if not 2 <= num_words <= len(COMMON_WORDS):
            raise ValueError(
                f"--env-args num_words={num_words}: must be from 2 to {len(COMMON_WORDS)}"
            )
        self.num_words = min_words, max_words
        stride = len(COMMON_WORDS) // num_words
        self.words = COMMON_WORDS[::stride][:num_words]

    def tasks(self, rng: random.Random) -> Task:
        text = " ".join(rng.choices(self.words, k=rng.randint(*self.num_words)))
        return Task(text, text[::-1], kind="reverse_text")

    def step(self, text: str) -> Done:
        answer = tagged(text, _TAG)
        if answer is None:
            self.metric("num_no_answer")
        return self.done(answer=answer)

    def score(self, transcript: Transcript) -> float:
        """Score how alike the answer is to the text from its end."""
        return lcs_ratio(transcript.answer or "", self.task.answer)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """The answer, or what somebody says who loses a letter or swaps two."""
        said = self.task.answer
        if rng.random() < _SLIPS:
            place = rng.randrange(len(said) - 1)
            pair = rng.choice([said[place + 1], said[place + 1] + said[place]])
            said = said[:place] + pair + said[place + 2 :]
        return f"<{_TAG}>{said}</{_TAG}>"
