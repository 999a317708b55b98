"""Ways to an answer: what a teacher showed in the warm start, and what the policy found by itself.

The way of a rollout is what the policy did before its last turn, which is the answer, with every
number and every quoted text left out; blanks make no difference:

    way_of(["print(17 * 3)", "Answer: 51"])       ("print(N * N)",)
    way_of(["print('ab'[::-1])", "Answer: ba"])   ("print('…'[::N])",)

`TaughtWays` notes the ways of the teacher's traces while the warm start goes on, `ways_of_run`
compares those of successful rollouts with them. Both are of environments with tools: without one,
what is said differs with every task.
Left out: whether two programs that look different do the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nanoengine.packing import Sample
from nanorl.observability.report.markup import table, text
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.observer import RunObserver
from nanorl.observability.report.trace import Decode
from nanorl.observability.store import RolloutStore

TAUGHT = "taught_ways.jsonl"
"""A line for each supervised step that brought new ways, in the run's folder."""
Way = tuple[str, ...]
LAST_PART = 3
"""New ways are counted in the last of so many equal parts of the RL steps."""
MAX_SHOWN = 6
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_NUMBER = re.compile(r"(?<![A-Za-z_])\d+(?:\.\d+)?")


def way_of(turns: Sequence[str]) -> Way:
    """The way that these turns of a policy took; the last one is its answer."""
    return tuple(_NUMBER.sub("N", _QUOTED.sub("'…'", turn.strip())) for turn in turns[:-1])


def turns_of(tokens: Sequence[int], loss_mask: Sequence[int], decode: Decode) -> list[str]:
    """The turns that a policy said in a sequence: its runs of trained tokens, as text."""
    runs = groupby(zip(tokens, loss_mask, strict=True), key=lambda pair: bool(pair[1]))
    return [decode([token for token, _ in run]) for is_trained, run in runs if is_trained]


class TaughtWays(RunObserver):
    """Notes each way that the teacher's traces show, once, with the step that showed it first."""

    def __init__(self, folder: Path, decode: Decode, num_drills: int) -> None:
        """`num_drills` are the supervised steps that train on no traces, the first ones."""
        self._file, self._decode, self._num_drills = folder / TAUGHT, decode, num_drills
        self._known: set[Way] | None = None

    async def on_warm_batch(self, step: int, batch: Sequence[Sample]) -> None:
        if step < self._num_drills:
            return
        if self._known is None:  # a step that is taken again after a kill is noted anew
            kept = [row for row in read_taught(self._file) if row[0] < step]
            self._file.write_text("".join(map(_line, kept)), "utf-8")
            self._known = {way for _, ways in kept for way in ways}
        ways = {
            way_of(turns_of(one.tokens, one.loss_mask, self._decode)) for one in batch
        } - self._known
        if ways:
            self._known |= ways
            with self._file.open("a", encoding="utf-8") as file:
                file.write(_line((step, sorted(ways))))


def _line(row: tuple[int, Sequence[Way]]) -> str:
    return json.dumps({"step": row[0], "ways": row[1]}, ensure_ascii=False) + "\n"


def read_taught(file: Path) -> list[tuple[int, list[Way]]]:
    """The rows of `TAUGHT`, without a last one that a kill cut off; none without the file."""
    return [(row["step"], [tuple(way) for way in row["ways"]]) for row in read_metrics(file)]


@dataclass(frozen=True, kw_only=True)
class FoundWay:
    """A way that no trace of the teacher showed, among the successes of the last steps."""

    way: Way
    count: int
    rollout_id: str
    """One that took it."""


@dataclass(frozen=True, kw_only=True)
class WaysOfRun:
    """The ways of successes in the steps from `first_step` on."""

    first_step: int
    num_taught: int
    """Different ways that the teacher showed."""
    num_successes: int
    num_new: int
    """Successes by a way that it never showed."""
    found: tuple[FoundWay, ...]
    """Those ways, the most frequent first."""

    def to_json(self) -> dict[str, Any]:
        """For summary.json, with the most frequent of the new ways."""
        return {
            "from_step": self.first_step,
            "taught": self.num_taught,
            "successes": self.num_successes,
            "successes_by_new_ways": self.num_new,
            "new_ways": len(self.found),
            "found": [dataclasses.asdict(one) for one in self.found[:MAX_SHOWN]],
        }


def ways_of_run(folder: Path, store: RolloutStore, decode: Decode) -> WaysOfRun | None:
    """Of a run with a teacher; None where none was noted, or nothing succeeded."""
    taught = {_bare(way) for _, ways in read_taught(folder / TAUGHT) for way in ways}
    steps = store.steps()
    if not taught or not steps:
        return None
    first_step = max(steps) + 1 - -(-(max(steps) + 1) // LAST_PART)
    counts: Counter[Way] = Counter()
    examples: dict[Way, tuple[str, Way]] = {}
    for rollout_id, way in _successes(store, first_step, decode):
        counts[_bare(way)] += 1
        examples.setdefault(_bare(way), (rollout_id, way))
    if not counts:
        return None
    new = [(key, count) for key, count in counts.most_common() if key not in taught]
    return WaysOfRun(
        first_step=first_step,
        num_taught=len(taught),
        num_successes=counts.total(),
        num_new=sum(count for _, count in new),
        found=tuple(
            FoundWay(way=examples[key][1], count=count, rollout_id=examples[key][0])
            for key, count in new
        ),
    )


def _bare(way: Way) -> Way:
    """The way without its blanks and line breaks: two that differ in nothing else are one."""
    return tuple("".join(turn.split()) for turn in way)


def _successes(store: RolloutStore, first_step: int, decode: Decode) -> Iterator[tuple[str, Way]]:
    for entry in store.entries():
        if entry.step >= first_step and entry.reward >= 1.0:
            rollout = store.get(entry.rollout_id)
            spans = rollout.turn_spans
            turns = [decode(rollout.tokens[one.action_start : one.action_end]) for one in spans]
            yield entry.rollout_id, way_of(turns)


def ways_section(ways: Mapping[str, Any]) -> str:
    """What the policy found that its teacher never showed, as a section of the report; empty where
    `ways`, of summary.json, is."""
    if not ways:
        return ""
    share = ways["successes_by_new_ways"] / ways["successes"]
    said = (
        f"The warm start showed {ways['taught']} ways to an answer. From step {ways['from_step']} "
        f"on, {share:.1%} of {ways['successes']} successes took a way that it never showed. "
        "Numbers and quoted texts are left out of a way; turns stand below each other."
    )
    rows = [
        [_shown(one["way"]), str(one["count"]), text(one["rollout_id"])] for one in ways["found"]
    ]
    body = table(["way", "successes", "one of them"], rows) if rows else ""
    return f'<section id="ways"><h2>Found, not shown</h2><p>{text(said)}</p>{body}</section>'


def _shown(way: Sequence[str]) -> str:
    turns = "".join(f"<pre>{text(turn)}</pre>" for turn in way)
    return turns or "the answer at once"
