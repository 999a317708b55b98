"""`StrictBody`: an object of a request's body, all of whose faults are told at once.

    class Options(StrictBody):
        ignored = frozenset({"trace"})                       # without effect, whatever it says
        refused = {"audio": Refused("this model writes text; leave it out")}
        limit: int = 8                                       # done

A null is a field left out. So is a refused field that asks for nothing. Any other name is unknown,
and told with the nearest known one.
Left out: rules over several fields, which hold only for objects whose fields are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError
from pydantic import model_validator as validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

MAX_TOLD = 30
"""Faults that are told in one error."""
MAX_NAME = 200
UNKNOWN, REFUSED = "unknown_field", "refused_field"
Standing = Literal["done", "ignored", "refused", "unknown"]


class Refused(NamedTuple):
    """A field of other servers that cannot be done here."""

    why: str
    """The rule and what to do instead."""
    unless: tuple[Any, ...] = (False, 0, "", [], {})
    """Values with which it asks for nothing."""


class StrictBody(BaseModel):
    """An object that may hold its own fields, those `ignored` or `refused`, and no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refused]] = {}

    @classmethod
    def own_names(cls) -> set[str]:
        """Names of the fields that are done, as clients write them."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @classmethod
    def standing(cls, name: str) -> Standing:
        """Say how a field of that name is treated."""
        if name in cls.refused:
            return "refused"
        if name in cls.own_names():
            return "done"
        return "ignored" if name in cls.ignored else "unknown"

    @validator(mode="wrap")
    @classmethod
    def _read(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, dict):
            return read(given)
        kept: dict[str, Any] = {}
        faults: list[InitErrorDetails] = []
        for name, value in given.items():
            if value is None or name in cls.ignored:
                continue
            fault = cls._fault(name, value)
            if fault is not None:
                faults.append({"type": fault, "loc": (name,), "input": value})
            elif name not in cls.refused:
                kept[name] = value
        try:
            made = read(kept)
        except ValidationError as error:
            faults = [*_details(error), *faults]
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return made

    @classmethod
    def _fault(cls, name: str, value: Any) -> PydanticCustomError | None:
        refused = cls.refused.get(name)
        if refused is not None:
            if value in refused.unless:
                return None
            return PydanticCustomError(REFUSED, refused.why)  # type: ignore[arg-type]  # no literal
        if name in cls.own_names():
            return None
        return PydanticCustomError(UNKNOWN, "unknown field; remove it", {"body": cls})

    @classmethod
    def nearest(cls, name: str) -> str | None:
        """The known name that is most like an unknown one, where one is."""
        known = sorted(cls.own_names() | cls.ignored | cls.refused.keys())
        near = get_close_matches(name, known, 1, cutoff=0.75) if len(name) < MAX_NAME else []
        return near[0] if near else None


def _details(error: ValidationError) -> list[InitErrorDetails]:
    """The faults of an error, to be told among others."""
    return [
        {
            "type": PydanticCustomError(
                one["type"],  # type: ignore[arg-type]  # pydantic's own names are no literals here
                one["msg"],  # type: ignore[arg-type]
                one.get("ctx") if one["type"] == UNKNOWN else None,
            ),
            "loc": one["loc"],
            "input": one["input"],
        }
        for one in error.errors(include_url=False)
    ]


def explained(error: ValidationError, body: Any) -> tuple[str, str]:
    """(message, name of the first field) of all that is wrong with `body`. Names lead from key to
    key of the body; of the alternatives that a value could have been, the one it came furthest
    with is told. Of very many faults the first are."""
    told: dict[str, str] = {}
    count = error.error_count()
    for one in error.errors(include_url=False)[:MAX_TOLD]:
        name = _path(one["loc"], body, is_missing=one["type"] == "missing")
        told.setdefault(name[:MAX_NAME], _sentence(one))
    names = [name for name in told if not any(other.startswith(f"{name}.") for other in told)]
    sentences = [f"{name}: {told[name]}" if name else told[name] for name in names]
    if len(sentences) == 1:
        return sentences[0], names[0]
    more = f"; and {count - MAX_TOLD} more" if count > MAX_TOLD else ""
    return f"{len(sentences)} fields cannot be: {'; '.join(sentences)}{more}", names[0]


def _sentence(one: ErrorDetails) -> str:
    kind, message = one["type"], one["msg"]
    if kind == UNKNOWN:
        near = one["ctx"]["body"].nearest(str(one["loc"][-1]))
        return f"{message}, or write {near}" if near else message
    if kind == "extra_forbidden":  # of a body that is no StrictBody
        return "unknown field; remove it"
    if kind in ("missing", "value_error", REFUSED):
        return message.removeprefix("Value error, ")
    return f"{message}, not {str(one['input'])[:100]!r}"


def _path(loc: tuple[int | str, ...], body: Any, *, is_missing: bool) -> str:
    """The keys of `loc`; what else it has names alternatives."""
    keys, value = [], body
    for key in loc[:-1] if is_missing else loc:
        is_place = isinstance(value, list) and isinstance(key, int) and key < len(value)
        if is_place or (isinstance(value, Mapping) and key in value):
            value = value[key]
            keys.append(str(key))
    return ".".join([*keys, str(loc[-1])] if is_missing else keys)
