"""`Filter`: a slice of the stored rollouts, as a text that people write and as SQL.

    Filter.parse("turn=2, failed")              a call failed in the second turn
    Filter.parse("step=5..9, kind=sums, reward<1")

Conditions are separated by commas, and all of them must hold. docs/store.md lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from nanorl.observability.store.database import STEP_SHIFT
from nanorl.types import Status

NUMBERS = MappingProxyType(
    {
        **{"step": "r.step", "version": "r.version", "reward": "r.reward"},
        **{"tokens": "r.num_tokens", "turns": "r.num_turns"},
        "failed_turns": "r.num_failed_turns",
    }
)
TEXTS = MappingProxyType(
    {
        **{"task": "r.task_id", "kind": "r.kind", "group": "r.group_id"},
        **{"rollout": "r.rollout_id", "status": "r.status", "hash": "r.content_hash"},
    }
)
OF_A_TURN = MappingProxyType(
    {
        **{"turn": "t.turn", "turn_reward": "t.reward", "turn_tokens": "t.num_tokens"},
        "observation": "t.num_observation_tokens",
    }
)
FRACTIONS = ("reward", "turn_reward")
FAILED, SUCCESS = "failed", "success"
FLAGS = (FAILED, SUCCESS)
RARE = ("task", "group", "rollout", "hash")
"""Names whose rollouts are few: found first, and then their turns."""

_CONDITION = re.compile(r"(\w+)\s*(>=|<=|!=|=|<|>|~)\s*(.+)")
_RANGE = re.compile(r"(.+?)\.\.(.+)")


@dataclass(frozen=True)
class Condition:
    """A name, how it is compared, and with what. `..` compares with both ends of a range; a flag
    has no operator."""

    name: str
    operator: str = ""
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.operator == "..":
            return f"{self.name}={_written(self.values[0])}..{_written(self.values[1])}"
        return f"{self.name}{self.operator}{''.join(map(_written, self.values))}"


class RowSource(NamedTuple):
    """A part of a statement."""

    source: str
    """FROM ... WHERE ..."""
    values: list[Any]
    """Of its marks."""
    number: str
    """The column to sort by, which the index has in order."""


@dataclass(frozen=True)
class Filter:
    """Conditions, all of which a rollout must meet; without any it means every rollout.

    Those of turns (`turn`, `turn_reward`, `turn_tokens`, `observation`, `failed`) must hold in one
    and the same turn. Turns are counted from 1.
    """

    conditions: tuple[Condition, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Filter:
        """The filter that a text means. ValueError names the condition and what could stand there.

        Its inverse is `str`.
        """
        parts = [part.strip() for part in text.split(",")]
        return cls(tuple(_parsed(part) for part in parts if part))

    @classmethod
    def of(cls, **values: Any) -> Filter:
        """`Filter.of(step=3, task="t1")`: each name equal to its value; None is left out."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(tuple(Condition(name, "=", (value,)) for name, value in given.items()))

    def __str__(self) -> str:
        return ", ".join(map(str, self.conditions))

    def __and__(self, other: Filter) -> Filter:
        """Both."""
        return Filter((*self.conditions, *other.conditions))

    def sql(self) -> RowSource:
        """Write the SQL that finds the rollouts `r`, each once."""
        of_turns = [one for one in self.conditions if _is_of_a_turn(one)]
        rollouts = [_sql(one) for one in self.conditions if not _is_of_a_turn(one)]
        source, number = "rollouts r", "r.id"
        if self._is_led_by_a_turn(of_turns):
            # The one table that knows which rollouts failed in that turn leads. Its index has them
            # in order, and SQLite would rather walk all rollouts.
            source, number = "turns t CROSS JOIN rollouts r", "t.id"
            rollouts += [("r.id = t.id", []), *(_sql(one) for one in of_turns)]
            rollouts += [_ids("t.id", one) for one in self.conditions if one.name == "step"]
        elif [one.name for one in of_turns] == [FAILED]:
            rollouts.append(("r.num_failed_turns > 0", []))
        elif of_turns:
            clauses, values = _joined([("t.id = r.id", []), *(_sql(one) for one in of_turns)])
            rollouts.append((f"EXISTS (SELECT 1 FROM turns t WHERE {clauses})", values))
        clauses, values = _joined(rollouts)
        where = f" WHERE {clauses}" if clauses else ""
        return RowSource(f"FROM {source}{where}", values, number)

    def _is_led_by_a_turn(self, of_turns: Sequence[Condition]) -> bool:
        is_exact = any(one.name == "turn" and one.operator == "=" for one in of_turns)
        is_rare = any(one.name in RARE and one.operator == "=" for one in self.conditions)
        return is_exact and not is_rare and any(one.name == FAILED for one in of_turns)


EVERY = Filter()
"""All rollouts."""


def _parsed(text: str) -> Condition:
    if text in FLAGS:
        return Condition(text)
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"where {text!r}: write NAME=VALUE, such as step=5..9, or {_flags()}")
    name, operator, value = found[1], found[2], found[3].strip()
    if name in TEXTS:
        return _of_text(text, name, operator, value)
    if name not in (*NUMBERS, *OF_A_TURN):
        names = ", ".join((*NUMBERS, *TEXTS, *OF_A_TURN))
        raise ValueError(
            f"where {text!r}: no rollout has a {name!r}; there are {names}; {_flags()}"
        )
    ends = _RANGE.fullmatch(value) if operator == "=" else None
    if ends is not None:
        return Condition(name, "..", (_number(text, name, ends[1]), _number(text, name, ends[2])))
    if operator == "~":
        raise ValueError(f"where {text!r}: ~ looks into texts; {name} is a number")
    return Condition(name, operator, (_number(text, name, value),))


def _of_text(text: str, name: str, operator: str, value: str) -> Condition:
    if operator not in ("=", "!=", "~"):
        raise ValueError(f"where {text!r}: {name} is a text: compare it with =, != or ~ (holds)")
    if name == "status" and operator != "~" and value not in list(Status):
        raise ValueError(f"where {text!r}: a status is one of {', '.join(Status)}")
    return Condition(name, operator, (value,))


def _flags() -> str:
    return f"{FAILED} (a call of a turn failed) or {SUCCESS} (reward 1 or more)"


def _number(text: str, name: str, value: str) -> int | float:
    kind: type[int] | type[float] = float if name in FRACTIONS else int
    try:
        return kind(value)
    except ValueError:
        what = "a number" if kind is float else "a whole number"
        raise ValueError(f"where {text!r}: {value!r} is not {what}") from None


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _is_of_a_turn(condition: Condition) -> bool:
    return condition.name in OF_A_TURN or condition.name == FAILED


def _sql(condition: Condition) -> tuple[str, list[Any]]:
    name, values = condition.name, list(condition.values)
    if name == FAILED:
        return "t.is_failed = 1", []
    if name == SUCCESS:
        return "r.reward >= 1", []
    if name == "step" and condition.operator != "!=":
        return _ids("r.id", condition)
    column = {**NUMBERS, **TEXTS, **OF_A_TURN}[name]
    if condition.operator == "..":
        return f"{column} BETWEEN ? AND ?", values
    if condition.operator == "~":
        return f"replace({column}, ?, '') <> {column}", values  # LIKE is not alike everywhere
    return f"{column} {condition.operator} ?", values


def _ids(column: str, condition: Condition) -> tuple[str, list[Any]]:
    """A condition on the step as one on ids, which begin with the step."""
    low, high = condition.values[0], condition.values[-1]
    ends = {
        "=": (low, low + 1),
        "..": (low, high + 1),
        ">=": (low, None),
        ">": (low + 1, None),
        "<=": (None, low + 1),
        "<": (None, low),
    }
    if condition.operator == "!=":
        return "1 = 1", []  # said of the rollout itself
    first, last = ends[condition.operator]
    bounds = [(f"{column} >= ?", first), (f"{column} < ?", last)]
    return _joined(
        [(clause, [int(step) << STEP_SHIFT]) for clause, step in bounds if step is not None]
    )


def _joined(clauses: Iterable[tuple[str, list[Any]]]) -> tuple[str, list[Any]]:
    found = list(clauses)
    return " AND ".join(sql for sql, _ in found), [one for _, values in found for one in values]
