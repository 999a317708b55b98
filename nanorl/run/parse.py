"""From what a user gives, flags, a file or Python values, to the options of a run.

All three are read alike: into a mapping from dotted names to values of the options' own types
(values.py). What decides where the defaults of the others come from (preset, algorithm,
env, resume, fork and the folder) is taken from that mapping first, so that it means the same
wherever it stands. Later ones win: the preset, its environment's own defaults, the published recipe
(`--algorithm`), `--config run.toml`, flags or Python. A resumed run and a fork begin with the
options of the run that they go on from (continuation.py).
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanorl.envs.env_kind import EnvKind
from nanorl.options.names import ALIASES, known_options
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import members_of_kind, run_kind
from nanorl.options.values import (
    WrongValueError,
    did_you_mean,
    inner_kind,
    nearest,
    read_value,
    read_words,
)

Options = Mapping[str, Any]
"""Dotted name, `rl.group_size` -> a value of that option's type."""


_DECIDING = frozenset(
    {"preset", "algorithm", "env", "env_args", "env_weights", "resume", "fork", "out"}
)
"""What an environment's own defaults cannot hold."""


class HelpRequested(Exception):  # noqa: N818 - not an error: the user asked for it
    """The command line asks for help, about `topic`: everything ("all"), a section, or ""."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic


def parse_arguments(
    arguments: Sequence[str], env: object = None, *, verb: str = "train"
) -> RunConfig:
    """The options that a command line gives; `env` is an environment given as an object, `verb` the
    verb of `nanorl` that takes them. Where it asks for help, prints that and exits."""
    try:
        given, file = read_flags(arguments)
    except HelpRequested as wanted:
        from nanorl.options.help_text import help_text  # here: a run needs no texts

        print(help_text(wanted.topic, verb))
        raise SystemExit(0) from None
    config = configure(given, file, env)
    check_continuation(config)
    return config


def configure(given: Options, file: Path | None = None, env: object = None) -> RunConfig:
    """The options of a run: those of the TOML file, then the `given` ones, over the defaults that
    they choose. What a run that goes on may not change is `check_continuation`'s."""
    stood = {} if file is None else read_mapping(read_toml(file), where=str(file))
    chosen = {**stood, **given}
    try:
        return _with(_defaults(chosen, env), chosen)
    except ValueError as error:
        if type(error) is not ValueError or file is None:
            raise
        raise ValueError(_placed(str(error), stood.keys() - given.keys(), file)) from None


def check_continuation(config: RunConfig) -> None:
    """ValueError where a run that is resumed, or a fork, cannot go on with these options."""
    if not (config.resume or config.fork):
        return
    # Here: it looks into checkpoints, and so loads PyTorch.
    from nanorl.run.continuation import check_fork, check_resume, read_config

    if config.resume:
        check_resume(read_config(config.run_dir, flag="--resume"), config)
    else:
        check_fork(config)


def with_options(config: RunConfig, options: Options, where: str) -> RunConfig:
    """`config` with options by their names on the command line, as {"rl.lr": 1e-5, "seed": 1};
    nested mappings are sections. ValueError names one that does not exist or has a value of another
    kind, and `where` it stands."""
    return _with(config, read_mapping(options, where))


def for_environment(
    config: RunConfig, kind: EnvKind, given: Collection[str] = frozenset()
) -> RunConfig:
    """The preset's options, for another environment: its own defaults, and a warm start only if
    somebody can show how its tasks are played. Several agree, or the user has `given` it."""
    if not kind.has_teacher:
        config = with_options(config, {"warm_start.steps": 0}, where=kind.name)
    return _with(config, _defaults_of(config, kind, given))


def _defaults_of(config: RunConfig, kind: EnvKind, given: Collection[str]) -> dict[str, Any]:
    """The options that an environment stands for, or several do together."""
    found = {name: _own_defaults(one) for name, one in members_of_kind(kind).items()}
    if len(config.envs) < 2:
        return found[""]
    from nanorl.options.env_mix import mixed_defaults  # here: few runs have several

    return mixed_defaults(config, found, given)


def _own_defaults(kind: EnvKind) -> dict[str, Any]:
    where = f"{kind.name}.defaults"
    own = read_mapping(kind.defaults, where)
    if deciding := _DECIDING & own.keys():
        raise ValueError(
            f"{where}: {', '.join(sorted(deciding))}: decides where other defaults come from, and "
            "is the run's to say; leave it out, or set the options that it stands for"
        )
    return own


# -- the three ways in -----------------------------------------------------------------------------


def read_mapping(options: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The options of a file, or Python's. ValueError as for `with_options`."""
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}: must hold options by name, not {options!r}")
    found: dict[str, Any] = {}
    for name, value in _leaves(options, where):
        if name in found:
            raise ValueError(f"{where}: {name} stands there twice")
        try:
            found[name] = read_value(known_options()[name], value)
        except WrongValueError as error:
            raise ValueError(f"{where}: {name} = {value!r}: {error}") from None
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The options in a TOML file. ValueError says where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {path}: there is no such file") from None
    except IsADirectoryError:
        raise ValueError(f"--config {path}: is a folder; name a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not TOML: {error}") from None


def read_flags(arguments: Sequence[str]) -> tuple[dict[str, Any], Path | None]:
    """The options of a command line, and the file that --config names. ValueError names a flag that
    does not exist or has another kind of value; HelpRequested where help is asked for."""
    found: dict[str, Any] = {}
    file = None
    for flag in _flags(arguments):
        if flag.name == "config":
            if file is not None:
                raise ValueError(f"--config {file}: comes twice; put both files into one")
            file = _value(flag, Path)
            continue
        name, is_negated = _option_of(flag)
        kind = known_options()[name]
        if is_negated and flag.words:
            raise ValueError(f"--{flag.spelling} {flag.words[0]}: takes no value")
        if name in found and typing.get_origin(kind) is tuple:
            raise ValueError(f"--{flag.spelling}: comes twice; give all its values after one")
        found[name] = False if is_negated else _value(flag, kind)
    return found, file


class _Flag(NamedTuple):
    spelling: str
    """The flag as it was written, without its dashes."""
    words: list[str]

    @property
    def name(self) -> str:
        return self.spelling.replace("-", "_")


def _flags(arguments: Sequence[str]) -> Iterator[_Flag]:
    """Each flag with the words up to the next one."""
    flag: _Flag | None = None
    for word in arguments:
        if word in ("-h", "--help"):
            place = list(arguments).index(word)
            raise HelpRequested(" ".join(arguments[place + 1 : place + 2]).removeprefix("--"))
        if word.startswith("--"):
            if flag is not None:
                yield flag
            spelling, has_value, value = word[2:].partition("=")
            flag = _Flag(spelling, [value] if has_value else [])
        elif flag is None:
            raise ValueError(f"{word}: is no option; each begins with --, as in --preset tiny")
        else:
            flag.words.append(word)
    if flag is not None:
        yield flag


def _value(flag: _Flag, kind: Any) -> Any:
    try:
        return read_words(kind, flag.words)
    except WrongValueError as error:
        raise ValueError(f"{' '.join([f'--{flag.spelling}', *flag.words])}: {error}") from None


def _option_of(flag: _Flag) -> tuple[str, bool]:
    """The option's name, and whether the flag negates it, as --no-keep-start does."""
    kinds, name = known_options(), ALIASES.get(flag.name, flag.name)
    if name in kinds:
        return name, False
    section, _, last = flag.name.rpartition(".")
    for plain in (flag.name.removeprefix("no_"), f"{section}.{last.removeprefix('no_')}"):
        name = ALIASES.get(plain, plain)
        if plain != flag.name and name in kinds and inner_kind(kinds[name]) is bool:
            return name, True
    near = [f"--{one.replace('_', '-')}" for one in nearest(flag.name, (*kinds, *ALIASES))]
    remedy = f"did you mean {' or '.join(near)}?" if near else "--help all lists them"
    raise ValueError(f"--{flag.spelling}: there is no such option; {remedy}")


def _leaves(options: Mapping[Any, Any], where: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Single options by their full names, of mappings in mappings."""
    kinds, sections = known_options(), {name.rpartition(".")[0] for name in known_options()}
    for key, value in options.items():
        name = prefix + str(key).replace("-", "_")
        is_section = isinstance(value, Mapping)
        if name in sections and is_section:
            yield from _leaves(value, where, f"{name}.")
            continue
        whole = ALIASES.get(name, name)
        if whole in kinds:
            yield whole, value
            continue
        if name in sections:
            first = next(one for one in kinds if one.startswith(f"{name}."))
            near = did_you_mean(name, kinds) or f"; name an option of it, as {first}"
            raise ValueError(f"{where}: {name} = {value!r}: is a section{near}")
        near = did_you_mean(name, (*kinds, *ALIASES, *sorted(sections - {""})))
        raise ValueError(f"{where}: no option is called {name}{near or '; see --help all'}")


# -- where the defaults come from ------------------------------------------------------------------


def _defaults(chosen: Options, env: object) -> RunConfig:
    """The options of the run before the user's own, some of which decide it."""
    is_resumed, fork = chosen.get("resume", False), chosen.get("fork", "")
    if is_resumed and fork:
        raise ValueError(
            f"--fork {fork} with --resume: a fork begins a run, and --resume --out FOLDER goes on "
            "with one; leave one of them out"
        )
    default = _fresh(chosen, env) if not (is_resumed or fork) else _of_a_run(chosen)
    if fork and (chosen.get("env") or env is not None):
        default = _elsewhere(default, chosen, env)
    algorithm = chosen.get("algorithm")
    if algorithm is None or (is_resumed and default.algorithm == algorithm):
        return default
    return default.with_algorithm(algorithm)


def _fresh(chosen: Options, env: object) -> RunConfig:
    preset = get_preset(chosen.get("preset", RunConfig.preset))
    if not chosen.get("env", "") and env is None:
        return preset.config()
    named = _named(preset.elsewhere(), chosen)
    return for_environment(named, run_kind(named, env), chosen.keys())


def _named(config: RunConfig, chosen: Options) -> RunConfig:
    """The options with the environment that is chosen, or those that are."""
    return dataclasses.replace(
        config,
        env=chosen.get("env", ""),
        env_args=chosen.get("env_args", ()),
        env_weights=chosen.get("env_weights", ()),
    )


def _of_a_run(chosen: Options) -> RunConfig:
    """Those of the run that is resumed, or that a fork begins in."""
    from nanorl.run.continuation import fork_defaults, read_config  # here: it loads PyTorch

    if chosen.get("fork"):
        return fork_defaults(chosen["fork"])
    plain = get_preset(chosen.get("preset", RunConfig.preset)).config()
    seed = chosen.get("seed", plain.seed)
    folder = dataclasses.replace(plain, out=chosen.get("out"), seed=seed).run_dir
    return dataclasses.replace(read_config(folder, flag="--resume"), out=folder, resume=True)


def _elsewhere(config: RunConfig, chosen: Options, env: object) -> RunConfig:
    """A fork's options in another environment, which brings its agent's limits along. How long is
    trained, and how, stays the run's that the fork begins in."""
    named = _named(config, chosen)
    own = _defaults_of(named, run_kind(named, env), chosen.keys())
    limits = {name: value for name, value in own.items() if name.startswith("agent.")}
    return _with(named, limits)


# -- putting them in -------------------------------------------------------------------------------


def _with(record: Any, options: Options) -> Any:
    """The record with the options in it, each section made once: it checks them together."""
    values: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        first, _, rest = name.partition(".")
        if rest:
            sections.setdefault(first, {})[rest] = value
        else:
            values[first] = value
    for first, inner in sections.items():
        values[first] = _with(getattr(record, first), inner)
    return dataclasses.replace(record, **values)


def _placed(message: str, names: set[str], file: Path) -> str:
    """The message of a record that refuses a value, with the file where that value stands."""
    said = re.match(r"--([\w.-]+) |(\w+)=", message)
    if said is None:
        return message
    option = (said[1] or f"rl.algorithm.{said[2]}").replace("-", "_")
    return f"{message} (in {file})" if ALIASES.get(option, option) in names else message
