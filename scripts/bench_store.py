"""Rollout store benchmark: inserts a second, slice queries, size on disk.

    python scripts/bench_store.py [--json FILE] [--million] [--postgres] [--folder FOLDER]

Rollouts are like those of a small agent: 3 turns, 320 tokens on average, 8 a group, 1,024 a step,
1,000 tasks, a tenth of all turns failed, log-probs of all sampled tokens. `inserts` is the rate
of one `add_group` a step (1,024 rollouts and one fsync), packing included: the median over the last
fifth of the store; `per_cpu_s` is the same by the CPU time of this process. `inserts-of-8` is the
rate of one `add_group` a group. `slice ...` is the median time of a page of 100 entries (objects).
With --million the same store is measured again when it holds a million.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_output import print_rows, write_json
from postgres_server import PostgresServer

from nanorl.store import Filter, RolloutStore
from nanorl.types import Rollout, Status, TurnSpan

GROUP, STEP = 8, 1_024
NUM_TASKS = 1_000
VOCABULARY = 49_152
KINDS = ("sums", "squares", "words", "dates", "code")
SMALL, LARGE = 100_000, 1_000_000
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
NUM_OF_8 = 2
"""Steps that are inserted group by group."""
PAGE = 100


class Source:
    """Rollouts, each different from all others by its first two tokens; the rest is of a few
    thousand templates."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._tokens = rng.zipf(1.3, 200_000) % VOCABULARY
        self._logps = (-rng.exponential(size=200_000)).astype(np.float32).astype(float)
        self._random = random.Random(0)
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
        mask = np.zeros(size, np.int64)
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


def measure(address: str, name: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Fill a store to each size in turn, and measure there."""
    source, rows, step = Source(), [], 0
    with RolloutStore(address) as store:
        for size in sizes:
            last = size // STEP
            times = fill(store, source, range(step, last))
            begun = f"{name} {size // 1000}k"
            rows.append(insert_row(f"{begun} inserts", times[-(last // 5) :]))
            alone = range(last, last + NUM_OF_8)
            rows.append(
                insert_row(f"{begun} inserts-of-8", fill(store, source, alone, at_once=GROUP))
            )
            step = last + NUM_OF_8
            rows += slice_rows(store, begun)
            stats = store.stats()
            used = stats.used_bytes / stats.num_rollouts
            rows.append(row(f"{begun} on disk", "bytes a rollout", used))
            print(f"  {begun}: {rows[-len(SLICES) - 3]}", file=sys.stderr, flush=True)
    return rows


def row(name: str, unit: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--million", action="store_true", help="fill it up to a million, too")
    parser.add_argument("--postgres", action="store_true", help="measure PostgreSQL instead")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    options = parser.parse_args()
    sizes = [SMALL, LARGE] if options.million else [SMALL]
    if options.postgres:
        with PostgresServer(options.folder) as server:
            rows = measure(f"{server.address}&run=bench", "postgres", sizes)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows = measure(f"{folder}/rollouts.sqlite", "sqlite", sizes)
    print_rows(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
