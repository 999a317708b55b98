"""Refuses numbers that an option cannot have, in one wording."""

from __future__ import annotations

import math


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
