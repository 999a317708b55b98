"""How much there is of what in a store, and what is there more than once."""

from __future__ import annotations

from dataclasses import dataclass

from nanorl.observability.store.database import Database


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Rollouts of one content hash: of the same task, with the same tokens."""

    content_hash: str
    num: int
    first: str
    """The `rollout_id` of the one that was stored first."""


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """The numbers of what a store holds."""

    num_rollouts: int
    num_tokens: int
    num_steps: int
    num_duplicates: int
    """Rollouts that say what an earlier one said."""
    num_tasks: int
    num_expired: int
    """Rollouts that were dropped since, of the steps that count."""
    num_expired_successes: int
    by_status: dict[str, int]
    by_kind: dict[str, int]
    content_bytes: int
    """The compressed contents, wherever they are."""
    used_bytes: int
    """What the database takes up: rows, indexes, and contents unless they lie elsewhere."""


def read_stats(db: Database) -> StoreStats:
    """Some full scans: a second for a million rollouts."""

    def read() -> StoreStats:
        num, tokens, steps, hashes, content = db.query(
            "SELECT count(*), sum(num_tokens), count(DISTINCT step), count(DISTINCT content_hash), "
            "sum(num_bytes) FROM rollouts"
        )[0]
        expired = db.query("SELECT sum(num_rollouts), sum(num_successes) FROM expired")[0]
        return StoreStats(
            num_rollouts=num,
            num_tokens=int(tokens or 0),
            num_steps=steps,
            num_duplicates=num - hashes,
            num_tasks=db.query("SELECT count(*) FROM tasks")[0][0],
            num_expired=int(expired[0] or 0),
            num_expired_successes=int(expired[1] or 0),
            by_status=_counts(db, "status"),
            by_kind=_counts(db, "kind"),
            content_bytes=int(content or 0),
            used_bytes=db.used_bytes(),
        )

    return db.read(read)


def find_duplicates(db: Database, limit: int | None) -> list[Duplicates]:
    """Those that are there most often first."""
    sql = (
        "SELECT d.h, d.num, r.rollout_id FROM (SELECT content_hash AS h, count(*) AS num, "
        "min(id) AS first FROM rollouts GROUP BY content_hash HAVING count(*) > 1) d "
        "JOIN rollouts r ON r.id = d.first ORDER BY d.num DESC, r.id"
    )
    values = []
    if limit is not None:
        sql, values = f"{sql} LIMIT ?", [limit]
    rows = db.read(lambda: db.query(sql, values))
    return [Duplicates(content_hash=h, num=num, first=first) for h, num, first in rows]


def _counts(db: Database, column: str) -> dict[str, int]:
    rows = db.query(f"SELECT {column}, count(*) FROM rollouts GROUP BY {column} ORDER BY {column}")
    return dict(rows)
