"""Bounds of options: refuses numbers that an option cannot have, in one wording."""

from __future__ import annotations

import math
from typing import NamedTuple


class Bound(NamedTuple):
    """Says what a number may be; infinities and NaN it may never be."""

    low: float
    high: float = math.inf
    why: str = ""  # the reason of `high`
    is_open: bool = False  # `low` itself is refused


NATURAL, COUNT, POSITIVE = Bound(0), Bound(1), Bound(0, is_open=True)


def check_number(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    why: str = "",
    *,
    is_open: bool = False,
) -> None:
    """`ValueError` unless `value` is finite and `low <= value <= high` (`low <` if `is_open`).

    `name` stands before the value, as in `--rl.lr ` or `gamma=`; `why` is the reason of the bounds.
    """
    reason = f": {why}" if why else ""
    if not math.isfinite(value):
        raise ValueError(f"{name}{value}: must be a finite number")
    if is_open and value <= low:
        raise ValueError(f"{name}{value}: must be more than {low}{reason}")
    if value < low:
        raise ValueError(f"{name}{value}: must be {low} or more{reason}")
    if value > high:
        raise ValueError(f"{name}{value}: must be at most {high}{reason}")


def check_record(record: object, prefix: str, **bounds: Bound) -> None:
    """`ValueError` names the flag of the first field outside its bound."""
    for name, bound in bounds.items():
        if getattr(record, name) is None:
            continue  # not given
        flag, value = f"--{prefix}{name.replace('_', '-')} ", getattr(record, name)
        low, high, why, is_open = bound
        reason = why if value > high else ""
        check_number(flag, value, low, high, reason, is_open=is_open)


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """`ValueError` names the flag unless `condition` holds; `rule` says what its value must be."""
    if not condition:
        raise ValueError(f"--{name} {value}: must be {rule}")
