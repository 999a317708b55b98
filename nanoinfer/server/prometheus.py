"""What Prometheus scrapes of a server: the engine's totals and what the HTTP side adds.

It needs the package prometheus_client, of the extra `serve`. Left out: the process' own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "nanoinfer_"
_GAUGES = frozenset({"num_running", "num_waiting", "cache_use", "version"})
_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """Counts of what happens to HTTP requests, in a registry of its own beside those of `engine`:
    two servers in one process do not mix."""

    def __init__(self, engine: Callable[[], Mapping[str, float]]) -> None:
        self.num_active = 0  # completions in flight
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        self.responses = Counter(
            f"{PREFIX}http_responses", "Answers.", ("route", "status"), registry=registry
        )
        self.hang_ups = Counter(
            f"{PREFIX}http_hang_ups", "Clients that did not wait.", registry=registry
        )
        active = Gauge(f"{PREFIX}http_active", "Completions in flight.", registry=registry)
        active.set_function(lambda: self.num_active)
        self.first_token_s = _durations("first_token", "Until a stream's first token.", registry)
        self.request_s = _durations("request", "Until an answer began.", registry)


def _durations(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"{PREFIX}{name}_seconds", text, buckets=_BUCKETS_S, registry=registry)


class EngineCollector(Collector):
    """The numbers of an engine whenever somebody scrapes."""

    def __init__(self, engine: Callable[[], Mapping[str, float]]) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._engine().items()):
            text = f"{name} of the engine."
            if name in _GAUGES:
                yield GaugeMetricFamily(PREFIX + name, text, value)
            else:
                yield CounterMetricFamily(PREFIX + name.removeprefix("num_"), text, value)
