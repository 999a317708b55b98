"""Published runs: their configurations, by name, and the figures that they are compared with.

published.json holds families of runs on the same hardware, model and data. A family has a `base`
configuration, the parameters that were `fitted` (by fit.py, on its runs of role "fit"), and `runs`,
each with what differs and with the published figures. All names are of `SimulationConfig` and of
`SimulationResult`.
Left out: how parameters are fitted (fit.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanorl.inspection.simulate.simulation_config import SimulationConfig
from nanorl.options.values import read_record

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A run and its published figures, e.g. `{"step_s": 356.3, "wait_s": 177.85}`."""

    config: SimulationConfig
    role: Literal["fit", "predict"]
    figures: Mapping[str, float]
    baseline: str
    """The run whose step is divided by this one's for the speed-up; empty: none."""
    changes: Mapping[str, Any]
    """Its configuration as far as it differs from the family's."""


@dataclass(frozen=True, kw_only=True)
class PublishedFamily:
    """Runs that share what was fitted."""

    name: str
    source: str
    base: Mapping[str, Any]
    fitted: Mapping[str, float]
    runs: Mapping[str, PublishedRun]

    def config(self, run: str, fitted: Mapping[str, float]) -> SimulationConfig:
        """The configuration of a run under other values of the fitted parameters."""
        return _make(run, self.base, fitted, self.runs[run].changes)


def read_published() -> list[PublishedFamily]:
    """All families of published.json."""
    return [_family(data) for data in json.loads(FILE.read_text("utf-8"))["families"]]


def config_names() -> list[str]:
    """The runs that can be simulated by name."""
    return [name for family in read_published() for name in family.runs]


def read_config(source: str) -> SimulationConfig:
    """The configuration of a published run, or that of a JSON file. `ValueError` says what is wrong
    with it."""
    for family in read_published():
        if source in family.runs:
            return family.runs[source].config
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"--config {source}: no such file, and no configuration of that name; there are "
            f"{', '.join(config_names())}"
        )
    try:
        data = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {source}: not JSON: {error}") from None
    return read_record(SimulationConfig, data, where=f"--config {source}")


def _family(data: Mapping[str, Any]) -> PublishedFamily:
    runs = {
        name: PublishedRun(
            config=_make(name, data["base"], data["fitted"], run["config"]),
            role=run["role"],
            figures=run["figures"],
            baseline=run.get("baseline", ""),
            changes=run["config"],
        )
        for name, run in data["runs"].items()
    }
    return PublishedFamily(
        name=data["name"],
        source=data["source"],
        base=data["base"],
        fitted=data["fitted"],
        runs=runs,
    )


def _make(
    name: str, base: Mapping[str, Any], fitted: Mapping[str, float], changes: Mapping[str, Any]
) -> SimulationConfig:
    data = _merged(base, _nested(fitted))
    return read_record(SimulationConfig, _merged(data, {**changes, "name": name}), where=name)


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`low` with the values of `high`, section by section."""
    merged = dict(low)
    for name, value in high.items():
        is_section = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if is_section else value
    return merged


def _nested(values: Mapping[str, float]) -> dict[str, Any]:
    """{"engine.step_s": 0.01} as {"engine": {"step_s": 0.01}}."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return nested
