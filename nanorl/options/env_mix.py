"""The options of a run in several environments: names, arguments, weights and limits of each.

    --env maze.py sums=math --env-weights 2 1 --env-args maze.size=7 sums.agent.max_turns=2

Every environment has a name: the one before a `=`, or else the file's (`maze`), the class's or the
catalog's own. An argument begins with the name of the environment that it is for; `NAME.agent.`
before a limit of the agent sets it for that environment alone.

Limits. An environment's own defaults (`agent.max_turns`) are its own in a mix, too. The option of
the run is the most that any of them has, or what the user gives, and no environment has more.
Defaults of other options are the run's, so the environments must agree on them, or the user decide.
Left out: the mix itself (envs/mix.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanorl.agents.limits import Limits
from nanorl.bounds import check_number
from nanorl.envs.catalog import is_address, parse_arguments
from nanorl.envs.env_kind import EnvKind
from nanorl.options.agent_config import AgentConfig
from nanorl.options.run_config import RunConfig, flatten
from nanorl.plugins import is_path

LIMITS = tuple(f"agent.{field.name}" for field in dataclasses.fields(Limits))
_NAMED = re.compile(r"([A-Za-z_][\w-]*)=(.+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One environment of several, as the options name it."""

    name: str
    spec: str
    """What `--env` would be if it were alone."""
    arguments: tuple[str, ...]
    """Its arguments, without its name."""
    limits: Mapping[str, Any]
    """Limits of the agent that the user gives for it alone, by their whole names."""
    weight: float


def members_of(config: RunConfig) -> dict[str, Member]:
    """The environments of a run by their names, in their order. ValueError where two have one name,
    or an argument is of none of them."""
    specs = [_named(spec) for spec in config.envs]
    names = [name for name, _ in specs]
    for name, spec in specs:
        if names.count(name) > 1:
            raise ValueError(
                f"--env {' '.join(config.envs)}: two of them are called {name}; give them names, "
                f"as {name}_1={spec}"
            )
    given = [_addressed(pair, names) for pair in config.env_args]
    weights = config.env_weights or (1.0,) * len(names)
    return {
        name: Member(
            name=name,
            spec=spec,
            arguments=tuple(pair for whose, pair in given if whose == name and not _limit(pair)),
            limits=_limits_of(name, [one for whose, one in given if whose == name and _limit(one)]),
            weight=weight,
        )
        for (name, spec), weight in zip(specs, weights, strict=True)
    }


def check_mix(config: RunConfig) -> None:
    """ValueError for weights and arguments that do not fit the environments, or tasks of nobody."""
    count, weights = len(config.envs), config.env_weights
    for weight in weights:
        check_number("--env-weights ", weight, 0, is_open=True)
    if weights and count < 2:
        raise ValueError(
            f"--env-weights {_shown(weights)}: there is one environment; name several with --env, "
            "or leave the weights out"
        )
    if weights and len(weights) != count:
        raise ValueError(
            f"--env-weights {_shown(weights)}: {len(weights)} for {count} environments; give one "
            "for each, in the order of --env"
        )
    if count < 2:
        return
    if config.tasks is not None:
        raise ValueError(
            f"--tasks {config.tasks} with {count} environments: nothing says whose tasks they are; "
            "give a file to the environment that plays them, as its argument or its `data`"
        )
    members_of(config)


def alone(config: RunConfig, member: Member) -> RunConfig:
    """The options of a run in this environment alone."""
    return dataclasses.replace(config, env=member.spec, env_args=member.arguments, env_weights=())


def mixed_defaults(
    config: RunConfig, own: Mapping[str, Mapping[str, Any]], given: Collection[str]
) -> dict[str, Any]:
    """The options that several environments stand for; `own` has the defaults of each, `given` what
    the user decides. ValueError where they do not agree."""
    found: dict[str, Any] = {}
    differ: dict[str, Mapping[str, Any]] = {}
    for option in dict.fromkeys(name for defaults in own.values() for name in defaults):
        if option in LIMITS or option in given:
            continue
        said = {name: one[option] for name, one in own.items() if option in one}
        found[option] = next(iter(said.values()))
        if any(value != found[option] for value in said.values()):
            differ[option] = said
    if differ:
        wanted = "; ".join(
            f"{option}: {', '.join(f'{name} {value}' for name, value in said.items())}"
            for option, said in differ.items()
        )
        flags = " ".join(f"--{one.replace('_', '-')} {found[one]}" for one in differ)
        raise ValueError(
            f"--env {' '.join(config.envs)}: a run has one value of each option, and their "
            f"defaults differ ({wanted}); say which, as {flags}"
        )
    members = members_of(config)
    for option in LIMITS:
        mine = getattr(config.agent, option.removeprefix("agent."))
        most = [{**own[name], **one.limits}.get(option, mine) for name, one in members.items()]
        found[option] = None if None in most else max(most)
    return found


def member_limits(config: RunConfig, kind: EnvKind, member: Member) -> AgentConfig:
    """The limits of an agent in one environment: its own, and never more than the run's. ValueError
    where they do not fit together."""
    stated = {name.replace("-", "_"): value for name, value in flatten(dict(kind.defaults)).items()}
    own = {name: stated[name] for name in LIMITS if name in stated} | dict(member.limits)
    smaller: dict[str, Any] = {}
    for option, value in own.items():
        name = option.removeprefix("agent.")
        both = [one for one in (value, getattr(config.agent, name)) if one is not None]
        smaller[name] = min(both, default=None)
    try:
        return dataclasses.replace(config.agent, **smaller)
    except ValueError as error:
        raise ValueError(f"the environment {member.name}: {error}") from None


def _named(spec: str) -> tuple[str, str]:
    """The name and the rest of what `--env` names."""
    if not spec:
        raise ValueError("--env: one of several is empty; code is the preset's own")
    if (found := _NAMED.fullmatch(spec)) is not None:
        return found[1], found[2]
    if is_address(spec):
        called = spec.rpartition("//")[2].rstrip("/")
    else:
        place, _, attribute = spec.rpartition(":")
        called = attribute if place else spec
        called = Path(called).stem if is_path(called) else called
    return re.sub(r"[^\w-]+", "_", called), spec


def _addressed(pair: str, names: Sequence[str]) -> tuple[str, str]:
    """The environment that an argument is for, and the argument."""
    name, dot, rest = pair.partition(".")
    if not dot or name not in names:
        raise ValueError(
            f"--env-args {pair}: does not say which environment it is for; write "
            f"{names[0]}.{pair} (there are {', '.join(names)})"
        )
    return name, rest


def _limit(pair: str) -> bool:
    """Say whether an argument is an option of the run; the environment's have no dots."""
    return "." in pair.partition("=")[0]


def _limits_of(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        option, _, text = pair.partition("=")
        if option not in LIMITS:
            raise ValueError(
                f"--env-args {name}.{pair}: one environment alone may have {', '.join(LIMITS)}; "
                "other options are the run's"
            )
        [value] = parse_arguments([f"value={text}"]).values()
        if not (value is None and option == "agent.max_response_tokens"):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"--env-args {name}.{pair}: must be a whole number")
            check_number(f"--env-args {name}.{option}=", value, 1)
        found[option] = value
    return found


def _shown(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)
