"""Rollout store benchmark: inserts a second, slice queries, size on disk.

    python scripts/bench_store.py [--json FILE] [--million] [--postgres]

Rollouts are like those of a small agent: 3 turns, 320 tokens on average, 8 a group, 1,024 a step,
1,000 tasks, a tenth of the second turns failed, a log-prob for every sampled token. `inserts` is
the rate of one `add_group` a step (1,024 rollouts and one fsync), packing included, over the last
fifth of the store; `inserts-of-8` that of one `add_group` a group, as a run that trains on one
group a step would do. `slice ...` is the median time of a page of 100 entries, built as objects.
With --million the same store is measured again when it holds a million; both databases are on the
disk of the folder given with --folder. --postgres starts a server of Debian's package.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_output import print_rows, write_json

from nanorl.store import Filter, RolloutStore
from nanorl.types import Rollout, Status, TurnSpan

GROUP, STEP = 8, 1_024
NUM_TASKS = 1_000
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


class Source:
    """Rollouts, each different; the arrays behind them are drawn once."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._tokens = rng.zipf(1.3, 200_000) % 49_152
        self._logps = (-rng.exponential(size=200_000)).astype(np.float32).astype(float)
        self._random = random.Random(0)

    def step(self, step: int) -> list[Rollout]:
        """The groups of a step."""
        tasks = [self._random.randrange(NUM_TASKS) for _ in range(STEP // GROUP)]
        return [
            self._rollout(step, group, member, task)
            for group, task in enumerate(tasks)
            for member in range(GROUP)
        ]

    def _rollout(self, step: int, group: int, member: int, task: int) -> Rollout:
        draw = self._random.random
        size = 200 + int(240 * draw())
        start = self._random.randrange(len(self._tokens) - size)
        spans, place = [], size // 4
        for _ in range(3):
            action, seen = place + size // 6, place + size // 4
            spans.append(
                TurnSpan(action_start=place, action_end=action, observation_end=min(seen, size))
            )
            place = seen
        mask = np.zeros(size, np.int64)
        for span in spans:
            mask[span.action_start : span.action_end] = 1
        fails = [
            {"num_executions": 1.0, "num_tool_errors": 1.0} if draw() < 0.1 else {} for _ in spans
        ]
        return Rollout(
            task_id=f"{KINDS[task % len(KINDS)]}-{task:016x}",
            group_id=f"s{step}-g{group}",
            rollout_id=f"s{step}-g{group}-m{member}",
            tokens=self._tokens[start : start + size].tolist(),
            loss_mask=mask.tolist(),
            logps=np.where(mask, self._logps[start : start + size], 0.0).tolist(),
            versions=np.where(mask, step, -1).tolist(),
            turn_spans=spans,
            turn_metrics=fails,
            reward=float(draw() < 0.3),
            status=Status.FAILED if draw() < 0.01 else Status.FINISHED,
            metrics={"num_turns": 3.0, "num_executions": 3.0, "tool_s": draw()},
        )


def fill(store: RolloutStore, source: Source, steps: range, *, at_once: int = STEP) -> list[float]:
    """Insert steps; the seconds of each."""
    times = []
    for step in steps:
        rollouts = source.step(step)
        start = time.perf_counter()
        for first in range(0, STEP, at_once):
            store.add_group(rollouts[first : first + at_once], step=step)
        times.append(time.perf_counter() - start)
    return times


def median_s(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
