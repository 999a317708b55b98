"""The text that Prometheus scrapes: the engine's totals and what the HTTP side adds.

Source of the format: "Exposition formats", text format 0.0.4, of the Prometheus documentation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

PREFIX = "nanoinfer_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = frozenset({"num_running", "num_waiting", "cache_use", "version"})
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Durations in seconds, counted into buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def lines(self, name: str) -> list[str]:
        lines = [f"# TYPE {PREFIX}{name} histogram"]
        total = 0
        for bound, count in zip((*_BUCKETS_S, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{PREFIX}{name}_sum {self._sum_s}", f"{PREFIX}{name}_count {total}"]


class HttpMetrics:
    """Counts of what happens to HTTP requests."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # (route, status)
        self.num_active = 0  # completions in flight
        self.num_hang_ups = 0
        self.first_token_s = Histogram()  # streaming requests alone
        self.request_s = Histogram()

    def render(self, engine: Mapping[str, float]) -> str:
        lines: list[str] = []
        for name, value in sorted(engine.items()):
            kind = "gauge" if name in _GAUGES else "counter"
            full = PREFIX + (name if kind == "gauge" else f"{name.removeprefix('num_')}_total")
            lines += [f"# TYPE {full} {kind}", f"{full} {value}"]
        lines += [f"# TYPE {PREFIX}http_responses_total counter"]
        for (route, status), count in sorted(self.responses.items()):
            labels = f'route="{route}",status="{status}"'
            lines.append(f"{PREFIX}http_responses_total{{{labels}}} {count}")
        lines += [f"# TYPE {PREFIX}http_hang_ups_total counter"]
        lines += [f"{PREFIX}http_hang_ups_total {self.num_hang_ups}"]
        lines += [f"# TYPE {PREFIX}http_active gauge", f"{PREFIX}http_active {self.num_active}"]
        lines += self.first_token_s.lines("first_token_seconds")
        lines += self.request_s.lines("request_seconds")
        return "\n".join(lines) + "\n"
