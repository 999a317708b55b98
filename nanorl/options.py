"""From what a user gives, flags, a file or Python values, to the options of a run.

Later ones win: the preset, its environment's own defaults, the published recipe (`--algorithm`),
`--config run.toml`, flags. A resumed run and a fork begin with the options of the run that they go
on from (continuation.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from nanorl.algorithms.recipes import RECIPES
from nanorl.config import RunConfig, option_names
from nanorl.continuation import check_fork, check_resume, fork_defaults, read_config
from nanorl.envs.base import EnvKind
from nanorl.envs.run_kind import run_kind
from nanorl.presets import PRESETS, get_preset

ALIASES: Mapping[str, str] = {
    "--agent": "--agent.loop",
    "--agent-args": "--agent.loop-args",
    "--sandbox": "--tool.sandbox",
    "--sandbox-image": "--tool.image",
    "--allow-unsafe-sandbox": "--tool.allow-unsafe-sandbox",
}


def parse_arguments(
    arguments: Sequence[str], env: object = None, *, verb: str = "train"
) -> RunConfig:
    """The options that a command line gives; `env` is an environment given as an object, `verb` the
    verb of `nanorl` that takes them."""
    arguments = [ALIASES.get(one, one) for one in arguments]
    known = _early(arguments)
    if known.resume and known.fork:
        raise ValueError(
            f"--fork {known.fork} with --resume: a fork begins a run, and --resume --out FOLDER "
            "goes on with one; leave one of them out"
        )
    saved = None
    if known.resume:
        plain = get_preset(known.preset).config()
        folder = dataclasses.replace(plain, out=known.out, seed=known.seed).run_dir
        saved = read_config(folder, flag="--resume")
        default = dataclasses.replace(saved, out=folder, resume=True)
    elif known.fork:
        default = fork_defaults(known.fork)
    else:
        default = _fresh(known, env)
    if known.algorithm is not None and not (saved and saved.algorithm == known.algorithm):
        default = default.with_algorithm(known.algorithm)
    if known.config is not None:
        default = with_options(default, read_toml(known.config), where=str(known.config))
    config = tyro.cli(
        RunConfig,
        default=default,
        args=[one for one in arguments if one not in _config_words(arguments)],
        prog=f"nanorl {verb}",
        description=describe(),
    )
    if saved is not None:
        check_resume(saved, config)
    elif config.fork:
        check_fork(config)
    return config


def with_options(config: RunConfig, options: Mapping[str, Any], where: str) -> RunConfig:
    """`config` with options by their names on the command line, as {"rl.lr": 1e-5, "seed": 1};
    nested mappings are sections. ValueError names one that does not exist, and `where` it stands.
    """
    return _with_section(config, options, "", where)


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a TOML file. ValueError says where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {path}: there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not TOML: {error}") from None


def describe() -> str:
    """The text of --help before the options."""
    title = f"Train an agent with reinforcement learning. Presets: {', '.join(PRESETS)}."
    recipes = (f"- {name}: {recipe.summary}" for name, recipe in RECIPES.items())
    files = "--config FILE.toml holds options by the same names."
    short = "Short names: " + ", ".join(f"{name} is {whole}" for name, whole in ALIASES.items())
    parts = (
        title,
        "",
        files,
        f"{short}.",
        "",
        "Algorithms (--rl.algorithm.* changes parts of one):",
        *recipes,
    )
    return "\n".join(parts)


def _early(arguments: Sequence[str]) -> argparse.Namespace:
    """What decides where the defaults come from."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="smollm2")
    early.add_argument("--algorithm")
    early.add_argument("--out", type=Path)
    early.add_argument("--seed", type=int, default=0)
    early.add_argument("--resume", action="store_true")
    early.add_argument("--fork", default="")
    early.add_argument("--config", type=Path)
    early.add_argument("--env", default="")
    early.add_argument("--env-args", nargs="*", default=())
    early.add_argument("--env_args", nargs="*", default=(), dest="env_args")
    return early.parse_known_args(arguments)[0]


def _config_words(arguments: Sequence[str]) -> Sequence[str]:
    """--config and its value, which are no option of a run."""
    words = list(arguments)
    if "--config" not in words:
        return [one for one in words if one.startswith("--config=")]
    place = words.index("--config")
    return words[place : place + 2]


def _fresh(known: argparse.Namespace, env: object) -> RunConfig:
    """The options of a new run before the user's."""
    config = get_preset(known.preset).config()
    file = read_toml(known.config) if known.config is not None else {}
    name = known.env or file.get("env", "")
    if not name and env is None:
        return config
    named = dataclasses.replace(
        config, env=name, env_args=tuple(known.env_args or file.get("env_args", ()))
    )
    return for_environment(named, run_kind(named, env))


def for_environment(config: RunConfig, kind: EnvKind) -> RunConfig:
    """The preset's options, for another environment: its own defaults, and a warm start only if
    somebody can show how its tasks are played."""
    if not kind.has_teacher:
        config = with_options(config, {"warm_start.steps": 0}, where=kind.name)
    return with_options(config, kind.defaults, where=f"{kind.name}.defaults")


def _with_section(record: Any, options: Mapping[str, Any], prefix: str, where: str) -> Any:
    sections: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for name, value in options.items():
        first, _, rest = name.replace("-", "_").partition(".")
        current = getattr(record, first, None)
        if first not in {one.name for one in dataclasses.fields(record)}:
            raise ValueError(
                f"{where}: no option is called {prefix}{name}; there are "
                f"{', '.join(option_names(record))}"
            )
        if rest:
            sections.setdefault(first, {})[rest] = value
        elif dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            sections.setdefault(first, {}).update(value)
        else:
            values[first] = _as_field(current, value)
    for first, inner in sections.items():
        values[first] = _with_section(getattr(record, first), inner, f"{prefix}{first}.", where)
    return dataclasses.replace(record, **values)


def _as_field(current: Any, value: Any) -> Any:
    """A value of a file as the field's kind: lists are tuples here, and paths are paths."""
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(current, Path) and isinstance(value, str) else value
