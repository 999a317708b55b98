"""One option's value, read as its field's type: from a flag's words, a file, Python or JSON.

    read_value(int, 3)                  3
    read_value(int, "3")                WrongValueError: a whole number is wanted
    read_words(int, ["3"])              3, since a command line has nothing but text
    read_value(Named, ["maze"])         "maze", where one text or several may stand
    read_record(ToolConfig, {"workers": 4}, where="config.json")

A number that is whole may stand where any number may; text never stands for a number, nor a
number for a truth value. The text "None" is None where an option may be that: neither a flag nor a
TOML file has another way to say it.

Left out: bounds of numbers, and options that do not go together (bounds.py, and each record's own
`__post_init__`).
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

Record = TypeVar("Record")


class WrongValueError(ValueError):
    """A value of another kind than its option's. The message says what is wanted."""


def option_kinds(record: type, prefix: str = "") -> dict[str, Any]:
    """The type of every option of a record and its sections, by its dotted name: `rl.lr`."""
    kinds: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        kind = _hints(record)[field.name]
        if dataclasses.is_dataclass(kind):
            kinds |= option_kinds(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            kinds[prefix + field.name] = kind
    return kinds


def read_value(kind: Any, value: Any) -> Any:
    """The value as the type `kind` has it. WrongValueError where it is none of that type."""
    inner = inner_kind(kind)
    if inner is not kind and (value is None or value == "None"):
        return None
    if is_one_or_more(inner):
        return _read_one_or_more(inner, value)
    origin = typing.get_origin(inner)
    if origin is tuple:
        return _read_tuple(inner, value)
    if origin is Literal:
        return _read_choice(inner, value)
    plain = str if is_open_choice(inner) else inner
    assert plain in _IS, f"options of type {inner} have no reader"
    if not _IS[plain](value):
        raise WrongValueError(f"must be {wanted(kind)}")
    return plain(value)


def read_words(kind: Any, words: Sequence[str]) -> Any:
    """The value that the words after a flag stand for. WrongValueError where they stand for none,
    or are too many or too few."""
    inner = inner_kind(kind)
    if is_one_or_more(inner):
        return read_value(kind, words)
    if typing.get_origin(inner) is tuple:
        return read_value(kind, [read_words(typing.get_args(inner)[0], [one]) for one in words])
    if inner is bool and not words:
        return True
    if len(words) != 1:
        raise WrongValueError(f"takes one value, {wanted(kind)}")
    return read_value(kind, _parsed(inner, words[0]))


def read_record(record: type[Record], data: Any, where: str) -> Record:
    """A record with what a mapping names, the rest at its defaults. ValueError names `where` it
    stands, and a key that does not exist or has a value of another kind."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: must hold options, not {type(data).__name__}")
    kinds = _hints(typing.cast(Any, record))
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            near = did_you_mean(name, kinds) or f"; there are {', '.join(kinds)}"
            raise ValueError(f"{where}: no option is called {key}{near}")
        kind = kinds[name]
        if dataclasses.is_dataclass(kind):
            values[name] = read_record(typing.cast(type, kind), value, f"{where}: {name}")
            continue
        try:
            values[name] = read_value(kind, value)
        except WrongValueError as error:
            raise ValueError(f"{where}: {name} = {value!r}: {error}") from None
    return record(**values)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question "did you mean rl.lr?" about a name that is none of the `names`, or nothing."""
    near = nearest(name, names)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The names that somebody may have meant: those that end in it (`lr`), or are written much
    like it."""
    all_names = list(names)
    own = name.replace("-", "_")
    last = own.rpartition(".")[2]
    ending = [one for one in all_names if one.rpartition(".")[2] == last]
    if ending:
        return ending[:3]
    alike = difflib.get_close_matches(own, all_names, n=1, cutoff=0.75)
    ends = {one.rpartition(".")[2]: one for one in reversed(all_names)}
    return alike or [ends[one] for one in difflib.get_close_matches(last, ends, n=1, cutoff=0.75)]


def wanted(kind: Any) -> str:
    """The type in words: "a whole number, or None"."""
    inner = inner_kind(kind)
    if typing.get_origin(inner) is tuple:
        (one, _) = typing.get_args(inner)
        text = f"a list of {_MANY.get(one) or 'these: ' + ', '.join(choices(one))}"
    elif typing.get_origin(inner) is Literal:
        text = f"one of {', '.join(map(str, typing.get_args(inner)))}"
    elif is_one_or_more(inner):
        text = "text, or a list of texts"
    else:
        text = _WORDS[str if is_open_choice(inner) else inner]
    return text if inner is kind else f"{text}, or None"


def choices(kind: Any) -> tuple[Any, ...]:
    """The values that a type names, those of an open choice included; none of other types."""
    for one in (kind, *typing.get_args(kind)):
        if typing.get_origin(one) is Literal:
            return typing.get_args(one)
    return ()


def inner_kind(kind: Any) -> Any:
    """The type without its None."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind
    inner = [one for one in typing.get_args(kind) if one is not type(None)]
    return inner[0] if len(inner) == 1 else kind


def is_open_choice(kind: Any) -> bool:
    """Say whether a type is some names or any other text: `Literal["a", "b"] | str`."""
    is_union = typing.get_origin(kind) in (Union, types.UnionType)
    return is_union and str in typing.get_args(kind) and not is_one_or_more(kind)


def is_one_or_more(kind: Any) -> bool:
    """Say whether a type is a text or several: `str | tuple[str, ...]`."""
    return set(typing.get_args(kind)) == {str, tuple[str, ...]}


@cache
def _hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)


def _read_tuple(kind: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise WrongValueError(f"must be {wanted(kind)}, as [{value!r}]")
    return tuple(read_value(typing.get_args(kind)[0], one) for one in value)


def _read_one_or_more(kind: Any, value: Any) -> Any:
    """A text as it is, a list of one as that one: so one of them is written in one way."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise WrongValueError(f"must be {wanted(kind)}")
    texts = _read_tuple(tuple[str, ...], value)
    return texts[0] if len(texts) == 1 else texts


def _read_choice(kind: Any, value: Any) -> Any:
    named = typing.get_args(kind)
    if not any(type(value) is type(one) and value == one for one in named):
        raise WrongValueError(f"must be {wanted(kind)}{did_you_mean(str(value), map(str, named))}")
    return value


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}
_MANY: Mapping[Any, str] = {str: "texts", int: "whole numbers", float: "numbers"}
_IS: Mapping[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: lambda value: _is_number(value, numbers.Integral),
    float: lambda value: _is_number(value, numbers.Real),
    str: lambda value: isinstance(value, str),
    Path: lambda value: isinstance(value, Path) or (isinstance(value, str) and value != ""),
}
"""Whether a value of a file, or Python's, is of that type."""


def _parsed(kind: Any, text: str) -> Any:
    """The text of a flag as the value that a file would have there; itself where it is none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    named = {str(one): one for one in typing.get_args(kind)}
    if typing.get_origin(kind) is Literal and text in named:
        return named[text]
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        return text
