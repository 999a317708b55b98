"""Which rollouts go first: by step, by age, or those of least value when space is short.

When all take up more than they may, these go, the oldest of each kind first:

    1. rollouts that the infrastructure failed, and those that are there already (same hash)
    2. those of groups without a signal: every member got the same reward
    3. all others, but
    4. rare successes, in groups of which a quarter or fewer got reward 1, go last

The rank is found when a group is stored (the column `worth`): later the others of its group may be
gone. The newest step stays. What went is still counted (the table `expired`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from nanorl.observability.store.database import STEP_SHIFT, Clause, Database
from nanorl.types import Rollout, Status

DAY_S = 86_400
RARE_SHARE = 0.25
ROOM = 0.9
"""Of the bytes allowed that are left in use, so that the next step does not expire again."""

_COUNT = """
INSERT INTO expired (step, num_rollouts, num_successes)
SELECT step, count(*), sum(CASE WHEN reward >= 1 THEN 1 ELSE 0 END)
FROM rollouts WHERE {where} GROUP BY step
ON CONFLICT (step) DO UPDATE SET
    num_rollouts = expired.num_rollouts + excluded.num_rollouts,
    num_successes = expired.num_successes + excluded.num_successes
"""

_BY_WORTH = """
WITH firsts AS (
    SELECT content_hash AS h, min(id) AS first FROM rollouts GROUP BY content_hash
), valued AS (
    SELECT r.id AS id, r.num_bytes AS num_bytes,
        CASE WHEN r.id > f.first THEN 1 ELSE r.worth END AS worth
    FROM rollouts r JOIN firsts f ON f.h = r.content_hash
    WHERE r.id < ?
), running AS (
    SELECT id, worth, sum(num_bytes + ?) OVER (
        ORDER BY worth, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS before
    FROM valued
)
SELECT id FROM running WHERE coalesce(before, 0) < ? ORDER BY worth, id
"""


def worths(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Rank each rollout, by its id, among the others of its group: a rank of the list above,
    without what only the whole store tells."""
    groups: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    found = {}
    for group in groups.values():
        rewards = {one.reward for one in group if one.status is not Status.FAILED}
        is_rare = sum(one.is_success for one in group) <= RARE_SHARE * len(group)
        for one in group:
            if one.status is Status.FAILED:
                rank = 1
            elif len(rewards) < 2:
                rank = 2
            else:
                rank = 4 if is_rare and one.is_success else 3
            found[one.rollout_id] = rank
    return found


def older_steps(db: Database, keep_steps: int) -> Clause:
    """The rollouts that are not of the newest steps."""
    newest = _newest_step(db)
    return "id < ?", [max(0, newest - keep_steps + 1) << STEP_SHIFT]


def older_days(days: float) -> Clause:
    """The rollouts that were stored before so many days."""
    return "stored_at < ?", [time.time() - days * DAY_S]


def least_valuable(db: Database, max_bytes: int) -> list[int]:
    """The numbers of the rollouts that go, so that the others take up at most `max_bytes`."""
    sql = "SELECT count(*), sum(num_bytes) FROM rollouts"
    num, content_bytes = db.query(sql)[0]
    outside = db.query(
        "SELECT sum(num_bytes) FROM rollouts WHERE id IN "
        "(SELECT id FROM contents WHERE place IS NOT NULL)"
    )[0][0]
    used = db.used_bytes() + int(outside or 0)
    if not num or used <= max_bytes:
        return []
    overhead = max(0, used - int(content_bytes)) // num  # of a rollout: its rows in the indexes
    newest = _newest_step(db) << STEP_SHIFT
    excess = used - int(ROOM * max_bytes)
    return [row[0] for row in db.query(_BY_WORTH, (newest, overhead, excess))]


def count_expired(db: Database, where: str, values: Sequence[Any]) -> None:
    """Write down how many rollouts of each step go."""
    db.run(_COUNT.format(where=where), values)


def _newest_step(db: Database) -> int:
    newest = db.query("SELECT max(id) FROM rollouts")[0][0]
    return 0 if newest is None else newest >> STEP_SHIFT
