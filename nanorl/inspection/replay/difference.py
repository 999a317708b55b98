"""The first place where two rollouts of one name differ, in the order in which they were made.

Prompt, tokens and log-probs of the first turn, its observation, the next turn ..., further
sequences, and at last status and rewards. Log-probs are compared to the last bit. Left out: numbers
that tell of the machine and not of the rollout, as its times, and the labels of policy versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanorl.types import Branch, Rollout

Kind = Literal["prompt", "token", "logp", "observation", "sequences", "status", "reward", "failed"]
Decode = Callable[[Sequence[int]], str]
MAX_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A difference between what was stored at a place and what is there now.

    Difference(kind="logp", sequence=0, turn=1, token=57, then="-0.25", now="-0.26")
    """

    kind: Kind
    then: str
    now: str
    sequence: int = 0
    turn: int = -1
    """-1: before the first turn, or after the last."""
    token: int = -1
    """Its position in the sequence; -1 of what is no token's."""

    @property
    def place(self) -> str:
        """In words."""
        words = [f"sequence {self.sequence}"] if self.sequence else []
        words += [f"turn {self.turn}"] if self.turn >= 0 else []
        words += [f"token {self.token}"] if self.token >= 0 else []
        return ", ".join(words) or "after the last turn"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(then: Rollout, now: Rollout, decode: Decode) -> Difference | None:
    """None where they are equal."""
    for number, (old, new) in enumerate(zip(then.sequences, now.sequences, strict=False)):
        found = _in_tokens(old, new, decode, number)
        if found is not None:
            return found
    counts = len(then.sequences), len(now.sequences)
    if counts[0] != counts[1]:
        return Difference(kind="sequences", then=str(counts[0]), now=str(counts[1]))
    if then.status != now.status:
        return Difference(kind="status", then=then.status.value, now=now.status.value)
    return _in_rewards(then, now)


def _in_tokens(old: Branch, new: Branch, decode: Decode, sequence: int) -> Difference | None:
    common = min(len(old.tokens), len(new.tokens))
    keys = old.keys, new.keys
    at = next((i for i in range(common) if _at(old, keys[0], i) != _at(new, keys[1], i)), common)
    if at == len(old.tokens) == len(new.tokens):
        return None
    longer = old if at < len(old.tokens) else new  # whoever has a token there says what it is
    kind = _kind(longer, at)
    turn = sum(span.action_start <= at for span in longer.turn_spans) - 1
    is_alike = at < common and keys[0][at] == keys[1][at]
    if is_alike and old.loss_mask[at] == new.loss_mask[at] == 1:
        then, now = repr(old.logps[at]), repr(new.logps[at])
        kind = "logp"
    else:
        then, now = _said(old, at, decode), _said(new, at, decode)
    return Difference(kind=kind, then=then, now=now, sequence=sequence, turn=turn, token=at)


def _at(sequence: Branch, keys: list[int], place: int) -> tuple[int, int, float | None]:
    logp = sequence.logps[place]
    return keys[place], sequence.loss_mask[place], None if math.isnan(logp) else logp


def _kind(sequence: Branch, place: int) -> Kind:
    """The kind of a difference at that token: a sampled token, an observation or the prompt."""
    if sequence.loss_mask[place]:
        return "token"
    return "observation" if any(sequence.loss_mask[:place]) else "prompt"


def _said(sequence: Branch, place: int, decode: Decode) -> str:
    """The text from there to the end of its part; of a sampled token, that token alone."""
    if place >= len(sequence.tokens):
        return "(the end)"
    if sequence.loss_mask[place]:
        return decode([sequence.tokens[place]])
    rest = sequence.loss_mask[place:]
    end = place + (rest.index(1) if 1 in rest else len(rest))
    text = decode(sequence.tokens[place:end])
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def _in_rewards(then: Rollout, now: Rollout) -> Difference | None:
    old, new = _rewards(then), _rewards(now)
    for name in old | new:
        if not _same(old.get(name), new.get(name)):
            return Difference(
                kind="reward", then=f"{name} {old.get(name)}", now=f"{name} {new.get(name)}"
            )
    return None


def _rewards(rollout: Rollout) -> dict[str, float]:
    """All of them by name: of the parts first, since one of them says most."""
    parts = {name: one for name, one in rollout.metrics.items() if name.startswith("reward/")}
    turns = {
        f"of turn {turn}{f' of sequence {number}' if number else ''}": reward
        for number, sequence in enumerate(rollout.sequences)
        for turn, reward in enumerate(sequence.turn_rewards)
    }
    return {**parts, "reward": rollout.reward, **turns}


def _same(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return old is new
    return old == new or (math.isnan(old) and math.isnan(new))
