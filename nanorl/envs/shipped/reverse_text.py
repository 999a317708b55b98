"""`reverse_text`: a short text letter by letter, the small task that prime-rl begins with.

The answer stands between <reversed_text> tags, once. It pays how alike it is to the right one:
twice the longest common subsequence over both lengths, so 1 for the right answer alone. A turn
without the tags, or with two pairs, pays nothing; saying letters twice makes the text longer and
pays less. With `exact=0.5` half of the reward is for the right answer alone, so that near misses do
not pay nearly as much. With `num_unseen=64` about half of the held-out texts are made of so many
words that training never shows, the kind `unseen`: what is learnt is to spell backwards where they
rise, too. `--tasks` brings texts of your own, as prompts whose answer is the reversed text.
The teacher is right two times in three, else slips with a letter.

    nanorl train --env reverse_text --env-args max_words=3 exact=0.5 num_unseen=64

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
_UNSEEN = 1 / 5
"""The share of texts of unseen words among all that are drawn."""


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

    def __init__(
        self,
        min_words: int = 1,
        max_words: int = 2,
        num_words: int = 64,
        num_unseen: int = 0,
        exact: float = 0.0,
    ) -> None:
        if not 1 <= min_words <= max_words:
            raise ValueError(
                f"--env-args min_words={min_words} max_words={max_words}: the first must be at "
                "least 1, and the second no smaller"
            )
        if not 2 <= num_words <= len(COMMON_WORDS):
            raise ValueError(
                f"--env-args num_words={num_words}: must be from 2 to {len(COMMON_WORDS)}"
            )
        if not 0 <= num_unseen <= len(COMMON_WORDS) - num_words:
            raise ValueError(
                f"--env-args num_unseen={num_unseen}: must be from 0 to "
                f"{len(COMMON_WORDS) - num_words}, the words that num_words={num_words} leaves"
            )
        if not 0 <= exact <= 1:
            raise ValueError(f"--env-args exact={exact}: a share of the reward, from 0 to 1")
        self.num_words, self.exact = (min_words, max_words), exact
        stride = len(COMMON_WORDS) // num_words
        self.words = COMMON_WORDS[::stride][:num_words]
        others = [word for word in COMMON_WORDS if word not in set(self.words)]
        self.unseen = others[:: max(1, len(others) // max(1, num_unseen))][:num_unseen]

    def tasks(self, rng: random.Random) -> Task:
        # One text in four of known words is held out: with one in five of unseen words, which are
        # all held out, both kinds of held-out tasks are alike often.
        is_unseen = bool(self.unseen) and rng.random() < _UNSEEN
        words = self.unseen if is_unseen else self.words
        text = " ".join(rng.choices(words, k=rng.randint(*self.num_words)))
        if is_unseen:
            return Task(text, text[::-1], kind="unseen", split="heldout")
        return Task(text, text[::-1], kind="known" if self.unseen else "reverse_text")

    def step(self, text: str) -> Done:
        answer = tagged(text, _TAG)
        if answer is None:
            self.metric("num_no_answer")
        return self.done(answer=answer)

    def score(self, transcript: Transcript) -> float:
        """Score how alike the answer is to the text from its end, and whether it is equal."""
        said, right = transcript.answer or "", self.task.answer
        return (1 - self.exact) * lcs_ratio(said, right) + self.exact * (said == right)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """The answer, or what somebody says who loses a letter or swaps two."""
        said = self.task.answer
        if rng.random() < _SLIPS:
            place = rng.randrange(len(said) - 1)
            pair = rng.choice([said[place + 1], said[place + 1] + said[place]])
            said = said[:place] + pair + said[place + 2 :]
        return f"<{_TAG}>{said}</{_TAG}>"
