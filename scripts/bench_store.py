"""Rollout store benchmark: inserts a second, slice queries, size on disk.

    python scripts/bench_store.py [--json FILE] [--million] [--postgres] [--folder FOLDER]

Rollouts are like those of a small agent: 3 turns, 320 tokens on average, 8 a group, 1,024 a step,
1,000 tasks, a tenth of all turns failed, log-probs of all sampled tokens. `inserts` is the rate
of one `add_group` a step (1,024 rollouts and one fsync), packing included: the median over the last
20 steps; `per_cpu_s` is the same by the CPU time of this process. `inserts-of-8` is the
rate of one `add_group` a group. `slice ...` is the median time of a page of 100 entries (objects).
With --million (SQLite alone) the same file is measured again when it holds a million, of which nine
tenths are copies under other ids and hashes. The peer is what is quickly written by hand: SQLite, a
row of JSON each, one transaction a step, no index.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_output import print_rows, write_json
from postgres_server import PostgresServer

from nanorl.observability.store import Filter, RolloutStore
from nanorl.observability.store.database import STEP_SHIFT
from nanorl.types import Rollout, Status, TurnSpan

GROUP, STEP = 8, 1_024
NUM_TASKS = 1_000
VOCABULARY = 49_152
KINDS = ("sums", "squares", "words", "dates", "code")
SMALL = 100_000
SLICES = (
    "turn=2, failed",
    "step=50",
    "step=20..60, kind=code, reward>=1",
    "task={task}",
    "group={group}",
    "hash={hash}",
    "version=30, status=failed",
    "turn=3, failed, kind=words, success",
    "turns>=4",
)
NUM_REPEATS = 21
MOST_TIMED = 20  # steps
NUM_OF_8 = 2
"""Steps that are inserted group by group."""
NUM_PEER = 10
"""Steps of the peer."""
PAGE = 100


class Source:
    """Rollouts, each different from all others by its first two tokens; the rest is of a few
    thousand templates."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._tokens = rng.zipf(1.3, 200_000) % VOCABULARY
        self._logps = (-rng.exponential(size=200_000)).astype(np.float32).astype(float)
        self._random = random.Random(seed)
        self._templates = [self._template() for _ in range(4_096)]
        self._num = 0

    def step(self, step: int) -> list[Rollout]:
        """The groups of a step."""
        tasks = [self._random.randrange(NUM_TASKS) for _ in range(STEP // GROUP)]
        return [
            self._rollout(step, group, member, task)
            for group, task in enumerate(tasks)
            for member in range(GROUP)
        ]

    def _rollout(self, step: int, group: int, member: int, task: int) -> Rollout:
        self._num += 1
        template = self._random.choice(self._templates)
        return replace(
            template,
            task_id=f"{KINDS[task % len(KINDS)]}-{task:016x}",
            group_id=f"s{step}-g{group}",
            rollout_id=f"s{step}-g{group}-m{member}",
            tokens=[self._num % VOCABULARY, self._num // VOCABULARY, *template.tokens[2:]],
            versions=[step if one else -1 for one in template.loss_mask],
        )

    def _template(self) -> Rollout:
        draw = self._random.random
        size = 200 + int(240 * draw())
        start = self._random.randrange(len(self._tokens) - size)
        spans, place = [], size // 4
        for _ in range(3):
            end = place + size // 6
            spans.append(
                TurnSpan(action_start=place, action_end=end, observation_end=end + size // 12)
            )
            place = spans[-1].observation_end
        mask: np.ndarray = np.zeros(size, np.int64)
        for span in spans:
            mask[span.action_start : span.action_end] = 1
        counted = [{"num_executions": 1.0} for _ in spans]
        for one in counted:
            if draw() < 0.1:
                one["num_tool_errors"] = 1.0
        return Rollout(
            task_id="",
            group_id="",
            rollout_id="",
            tokens=self._tokens[start : start + size].tolist(),
            loss_mask=mask.tolist(),
            logps=np.where(mask, self._logps[start : start + size], 0.0).tolist(),
            versions=np.where(mask, 0, -1).tolist(),
            turn_spans=spans,
            turn_metrics=counted,
            reward=float(draw() < 0.3),
            status=Status.FAILED if draw() < 0.01 else Status.FINISHED,
            metrics={"num_turns": 3.0, "num_executions": 3.0, "tool_s": draw()},
        )


def fill(
    store: RolloutStore, source: Source, steps: range, *, at_once: int = STEP
) -> list[tuple[float, float]]:
    """Insert steps; the seconds of each, on the wall and of this process's CPU."""
    times = []
    for step in steps:
        rollouts = source.step(step)
        start, cpu = time.perf_counter(), time.process_time()
        for first in range(0, STEP, at_once):
            store.add_group(rollouts[first : first + at_once], step=step)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    return times


def insert_row(name: str, times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The median rate, the best one, and the median rate by CPU time."""
    rates = [STEP / wall for wall, _ in times]
    return {
        **row(name, "rollouts/s", statistics.median(rates)),
        "best": max(rates),
        "per_cpu_s": statistics.median(STEP / cpu for _, cpu in times),
        "num_steps": len(times),
    }


def json_rate(folder: Path, source: Source) -> float:
    """Rollouts a second of the peer: the median of a few steps."""
    rates = []
    with closing(sqlite3.connect(folder / "peer.sqlite", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE rollouts (rollout_id TEXT PRIMARY KEY, content TEXT)")
        for step in range(NUM_PEER):
            rollouts = source.step(step)
            start = time.perf_counter()
            db.execute("BEGIN")
            rows = ((one.rollout_id, json.dumps(vars(one), default=vars)) for one in rollouts)
            db.executemany("INSERT INTO rollouts VALUES (?, ?)", rows)
            db.execute("COMMIT")
            rates.append(STEP / (time.perf_counter() - start))
    return statistics.median(rates)


def slice_rows(store: RolloutStore, name: str) -> list[dict[str, Any]]:
    """A row for each of SLICES, and what the whole costs by its summary."""
    one = store.entries(limit=1, newest_first=True)[0]
    rows = []
    for text in SLICES:
        where = Filter.parse(
            text.format(task=one.task_id, group=one.group_id, hash=one.content_hash)
        )
        times = []
        for _ in range(NUM_REPEATS):
            start = time.perf_counter()
            found = store.entries(where=where, limit=PAGE)
            times.append((time.perf_counter() - start) * 1e3)
        about = {"best": min(times), "num_found": len(found), "num_in_all": store.count(where)}
        rows.append({**row(f"{name} slice {text}", "ms", statistics.median(times)), **about})
    return rows


def copy_up(path: Path, num_steps: int) -> None:
    """Nine copies of all that is there, of `num_steps` steps, under later steps, other ids and
    other hashes, made by SQLite itself: it is what the file looks like that counts."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = -65536")
        columns = [row[1] for row in db.execute("PRAGMA table_info(rollouts)")]
        for copy in range(1, 10):
            ahead = copy * num_steps
            renamed = f"'s' || (step + {ahead}) || substr({{0}}, instr({{0}}, '-'))"
            changed = {
                "id": f"id + {ahead << STEP_SHIFT}",
                "rollout_id": renamed.format("rollout_id"),
                "group_id": renamed.format("group_id"),
                "step": f"step + {ahead}",
                "version": f"version + {ahead}",
                "content_hash": "lower(hex(randomblob(16)))",
            }
            values = ", ".join(changed.get(name, name) for name in columns)
            last = num_steps << STEP_SHIFT
            rest = "turn, num_tokens, num_observation_tokens, reward, is_failed"
            shifted = f"id + {ahead << STEP_SHIFT}"
            db.execute("BEGIN")
            db.execute(f"INSERT INTO rollouts SELECT {values} FROM rollouts WHERE id < {last}")
            db.execute(
                f"INSERT INTO contents SELECT {shifted}, content, place FROM contents "
                f"WHERE id < {last}"
            )
            db.execute(f"INSERT INTO turns SELECT {shifted}, {rest} FROM turns WHERE id < {last}")
            db.execute("COMMIT")
            print(f"  copy {copy}", file=sys.stderr, flush=True)


def measure_there(store: RolloutStore, name: str, steps: range) -> list[dict[str, Any]]:
    """Insert steps, the last two group by group, then ask."""
    source = Source(seed=steps.start)
    whole, alone = steps[:-NUM_OF_8], steps[-NUM_OF_8:]
    times = fill(store, source, whole)
    return [
        insert_row(f"{name} inserts", times[-MOST_TIMED:]),
        insert_row(f"{name} inserts-of-8", fill(store, source, alone, at_once=GROUP)),
        *slice_rows(store, name),
        row(
            f"{name} on disk",
            "bytes a rollout",
            (stats := store.stats()).used_bytes / stats.num_rollouts,
        ),
    ]


def measure(address: str, name: str, *, has_million: bool) -> list[dict[str, Any]]:
    """Fill a store to 100,000, measure there; the same at a million."""
    num_steps = SMALL // STEP
    with RolloutStore(address) as store:
        rows = measure_there(store, f"{name} 100k", range(num_steps))
    if has_million:
        copy_up(Path(address), num_steps)
        with RolloutStore(address) as store:
            later = range(10 * num_steps, 10 * num_steps + MOST_TIMED + NUM_OF_8)
            rows += measure_there(store, f"{name} 1M", later)
    return rows


def add_peer(rows: Sequence[dict[str, Any]], rate: float) -> None:
    """Set the rates of whole steps beside the peer's."""
    for one in rows:
        if one["name"].endswith(" inserts"):
            one |= {"peer": "rows of JSON", "peer_value": rate, "ratio": one["value"] / rate}


def row(name: str, unit: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--million", action="store_true", help="fill it up to a million, too")
    parser.add_argument("--postgres", action="store_true", help="measure PostgreSQL instead")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    options = parser.parse_args()
    if options.postgres:
        with PostgresServer(options.folder) as server:
            rows = measure(f"{server.address}&run=bench", "postgres", has_million=False)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            address = f"{folder}/rollouts.sqlite"
            rows = measure(address, "sqlite", has_million=options.million)
            add_peer(rows, json_rate(Path(folder), Source(seed=1)))
    print_rows(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
