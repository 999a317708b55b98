"""A rollout as JSON that a page can show: the question, what came of it, turns, calls, numbers.

`RolloutDocument(...).build()` is one whole rollout as a person reads it. A text that is longer than
MOST_CHARS is cut there and says how long it is; `text_part` gives the rest in parts, so that an
output of a megabyte is neither sent nor drawn before somebody asks for it. `token_part` is a part
of a token sequence with every number about its tokens. A picture is named where it stands, by its
hash, and never looked at here.
Left out: any markup. What a model or a tool wrote leaves here as it is; the page shows it as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.text.chat_template import Message
from nanorl.inspection.viewer.stored import outcome_of
from nanorl.observability.report.trace import Decode, split_text
from nanorl.observability.report.transcript import verdict
from nanorl.observability.store import Entry
from nanorl.observability.trajectories.base import (
    CallOfTurn,
    Trajectory,
    TrajectorySequence,
    TrajectoryTurn,
    number,
)
from nanorl.observability.trajectories.frames import Content
from nanorl.shown_pictures import ShownPicture, known_pictures, shown_pictures
from nanorl.task import Task
from nanorl.types import REWARD_PART, Branch, Rollout, TokenStats

Json = dict[str, Any]
MOST_CHARS = 4_000
MOST_TOKENS = 4_000  # of one part
QUESTION_CHARS = 200  # in a list
_CONTEXT = 8  # tokens around a part, so that no character at its edge is cut in two
_TRAINED_LOGP, _GAP = "trained_logp", "gap"


def entry_json(entry: Entry, task: Task | None) -> Json:
    """A line of a list."""
    return {
        "id": entry.rollout_id,
        "task_id": entry.task_id,
        "kind": entry.kind,
        "group": entry.group_id,
        "step": entry.step,
        "version": entry.version,
        "status": entry.status.value,
        "outcome": outcome_of(entry),
        "reward": number(entry.reward),
        "num_tokens": entry.num_tokens,
        "num_turns": entry.num_turns,
        "question": None if task is None else task.prompt_text[:QUESTION_CHARS],
    }


@dataclass(frozen=True, kw_only=True)
class RolloutDocument:
    """One rollout with all that is known of it; `task` and `stats` None: not recorded."""

    entry: Entry
    trajectory: Trajectory
    task: Task | None
    stats: TokenStats | None

    def build(self) -> Json:
        """The document. Its texts are numbered as they come, for `text_part`."""
        return self._build(_Texts())

    def text_part(self, place: int, start: int, end: int) -> Json:
        """Characters `start` to `end` of the text that `build` gave the number `place`. KeyError
        for a number that it gave to none."""
        texts = _Texts()
        self._build(texts)
        if not 0 <= place < len(texts.all):
            raise KeyError(f"no text {place} in {self.entry.rollout_id}")
        return {"text": texts.all[place][start:end], "length": len(texts.all[place])}

    def _build(self, texts: _Texts) -> Json:
        rollout, task = self.trajectory.rollout, self.task
        return entry_json(self.entry, task) | {
            "phase": self.trajectory.phase,
            "verdict": verdict(rollout),
            "error": texts.add(rollout.error) if rollout.error else None,
            "total_reward": number(rollout.total_reward),
            "parts": _metrics(rollout, is_part=True),
            "metrics": _metrics(rollout, is_part=False),
            "advantage": _range_of(stat_lists(rollout, self.stats).get("advantage", ())),
            "versions": _range_of([[v for v in s.versions if v >= 0] for s in rollout.sequences]),
            "num_sampled": rollout.num_action_tokens,
            "asked": None if task is None else texts.add(task.prompt_text),
            "answer": None if task is None else texts.add(task.answer_text),
            "files": [] if task is None else _named(task.files, texts),
            "recorded": sorted(stat_lists(rollout, self.stats)),
            "sequences": [_sequence(one, texts) for one in self.trajectory.sequences],
        }


class _Texts:
    """The texts of a document, each with a number; the document has their beginnings."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def add(self, text: str) -> Json:
        self.all.append(text)
        shown = {"text": text[:MOST_CHARS], "length": len(text)}
        return shown if len(text) <= MOST_CHARS else shown | {"place": len(self.all) - 1}


def _named(values: Mapping[str, Any], texts: _Texts) -> list[Json]:
    """Names with values, whose texts keep their own line breaks."""
    return [
        {
            "name": name,
            "value": texts.add(
                one if isinstance(one, str) else json.dumps(one, ensure_ascii=False, indent=2)
            ),
        }
        for name, one in values.items()
    ]


def _sequence(one: TrajectorySequence, texts: _Texts) -> Json:
    says = _Says(texts, one.pictures)
    return {
        "name": one.name,
        "title": "the conversation" if one.name == "main" else one.branch.title,
        "is_history": one.is_history,
        "caller": None if one.caller is None else list(one.caller),
        "num_tokens": len(one.branch.tokens),
        "num_tools": len(one.chat.tools),
        "prompt": [says.message(message) for message in one.chat.messages],
        "prompt_end": one.turns[0].span.action_start if one.turns else len(one.branch.tokens),
        "turns": [_turn(turn, one.branch, texts, says) for turn in one.turns],
    }


@dataclass(frozen=True)
class _Says:
    """Holds what is said in a sequence: texts, and pictures between them."""

    texts: _Texts
    pictures: Sequence[ShownPicture]

    def message(self, message: Message) -> Json:
        content = message.get("content") or ""
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            lines = [f"{call['name']}({json.dumps(call['arguments'])})" for call in calls]
            content = "\n".join([content, *lines]).strip()
        return {"role": str(message["role"]), "content": self.content(content)}

    def content(self, content: Content) -> Json:
        if isinstance(content, str):
            return self.texts.add(content)
        parts = [
            picture_json(self.pictures[part["number"] - 1])
            if part["type"] == "image"
            else self.texts.add(part["text"])
            for part in content
        ]
        return {"parts": parts, "length": sum(part.get("length", 0) for part in parts)}


def picture_json(shown: ShownPicture) -> Json:
    """The name of a picture, and a line about it."""
    return {"sha256": shown.sha256, "title": shown.title}


def _turn(turn: TrajectoryTurn, branch: Branch, texts: _Texts, says: _Says) -> Json:
    span = turn.span
    sampled = [
        logp
        for logp, is_sampled in zip(
            branch.logps[span.action_start : span.action_end],
            branch.loss_mask[span.action_start : span.action_end],
            strict=True,
        )
        if is_sampled
    ]
    return {
        "span": [span.action_start, span.action_end, span.observation_end],
        "reasoning": texts.add(turn.reasoning) if turn.reasoning else None,
        "content": texts.add(turn.content),
        "calls": [_call(call, texts, says) for call in turn.calls],
        "num_malformed": turn.num_malformed,
        "replies": [says.message(message) for message in turn.further],
        "reward": number(turn.reward),
        "is_cut": turn.finish_reason == "length",
        "is_copied": turn.is_copied,
        "version": turn.version,
        "mean_logp": number(sum(sampled) / len(sampled)) if sampled else None,
    }


def _call(call: CallOfTurn, texts: _Texts, says: _Says) -> Json:
    return {
        "id": call.id,
        "name": call.name,
        "arguments": _named(call.arguments, texts),
        "result": None if call.result is None else says.content(call.result),
    }


def _metrics(rollout: Rollout, *, is_part: bool) -> Json:
    """The parts of the reward by their names, or all other numbers about the rollout."""
    return {
        name.removeprefix(REWARD_PART): number(value)
        for name, value in sorted(rollout.metrics.items())
        if name.startswith(REWARD_PART) == is_part
    }


def _range_of(lists: Sequence[Sequence[float]]) -> list[float] | None:
    """The least and the greatest finite number."""
    found = [value for values in lists for value in values if math.isfinite(value)]
    return [min(found), max(found)] if found else None


def stat_lists(rollout: Rollout, stats: TokenStats | None) -> dict[str, list[list[float]]]:
    """The recorded numbers of sampled tokens by name, NaN elsewhere. `gap` is how far the training
    engine's log-prob lies from the one that was sampled with."""
    if stats is None:
        return {}
    sequences = rollout.sequences
    values = dict(stats.values)
    if _TRAINED_LOGP in values:
        values[_GAP] = [
            [trained - sampled for trained, sampled in zip(one, sequence.logps, strict=True)]
            for one, sequence in zip(values[_TRAINED_LOGP], sequences, strict=True)
        ]
    return {
        name: [
            [
                value if mask else math.nan
                for value, mask in zip(one, sequence.loss_mask, strict=True)
            ]
            for one, sequence in zip(lists, sequences, strict=True)
        ]
        for name, lists in values.items()
    }


def token_part(
    rollout: Rollout, stats: TokenStats | None, decode: Decode, *, place: int, start: int, end: int
) -> Json:
    """Tokens `start` to `end`, MOST_TOKENS at most, of the sequence with the number `place`.

    Numbers that a token does not have are null. Those of a picture have no text: `pictures` says
    where each starts and ends. KeyError for a sequence that there is not.
    """
    if not 0 <= place < len(rollout.sequences):
        raise KeyError(f"no sequence {place} in {rollout.rollout_id}")
    sequence = rollout.sequences[place]
    start = max(0, start)
    end = min(end, start + MOST_TOKENS, len(sequence.tokens))
    first = max(0, start - _CONTEXT)
    pieces = split_text(sequence.tokens[first : end + _CONTEXT], decode)
    shown = [
        one
        for one in shown_pictures(sequence.images, known_pictures(decode))
        if one.span.start < end and one.span.end > start
    ]
    for one in shown:
        for token in range(max(one.span.start, start), min(one.span.end, end)):
            pieces[token - first] = ""
    lists = stat_lists(rollout, stats)
    return {
        "start": start,
        "end": end,
        "length": len(sequence.tokens),
        "text": pieces[start - first : end - first],
        "pictures": [
            {"start": one.span.start, "end": one.span.end, **picture_json(one)} for one in shown
        ],
        "id": sequence.tokens[start:end],
        "mask": sequence.loss_mask[start:end],
        "version": sequence.versions[start:end],
        "logp": [number(one) for one in sequence.logps[start:end]],
        "stats": {
            name: [number(one) for one in values[place][start:end]]
            for name, values in lists.items()
        },
    }
