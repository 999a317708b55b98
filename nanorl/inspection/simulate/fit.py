"""Fits the few unknown parameters of published runs, predicts the others, and prints the errors.

    python -m nanorl.inspection.simulate.fit                # the table of predictions
    python -m nanorl.inspection.simulate.fit --refit NAME   # fit a family again: published.json

A family has as many parameters as published.json lists under `fitted`, and they see only the
figures of its runs of role "fit". They are searched one after the other, up and down by a factor
that is halved when neither helps, for the least sum of squared logarithms of simulated / published.
Search and table simulate a quarter of a run, a quarter of its tasks on a quarter of its replicas,
since these are alike; the search moreover one step only, with twice the quantum.
Left out: confidence of the parameters; there are hardly more figures than parameters.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nanorl.inspection.simulate.published import FILE, PublishedFamily, read_published
from nanorl.inspection.simulate.simulation import simulate
from nanorl.inspection.simulate.simulation_config import SimulationConfig
from nanorl.inspection.simulate.simulation_result import SimulationResult

FIRST_FACTOR, NUM_HALVINGS = 1.25, 3
PARTS = 4
"""So small a part of a run is simulated."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure beside the simulated one."""

    run: str
    figure: str
    role: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative, of the simulated figure."""
        return self.simulated / self.published - 1


def fit(family: PublishedFamily, num_halvings: int = NUM_HALVINGS) -> dict[str, float]:
    """The parameters of a family that fit its runs of role "fit" best."""

    def miss(values: Mapping[str, float]) -> float:
        return sum(one * one for one in _misses(family, values))

    return descend(miss, dict(family.fitted), num_halvings)


def descend(
    miss: Callable[[Mapping[str, float]], float], start: Mapping[str, float], num_halvings: int
) -> dict[str, float]:
    """A minimum of `miss` near `start`, all values positive: pattern search on their logarithms."""
    best, least, step = dict(start), miss(start), math.log(FIRST_FACTOR)
    for _ in range(num_halvings):
        is_better = True
        while is_better:
            is_better = False
            for name in best:
                for sign in (1, -1):
                    tried = {**best, name: best[name] * math.exp(sign * step)}
                    if (found := miss(tried)) < least:
                        best, least, is_better = tried, found, True
                        break
        step /= 2
    return best


def _misses(family: PublishedFamily, values: Mapping[str, float]) -> Iterator[float]:
    for name, run in family.runs.items():
        if run.role == "fit":
            try:
                config = _coarse(family.config(name, values))
            except ValueError:  # outside what a configuration may be
                yield math.inf
                continue
            result = simulate(config)
            for figure, published in run.figures.items():
                if figure in ("wait_s", "rollout_s", "tail_s"):
                    yield math.log(max(result.mean(figure), 1e-9) / published)


def part_of(config: SimulationConfig) -> SimulationConfig:
    """A quarter of the run; the trainer's phases take as long as on the whole."""
    work, layout = config.workload, config.cluster
    return replace(
        config,
        workload=replace(work, tasks_per_step=work.tasks_per_step // PARTS),
        cluster=replace(layout, replicas=layout.replicas // PARTS),
    )


def _coarse(config: SimulationConfig) -> SimulationConfig:
    part = part_of(config)
    return replace(part, warmup_steps=0, measured_steps=1, quantum=config.quantum * 2)


def compare(family: PublishedFamily) -> list[Comparison]:
    """Every published figure of a family, with the simulated one."""
    results = {name: simulate(part_of(run.config)) for name, run in family.runs.items()}
    return [
        Comparison(
            run=name,
            figure=figure,
            role="predict" if figure == "speed_up" else run.role,
            published=published,
            simulated=_figure(results, name, run.baseline, figure),
        )
        for name, run in family.runs.items()
        for figure, published in run.figures.items()
    ]


def _figure(
    results: Mapping[str, SimulationResult], name: str, baseline: str, figure: str
) -> float:
    result = results[name]
    if figure == "speed_up":
        return results[baseline].step_s / result.step_s
    if figure == "num_preemptions":
        config = result.config
        num_steps = config.warmup_steps + config.measured_steps
        return PARTS * result.num_preemptions / num_steps
    return result.mean(figure)


def table(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as Markdown."""
    lines = [
        "| run | figure | | published | SIMULATED | error |",
        "|---|---|---|--:|--:|--:|",
    ]
    for one in comparisons:
        digits = ".2f" if one.figure == "speed_up" else ".1f"
        lines.append(
            f"| {one.run} | {one.figure} | {one.role} | {one.published:{digits}} | "
            f"{one.simulated:{digits}} | {one.error:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--refit", metavar="NAME", help="fit this family again, and write it down")
    parser.add_argument("--only", metavar="NAME", help="the table of this family alone")
    options = parser.parse_args()
    if options.refit:
        refit(options.refit)
        return
    for family in read_published():
        if options.only in (None, family.name):
            values = ", ".join(f"{name} = {value:.4g}" for name, value in family.fitted.items())
            print(f"{family.name}: {family.source}\nFitted: {values}\n")
            print(table(compare(family)), "\n", flush=True)


def refit(name: str) -> None:
    """Fit the family of that name and write its parameters into published.json."""
    families = {family.name: family for family in read_published()}
    if name not in families:
        raise ValueError(f"--refit {name}: no such family; there are {', '.join(families)}")
    values = fit(families[name])
    print(values)
    data = json.loads(FILE.read_text("utf-8"))
    for one in data["families"]:
        if one["name"] == name:
            one["fitted"] = {path: float(f"{value:.4g}") for path, value in values.items()}
    FILE.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
