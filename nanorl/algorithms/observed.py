"""Which tokens of an observation the environment said, and which its chat template put around them.

Between two turns of the policy stand role headers, separators and the opening of the next turn: the
same ones each time, so that a loss on them (ECHO) teaches nothing and thins out what the rest
teaches. They are found by their tokens: what a template puts before, between and after messages is
read off short chats of every role, and control tokens, which nothing that an environment says can
spell (nanoengine/text/special_guard.py), say where it stands in an observation.

A token that is of both counts as the template's. So does all of an observation whose template is
not this one, as of an agent that renders by itself, and what the assistant is made to say there.
Left out: telling what an environment said from what an agent loop adds in a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.agents.tokens import delta_ids

ROLES = ("tool", "user")
"""Of messages that may answer a turn; a template need not know them all."""

PROBES = ("7", "3")
"""Contents that differ in their first and last token, and join no letter or blank before them."""

Ids = tuple[int, ...]


@dataclass(frozen=True)
class _Seam:
    """The tokens between the contents of two messages: from the first control token to the last,
    or all but the outer ones where there is none, and what is beside them. Those that touch a
    content may be one token with a part of it."""

    roles: tuple[str, str]
    left: Ids
    core: Ids
    right: Ids


class Scaffold:
    """The tokens that a tokenizer's chat template puts around the messages of an observation.

    scaffold = Scaffold(tokenizer)
    mask = scaffold.said(rollout.tokens[span.action_end : span.observation_end])
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        """`ValueError` if the template renders no message of any of the roles."""
        self._controls = tokenizer.control_ids | tokenizer.eos_ids
        self._eos_ids = tokenizer.eos_ids
        self._ends: dict[str, tuple[Ids, Ids]] = {}  # before and after a message, by its role
        self._seams: dict[int, list[_Seam]] = {}  # by the first token of the core
        for roles in [(role,) for role in ROLES] + list(product(ROLES, ROLES)):
            self._learn(tokenizer, roles)
        if not self._ends:
            raise ValueError(
                f"observation_coef: the chat template renders no message of {', '.join(ROLES)}, so "
                "that nobody can tell what an environment said; set observation_coef=0"
            )

    def said(self, tokens: Sequence[int]) -> list[int]:
        """1 for the tokens of an observation that somebody said, 0 for those of the template."""
        start = 1 if tokens and tokens[0] in self._eos_ids else 0  # of a turn that was cut off
        heads = {
            role: head for role, (head, _) in self._ends.items() if self._fits(tokens[start:], head)
        }
        for first, head in sorted(heads.items(), key=lambda one: -len(one[1])):
            begin = start + _touching(tokens[start:], head)
            for last, (_, tail) in self._ends.items():
                if not self._fits(tokens[::-1], tail[::-1]):
                    continue
                end = len(tokens) - _touching(tokens[::-1], tail[::-1])
                mask, role = self._between(tokens, begin, end, first)
                if role == last:
                    return mask
        return [0] * len(tokens)

    def _between(
        self, tokens: Sequence[int], place: int, end: int, role: str
    ) -> tuple[list[int], str]:
        """The mask of what stands from `place` to `end`, which begins with what `role` said, and
        the role of the last message."""
        mask, is_said = [0] * len(tokens), True
        while place < end:
            seam = self._seam_at(tokens, place, role)
            if seam is None:
                is_said = is_said and tokens[place] not in self._controls
                mask[place] = int(is_said)
                place += 1
                continue
            before = _touching(tokens[:place][::-1], seam.left[::-1])
            mask[place - before : place] = [0] * before
            place += len(seam.core)
            place += _touching(tokens[place:], seam.right)
            is_said, role = True, seam.roles[1]
        return mask, role

    def _seam_at(self, tokens: Sequence[int], place: int, role: str) -> _Seam | None:
        """The longest one after a message of `role` whose core begins at this token, and whose
        right side follows it."""
        found = [
            seam
            for seam in self._seams.get(tokens[place], ())
            if seam.roles[0] == role
            and tuple(tokens[place : place + len(seam.core)]) == seam.core
            and self._fits(tokens[place + len(seam.core) :], seam.right)
        ]
        return max(found, key=lambda seam: (len(seam.core), len(seam.right)), default=None)

    def _fits(self, tokens: Sequence[int], ids: Ids) -> bool:
        """Say whether tokens begin with `ids`. The last one may touch a content, if it is no
        control token, and need not be itself then."""
        count = len(ids) - (bool(ids) and ids[-1] not in self._controls)
        return len(tokens) >= len(ids) and tuple(tokens[:count]) == ids[:count]

    def _learn(self, tokenizer: ChatTokenizer, roles: tuple[str, ...]) -> None:
        """Read off what stands before, between and after messages of these roles."""
        try:
            one, other = (
                delta_ids(tokenizer, [{"role": role, "content": probe} for role in roles])[1]
                for probe in PROBES
            )
        except ValueError:  # a template may refuse a role, or two in a row
            return
        head, tail = _common(one, other), _common(one[::-1], other[::-1])[::-1]
        if len(one) != len(other) or len(head) + len(tail) >= len(one):
            return  # it does not show such a message
        if len(roles) == 1:
            self._ends[roles[0]] = head, tail
            return
        inner = one[len(head) : len(one) - len(tail)]
        size = sum(a != b for a, b in zip(one, other, strict=True)) // 2  # of a probe
        ids = tuple(inner[size : len(inner) - size])
        places = [place for place, token in enumerate(ids) if token in self._controls]
        # Of plain text, as Qwen2.5's between two results, all but what may touch a content. A
        # result that spells it has it masked, too.
        places = places or list(range(1, len(ids) - 1))
        if places:
            first, last = places[0], places[-1] + 1
            seam = _Seam((roles[0], roles[1]), ids[:first], ids[first:last], ids[last:])
            self._seams.setdefault(seam.core[0], []).append(seam)


def _touching(tokens: Sequence[int], ids: Ids) -> int:
    """Count the tokens that are of `ids`, wholly or together with what they touch."""
    same = len(_common(tokens, ids))
    return min(same + (same < len(ids)), len(tokens))


def _common(one: Sequence[int], other: Sequence[int]) -> Ids:
    """The longest common beginning."""
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return tuple(one[:size])
