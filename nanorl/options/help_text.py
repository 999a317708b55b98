"""The text of `nanorl train --help`: the options that people use, or all of them, from the strings
below the fields of the records.

    nanorl train --help             about thirty options, in groups
    nanorl train --help all         every option
    nanorl train --help rl.batch    those of a section, or a single one

Left out: recipes, which have a verb of their own (commands/algorithms.py).
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nanorl.options.names import ALIASES, known_options
from nanorl.options.presets import PRESETS, get_preset
from nanorl.options.run_config import RunConfig
from nanorl.options.values import (
    choices,
    did_you_mean,
    inner_kind,
    is_one_or_more,
    is_open_choice,
)

WIDTH, COLUMN = 100, 32

USUAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "what is trained, and on what": (
            *("preset", "model", "env", "env_args", "tasks", "reward"),
        ),
        "where, and from where on": ("out", "resume", "fork", "seed", "device", "threads"),
        "how long, and how": (
            *("rl.steps", "rl.tasks_per_step", "rl.group_size", "rl.lr", "rl.temperature"),
            *("warm_start.steps", "save_every"),
        ),
        "the algorithm": ("algorithm", "rl.algorithm.kl_coef", "rl.max_staleness", "lora.rank"),
        "the agent and its sandbox": (
            *("agent.loop", "agent.max_turns", "agent.max_turn_tokens"),
            *("agent.max_context_tokens", "tool.sandbox"),
        ),
        "what is measured and logged": ("evaluation.num_tasks", "log"),
    }
)
"""The options of the short help, in groups."""

_CONFIG = "A TOML file with options by the same names; flags come after it."
_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "train": "Train an agent with reinforcement learning.",
        "check": "Say what will go wrong with a run, before it: the options of nanorl train, and\n"
        "--as-json, which prints the findings as JSON.",
    }
)
_METAVARS: Mapping[Any, str] = MappingProxyType(
    {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
)


class OptionText(NamedTuple):
    """One option as help shows it."""

    name: str
    kind: Any
    default: Any
    text: str

    @property
    def flag(self) -> str:
        """The flag, the short one where there is one, and what stands for its value."""
        short = {whole: name for name, whole in ALIASES.items()}
        flag = f"--{short.get(self.name, self.name).replace('_', '-')}"
        return f"{flag} {self._metavar}".rstrip()

    @property
    def shown_default(self) -> str:
        """The default in square brackets; nothing where it is empty, or a flag that is off."""
        if self.default is None or self.default is False or self.default in ("", ()):
            return ""
        is_list = isinstance(self.default, tuple)
        shown = " ".join(map(str, self.default)) if is_list else str(self.default)
        return f" [{shown.lower() if self.kind is bool else shown}]"

    @property
    def _metavar(self) -> str:
        inner = inner_kind(self.kind)
        if is_one_or_more(inner):
            return "TEXT ..."
        if typing.get_origin(inner) is tuple:
            (one, _) = typing.get_args(inner)
            return "A B ..." if choices(one) else f"{_METAVARS[one]} ..."
        return "NAME" if choices(inner) else _METAVARS[str if is_open_choice(inner) else inner]


def help_text(topic: str = "", verb: str = "train") -> str:
    """The help about everything ("all"), a section or an option by its name, or what people use.
    ValueError for another topic."""
    texts = option_texts()
    name = topic.replace("-", "_")
    if not topic:
        return _usual(texts, verb)
    chosen = {
        one: text
        for one, text in texts.items()
        if topic == "all" or one == ALIASES.get(name, name) or one.startswith(f"{name}.")
    }
    if not chosen:
        named = ", ".join(filter(None, _sections(texts)))
        near = did_you_mean(name, texts) or f"; there are all, {named}"
        raise ValueError(f"--help {topic}: there is no such option or section{near}")
    return "\n".join(_whole(chosen))


@cache
def option_texts() -> Mapping[str, OptionText]:
    """Every option by its dotted name, with the default of the first preset."""
    config = get_preset(next(iter(PRESETS))).config()
    texts = dict(_texts(RunConfig))
    return MappingProxyType(
        {
            name: OptionText(name, kind, _look_up(config, name), texts.get(name, ""))
            for name, kind in known_options().items()
        }
    )


def _usual(texts: Mapping[str, OptionText], verb: str) -> str:
    lines = [
        f"usage: nanorl {verb} [options]",
        "",
        _TITLES[verb],
        "Every option: --help all. A section or an option: --help rl.batch. Recipes: nanorl "
        "algorithms.",
    ]
    for title, names in USUAL.items():
        lines += ["", f"{title}:"]
        for name in names:
            option = texts[name]
            lines += _entry(option.flag, f"{_first(option.text)}{option.shown_default}")
        if "out" in names:
            lines += _entry("--config FILE", _CONFIG)
    return "\n".join(lines)


def _whole(texts: Mapping[str, OptionText]) -> Iterator[str]:
    """Section by section, every option with its whole text."""
    for number, (section, inner) in enumerate(_sections(texts).items()):
        if number:
            yield ""
        yield f"--{section.replace('_', '-')}.*:" if section else "the run:"
        for option in inner:
            named = choices(inner_kind(option.kind))
            said = f" One of {', '.join(map(str, named))}." if named else ""
            yield from _entry(option.flag, f"{option.text}{said}{option.shown_default}".strip())


def _sections(texts: Mapping[str, OptionText]) -> dict[str, list[OptionText]]:
    found: dict[str, list[OptionText]] = {}
    for name, text in texts.items():
        found.setdefault(name.rpartition(".")[0], []).append(text)
    return found


def _entry(flag: str, text: str) -> list[str]:
    """The flag, and its text in a column beside it; a long flag has a line of its own."""
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False) or [""]
    head = f"  {flag}"
    first = [f"{head:<{COLUMN}}{lines[0]}".rstrip()]
    if len(head) >= COLUMN:
        first = [head, f"{'':<{COLUMN}}{lines[0]}"]
    return [*first, *(f"{'':<{COLUMN}}{line}" for line in lines[1:])]


def _first(text: str) -> str:
    """The first sentence."""
    return text.partition(". ")[0].rstrip(".") + "."


def _look_up(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


# -- the strings below the fields ------------------------------------------------------------------


def _texts(record: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each option's name and text."""
    hints = typing.get_type_hints(record)
    own = _inherited(record)
    for field in dataclasses.fields(record):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _texts(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, own.get(field.name, "")


def _inherited(record: type) -> dict[str, str]:
    """The text of every field, from the record that describes it."""
    found: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _written(base.__module__).get(base.__name__, {})
    return found


@cache
def _written(module: str) -> Mapping[str, Mapping[str, str]]:
    """Class -> field -> the string below it, in the source of a module; none without a source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:  # a package without its source still runs
        return {}
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {one.name: dict(_below(one)) for one in classes}


def _below(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield field.target.id, " ".join(str(below.value.value).split())
