"""`JudgeCosts`: the price of judging, counted from one step to the next.

    judge_calls           questions to the model, each try one
    judge_cached          verdicts that the file of verdicts knew
    judge_prompt_tokens   read by it; of an address, what its answers say
    judge_reply_tokens    written by it
    judge_s               seconds in which at least one question was under way

Left out: prices in money, which addresses do not tell.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

COUNTED = ("calls", "cached", "prompt_tokens", "reply_tokens")


class JudgeCosts:
    """Counts of one judge. `clock` tells the time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._num_open = 0
        self._busy_s = self._since = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Inside, a question is under way."""
        self._pass_time()
        self._counts["calls"] += 1
        self._num_open += 1
        try:
            yield
        finally:
            self._pass_time()
            self._num_open -= 1

    def add(self, **counts: int) -> None:
        """Count some of `COUNTED`."""
        self._counts.update(counts)

    def take(self) -> dict[str, float]:
        """The costs since the last call, as metrics."""
        self._pass_time()
        found = {f"judge_{name}": float(self._counts[name]) for name in COUNTED}
        found["judge_s"] = self._busy_s
        self._counts.clear()
        self._busy_s = 0.0
        return found

    def _pass_time(self) -> None:
        now = self._clock()
        if self._num_open:
            self._busy_s += now - self._since
        self._since = now


def total_costs(costs: Iterable[JudgeCosts]) -> dict[str, float]:
    """The costs of several judges since the last call; seconds of theirs may have overlapped."""
    total: Counter[str] = Counter()
    for one in costs:
        total.update(one.take())
    return dict(total)
