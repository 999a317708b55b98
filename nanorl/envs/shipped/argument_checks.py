"""The arguments of the games with pictures: whole numbers within bounds."""

from __future__ import annotations


def check_count(name: str, value: object, least: int, most: int) -> None:
    """`ValueError` for an argument that is no whole number between the two."""
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"--env-args {name}={value}: must be a number from {least} to {most}")
