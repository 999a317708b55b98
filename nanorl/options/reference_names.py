"""The references of a run by their names: which teachers, of what weight, for which kind of task.

    --rl.reference math:ORG/A,code:ORG/B     each kind of task its own teacher (MOPD)
    --rl.reference ORG/A=3,ORG/B             Σ w·log π with weights ¾ and ¼: a geometric mean
    --rl.reference code:ORG/B,ORG/A          A for all kinds but code

Multi-teacher on-policy distillation by kind: MiMo-V2-Flash, arXiv 2601.02780.
Next: references.py, which asks them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIXED = (
    "--rl.reference: loss opd_topk compares with the likeliest tokens of one teacher, and several "
    "are mixed here; name one for each kind of task (KIND:NAME), or choose --rl.algorithm.loss opd"
)


@dataclass(frozen=True)
class ReferenceName:
    """One entry of `rl.reference`: `[KIND:]NAME[=WEIGHT]`."""

    name: str
    kind: str = ""
    """The kind of tasks that it is asked about; empty: all that no other entry names."""
    weight: float = 1.0


def parse_references(text: str) -> list[ReferenceName]:
    """The entries of `rl.reference`; none of an empty text, and a single one of a text that is a
    folder or has none of the marks. ValueError for an entry that is none."""
    if not text:
        return []
    if Path(text).expanduser().is_dir():
        return [ReferenceName(text)]
    return [_parse(entry.strip(), text) for entry in text.split(",")]


def _parse(entry: str, text: str) -> ReferenceName:
    kind, has_kind, rest = entry.rpartition(":")
    name, has_weight, number = rest.partition("=")
    try:
        weight = float(number) if has_weight else 1.0
    except ValueError:
        weight = math.nan
    if not name or (has_kind and not kind) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"--rl.reference {text}: {entry!r} is no reference; write NAME, NAME=WEIGHT with a "
            "weight above 0, or KIND:NAME, with commas between"
        )
    return ReferenceName(name, kind, weight)


def shares_of(kind: str, names: Sequence[ReferenceName]) -> list[float]:
    """The share that each reference has in the word on a task of this kind; the shares add up to 1.
    ValueError where no reference is asked about it."""
    own = [one.weight if one.kind and one.kind == kind else 0.0 for one in names]
    if not any(own):
        own = [0.0 if one.kind else one.weight for one in names]
    if not any(own):
        raise ValueError(
            f"--rl.reference: no teacher is named for tasks of kind {kind!r} (there are: "
            f"{', '.join(sorted({one.kind for one in names}))}); add {kind}:NAME, or a NAME alone "
            "for all other kinds"
        )
    return [weight / sum(own) for weight in own]


def check_mixture(names: Sequence[ReferenceName], *, is_topk: bool) -> None:
    """ValueError for a mixture of teachers where only one can be asked."""
    if is_topk and len({one.kind for one in names}) < len(names):
        raise ValueError(MIXED)
