"""A run as Prometheus' metrics: the board's numbers, and a series of each number of each role.

    nanorl_step, nanorl_steps_total, nanorl_policy_version, nanorl_phase{phase}
    nanorl_train_<metric>                          a step's metrics: reward, success, grad_norm ...
    nanorl_seconds_total{part}                     rollout, train, sync, wait, step
    nanorl_quiet_seconds                           since anything was finished
    nanorl_token_staleness                         histogram, in policy versions
    nanorl_role_state{role,kind,host,state}        1 for the state it is in, 0 for the others
    nanorl_role_restarts_total, nanorl_role_idle_ratio, nanorl_role_<metric>{role,kind,host}

Source: "Metric and label naming" of the Prometheus documentation (base units, `_total` for
counters). It needs the package prometheus_client, of the extra `monitor`. Left out: rates, which
Prometheus computes itself from counters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from nanoinfer.engine_core import Metrics
from nanorl.observability.monitor.board import RunBoard, is_seconds
from nanorl.observability.monitor.monitor_control import RoleState, RoleStatus

_AGES = (0, 1, 2, 4, 8, 16, 32, 64)  # --rl.max-staleness is 64 at most
_COUNTERS = frozenset({"busy_s", *(field.name for field in fields(Metrics))})
_LABELS = ("role", "kind", "host")


def make_registry(board: RunBoard, roles: Callable[[], Sequence[RoleStatus]]) -> CollectorRegistry:
    """A registry of its own, so that two runs in one process do not mix; with the driver's memory,
    CPU time and open files as `process_*`."""
    registry = CollectorRegistry()
    registry.register(RunCollector(board, roles))
    ProcessCollector(registry=registry)
    return registry


class RunCollector(Collector):
    """Reads board and roles whenever somebody scrapes."""

    def __init__(self, board: RunBoard, roles: Callable[[], Sequence[RoleStatus]]) -> None:
        self._board = board
        self._roles = roles

    def collect(self) -> Iterator[Metric]:
        yield from self._of_run()
        yield from self._of_roles(self._roles())

    def _of_run(self) -> Iterator[Metric]:
        board = self._board
        phase = GaugeMetricFamily("nanorl_phase", "What the run is doing.", labels=["phase"])
        phase.add_metric([board.phase], 1.0)
        yield phase
        yield CounterMetricFamily(
            "nanorl_steps", "RL steps that this process finished.", value=board.num_steps
        )
        yield GaugeMetricFamily(
            "nanorl_quiet_seconds", "Time since anything was finished.", value=board.quiet_s
        )
        if board.step is None:
            return
        yield GaugeMetricFamily("nanorl_step", "The last finished RL step.", value=board.step)
        yield GaugeMetricFamily(
            "nanorl_policy_version", "Of the trained weights.", value=board.step + 1
        )
        for name, value in board.metrics.items():
            yield GaugeMetricFamily(
                f"nanorl_train_{_spelled(name)}", f"{name} of the last step.", value=value
            )
        seconds = CounterMetricFamily(
            "nanorl_seconds", "Time of all steps by what it was spent on.", labels=["part"]
        )
        for part, spent_s in board.seconds.items():
            seconds.add_metric([part], spent_s)
        yield seconds
        yield self._staleness()

    def _staleness(self) -> Metric:
        counts = self._board.token_staleness
        buckets = [
            (f"{age:.1f}", float(sum(n for a, n in counts.items() if a <= age))) for age in _AGES
        ]
        buckets.append(("+Inf", float(counts.total())))
        return HistogramMetricFamily(
            "nanorl_token_staleness",
            "Tokens trained on by how many policy versions ago they were sampled.",
            buckets=buckets,
            sum_value=float(sum(age * n for age, n in counts.items())),
        )

    def _of_roles(self, roles: Sequence[RoleStatus]) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "nanorl_role_state", "1 for the state of a role.", labels=[*_LABELS, "state"]
        )
        restarts = CounterMetricFamily(
            "nanorl_role_restarts", "How often a role was restarted.", labels=_LABELS
        )
        idle = GaugeMetricFamily(
            "nanorl_role_idle_ratio", "Idle share of the last step's time.", labels=_LABELS
        )
        families: dict[str, Metric] = {}
        for role in roles:
            labels = [role.name, role.kind, role.host]
            for name in get_args(RoleState):
                state.add_metric([*labels, name], float(role.state == name))
            restarts.add_metric(labels, role.restarts)
            if role.name in self._board.idle:
                idle.add_metric(labels, self._board.idle[role.name])
            for name, value in role.metrics.items():
                family = families.setdefault(name, _family(name))
                family.add_metric(labels, value)  # type: ignore[attr-defined]
        yield from (state, restarts, idle, *families.values())


def _family(name: str) -> Metric:
    """A counter for the totals of an engine, `busy_s` and `*_total`; a gauge for other numbers."""
    full = f"nanorl_role_{_spelled(name)}"
    if name in _COUNTERS or name.endswith("_total"):
        return CounterMetricFamily(
            full.removesuffix("_total"), f"{name} of a role.", labels=_LABELS
        )
    return GaugeMetricFamily(full, f"{name} of a role.", labels=_LABELS)


def _spelled(name: str) -> str:
    """As Prometheus writes it: units in full, no other characters than letters, digits and _."""
    if is_seconds(name):
        name = name.removesuffix("_s") + "_seconds"
    elif name.endswith("_per_s"):
        name = name.removesuffix("_s") + "_second"
    return re.sub(r"\W", "_", name, flags=re.ASCII)
