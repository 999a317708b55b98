"""The workloads with pictures that this stack and its peers are timed on. Needs numpy alone.

    W-vision    8 rollouts of 3 turns: before each turn a text of 60 tokens and a picture of 512 x
                512 that nobody else sees, and then 48 sampled tokens; 1,152 sampled tokens, 24
                pictures
    GRPO step   2 prompts, each with a picture and about 40 tokens of text, x 4 completions of
                exactly 64 tokens, one optimizer step
    the tower   8 pictures

A model folder (smolvlm_folder.py) says how large its own are, and has the pictures as PNG files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from workload import FIRST_ID


@dataclass(frozen=True)
class Workload:
    """Numbers of rollouts, turns and tokens, and the tokens that stand for pictures."""

    side: int  # pixels of a picture
    picture_tokens: int  # placeholders of one
    around_id: int  # before and after a picture
    placeholder_id: int
    whole_id: int  # says that the whole picture follows
    num_texts: int  # ids from FIRST_ID up to this one are text
    rollouts: int = 8
    turns: int = 3
    turn: int = 48
    text: int = 60
    groups: int = 2
    members: int = 4
    completion: int = 64
    seen: int = 8  # pictures of the tower's row

    @classmethod
    def of(cls, folder: str | Path) -> Workload:
        """As its folder has it."""
        return cls(**json.loads((Path(folder) / "workload.json").read_text()))

    @property
    def num_sampled(self) -> int:
        return self.rollouts * self.turns * self.turn

    @property
    def num_pictures(self) -> int:
        return max(self.rollouts * self.turns, self.seen)

    @property
    def before_picture(self) -> list[int]:
        """Ids that stand between a text and a picture's placeholders; `around_id` follows them."""
        return [self.around_id, self.whole_id]

    def picture_ids(self) -> list[int]:
        """What a picture is among tokens."""
        return [*self.before_picture, *[self.placeholder_id] * self.picture_tokens, self.around_id]

    def texts(self) -> list[list[list[int]]]:
        """[turn][rollout] -> the ids of the text before a picture."""
        shape = (self.turns, self.rollouts, self.text)
        drawn: list[list[list[int]]] = (
            np.random.RandomState(0).randint(FIRST_ID, self.num_texts, shape).tolist()
        )
        return drawn

    def prompts(self) -> list[str]:
        """The texts of the step's prompts."""
        rng = np.random.RandomState(2)
        return [" ".join(map(str, rng.randint(10, 100, 13))) for _ in range(self.groups)]

    def picture(self, number: int) -> np.ndarray:
        """uint8 [side, side, 3], like a screenshot: areas of one colour, other ones in each."""
        colours = np.random.RandomState(number).randint(0, 256, (16, 16, 3)).astype(np.uint8)
        return colours.repeat(self.side // 16, 0).repeat(self.side // 16, 1)

    def file(self, folder: str | Path, number: int) -> Path:
        """Where a picture lies. Of W-vision the k-th of rollout r is number k * rollouts + r."""
        return Path(folder) / "pictures" / f"{number}.png"
