"""What travels to the process that sends spans: plain records, made by the run (run_spans.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanorl.agents.times import RolloutTimes
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout

Attribute = str | bool | int | float


@dataclass(frozen=True, kw_only=True)
class SpanRecord:
    """A span that has ended, or that another one needs as its parent."""

    name: str
    span_id: int
    parent_id: int = 0
    """0: the root of the run's trace."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class PlayedRollouts:
    """Rollouts that one phase or step has played, below one span."""

    parent_id: int
    step: int
    phase: str
    """rl, or the evaluation: untrained, before, after, no_tool, blind, first_hidden."""
    rollouts: Sequence[Rollout]
    times: Mapping[str, RolloutTimes]


@dataclass(frozen=True, kw_only=True)
class SpannedRun:
    """The run whose trace it is."""

    identity: str
    """The same in every process of the run; the trace's id follows from it."""
    config: RunConfig
    model_folder: Path
    """For the tokenizer."""
