"""A rollout as data to show: segments of prompt, model and tool, each token with its numbers.

The text of a token is what it adds to the decoded text before it, so that characters made of
several tokens stay whole; those of a picture add none. Left out: branches (of a rollout its
own sequence is shown), any markup (nanorl.observability.report.html).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanorl.shown_pictures import ShownPicture, known_pictures, pieces
from nanorl.types import Branch, Rollout

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """`logp` (nats) and `version` mean something only where `is_sampled`."""

    token_id: int
    text: str
    is_sampled: bool
    logp: float
    version: int


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`role`: "prompt", "model", "tool", or "template" for text between turns.

    `turn` counts from 0; -1 for the prompt. `reward` is the turn's, on its model segment.
    """

    role: str
    turn: int
    said: tuple[str | ShownPicture, ...]
    tokens: tuple[TokenView, ...]
    reward: float | None = None

    @property
    def text(self) -> str:
        """All that it says, with a line for each picture."""
        return "".join(one if isinstance(one, str) else one.line for one in self.said)

    @property
    def num_sampled(self) -> int:
        return sum(token.is_sampled for token in self.tokens)

    @property
    def mean_logp(self) -> float | None:
        """Over the sampled tokens; None without any."""
        logps = [token.logp for token in self.tokens if token.is_sampled]
        return sum(logps) / len(logps) if logps else None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A token sequence of a rollout, ready to show."""

    rollout: Rollout | Branch
    segments: tuple[Segment, ...]


def trace_rollout(rollout: Rollout | Branch, decode: Decode) -> Trace:
    """The segments of one token sequence, a rollout's own or a branch, in order; together they
    hold every token once.

    `decode` turns ids into text and should keep special tokens visible.
    """
    segments: list[Segment] = []

    def add(role: str, turn: int, start: int, end: int, reward: float | None = None) -> None:
        if start == end:
            return
        said: list[str | ShownPicture] = []
        texts: list[str] = []  # of tokens
        for piece in pieces(rollout, start, end, known_pictures(decode)):
            if isinstance(piece, ShownPicture):
                said.append(piece)
                texts += [""] * (min(piece.span.end, end) - piece.span.start)
            else:
                said.append(decode(piece))
                texts += split_text(piece, decode)
        tokens = tuple(
            TokenView(
                token_id=rollout.tokens[i],
                text=text,
                is_sampled=bool(rollout.loss_mask[i]),
                logp=rollout.logps[i],
                version=rollout.versions[i],
            )
            for i, text in zip(range(start, end), texts, strict=True)
        )
        segments.append(
            Segment(role=role, turn=turn, said=tuple(said), tokens=tokens, reward=reward)
        )

    position = 0
    for turn, span in enumerate(rollout.turn_spans):
        add("template" if turn else "prompt", turn - 1, position, span.action_start)
        has_reward = turn < len(rollout.turn_rewards)
        reward = rollout.turn_rewards[turn] if has_reward else None
        add("model", turn, span.action_start, span.action_end, reward)
        add("tool", turn, span.action_end, span.observation_end)
        position = span.observation_end
    num_turns = len(rollout.turn_spans)
    add("template" if num_turns else "prompt", num_turns - 1, position, len(rollout.tokens))
    return Trace(rollout=rollout, segments=tuple(segments))


def split_text(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token; a character of several tokens goes to the last of them.

    Decodes a short window at a time: from the last boundary, whose text is known to be final.
    """
    pieces: list[str] = []
    window_start, window_known = 0, 0
    for i in range(len(ids)):
        known = decode(list(ids[window_start:window_known]))
        text = decode(list(ids[window_start : i + 1]))
        is_last = i + 1 == len(ids)
        if len(text) > len(known) and (is_last or not text.endswith("\ufffd")):
            pieces.append(text[len(known) :])
            window_start, window_known = window_known, i + 1
        else:
            pieces.append("")
    return pieces
