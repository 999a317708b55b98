"""Lists of rollouts as people leaf through them: a part of a slice in one of several orders, and
how many there are of what."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from nanorl.observability.store.database import Database
from nanorl.observability.store.filter import Filter
from nanorl.observability.store.rows import ENTRY_COLUMNS, Entry, to_entry

NEWEST, OLDEST = "newest", "oldest"
ORDERS = MappingProxyType(
    {
        NEWEST: "{id} DESC",
        OLDEST: "{id}",
        "worst": "r.status = 'failed', r.reward NULLS FIRST, {id} DESC",
        "best": "r.status = 'failed', r.reward DESC NULLS LAST, {id} DESC",
        "longest": "r.num_tokens DESC, {id} DESC",
    }
)
_OUTCOMES = (
    "status = 'finished' AND reward >= 1",
    "status = 'finished' AND coalesce(reward, 0) < 1",
    "status IN ('truncated_turn', 'truncated_context')",
    "status = 'failed'",
)


class Tally(NamedTuple):
    """The number of rollouts of a kind in a step, and what came of them."""

    kind: str
    step: int
    num: int
    num_right: int
    num_wrong: int
    num_cut: int
    num_failed: int


def find_page(
    db: Database, where: Filter, *, order: str, offset: int, limit: int
) -> tuple[list[Entry], int]:
    """A part of a slice, and how long all of it is."""
    source, values, number = where.sql()
    columns = ", ".join(f"r.{name}" for name in ENTRY_COLUMNS)
    by = ORDERS[order].format(id=number)
    sql = f"SELECT {columns} {source} ORDER BY {by} LIMIT ? OFFSET ?"
    rows = db.query(sql, [*values, limit, offset])
    [[total]] = db.query(f"SELECT count(*) {source}", values)
    return [to_entry(row) for row in rows], total


def count_outcomes(db: Database) -> list[Tally]:
    """Count what came of the rollouts, by step and kind."""
    counts = ", ".join(f"count(*) FILTER (WHERE {one})" for one in _OUTCOMES)
    sql = f"SELECT kind, step, count(*), {counts} FROM rollouts GROUP BY kind, step"
    return [Tally(*row) for row in db.query(f"{sql} ORDER BY step, kind")]
