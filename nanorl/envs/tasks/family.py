"""`Family`: the generators of a preset's problems, and the tasks that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nanorl.envs.tasks.problem import Problem, ProblemGenerator
from nanorl.envs.tasks.source import GeneratedTasks


@dataclass(frozen=True, kw_only=True)
class Family:
    """The generators of one preset by kind; the kinds in `several_turns` need to look first."""

    name: str
    generators: Mapping[str, ProblemGenerator]
    several_turns: frozenset[str] = field(default_factory=frozenset)

    def tasks(self, seed: int) -> GeneratedTasks[Problem]:
        """The tasks of a run that trains on this family."""
        return GeneratedTasks(generators_of([self]), seed)


def generators_of(families: Sequence[Family]) -> dict[str, ProblemGenerator]:
    """The generators of all families by names such as `tiny/sums`."""
    return {
        f"{family.name}/{kind}": generator
        for family in families
        for kind, generator in family.generators.items()
    }
