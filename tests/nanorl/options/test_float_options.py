"""No option is NaN or infinite: every record of options, of every package, refuses both."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import nanoengine
import nanoinfer
import nanorl
import nanosched
from nanorl.observability.store import RolloutStore

PACKAGES = (nanosched, nanoengine, nanoinfer, nanorl)
RECORDS = ("Config", "Options", "Limits", "Spec", "Policy", "Params", "Resources")
"""How the names of records of options end."""
ELSEWHERE = {
    "nanoengine.config.UpdateConfig": "each record that inherits from it has bounds of its own",
    "nanoengine.model.config.ModelConfig": "a model's, not a user's",
    "nanoengine.vision.seeing_config.SeeingConfig": "a model's, not a user's",
    "nanoengine.vision.towers.VisionConfig": "a model's, not a user's",
    "nanoengine.adapters.peft_config.PeftConfig": "read from a folder, number by number",
    "nanoengine.model.linear.LogprobOptions": "of a call; its temperature is rl.temperature",
}
NEEDED: dict[str, Any] = {
    "model": "tiny",
    "run": Path("runs"),
    "to": "jsonl",
    "command": "python",
    "url": "http://127.0.0.1:1",
}


def option_records() -> list[type]:
    """Every dataclass with a number among its options."""
    found = []
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                module = importlib.import_module(info.name)
            except ImportError:  # of an extra
                continue
            found += [
                one
                for one in vars(module).values()
                if inspect.isclass(one)
                and dataclasses.is_dataclass(one)
                and one.__module__ == info.name
                and (one.__name__.endswith(RECORDS) or one.__name__ == "HttpReplica")
                and not one.__name__.startswith("_")
                and numbers_of(one)
            ]
    return found


def numbers_of(record: type) -> list[str]:
    """The names of its fields that are float, or float or None."""
    hints = typing.get_type_hints(record)
    found = []
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        hint = hints[field.name]
        is_union = isinstance(hint, types.UnionType) and float in typing.get_args(hint)
        if hint is float or is_union:
            found.append(field.name)
    return found


def name_of(record: type) -> str:
    return f"{record.__module__}.{record.__name__}"


RECORDS_FOUND = {name_of(one): one for one in option_records()}


def test_the_records_of_options_are_found() -> None:
    assert len(RECORDS_FOUND) >= 25
    assert set(ELSEWHERE) <= set(RECORDS_FOUND), "exempt, and not there any more"
    for name in ("nanorl.options.phase_config.RLConfig", "nanoengine.config.EngineConfig"):
        assert name in RECORDS_FOUND


@pytest.mark.parametrize("name", sorted(set(RECORDS_FOUND) - set(ELSEWHERE)))
def test_a_number_that_is_none_is_refused(name: str) -> None:
    record = RECORDS_FOUND[name]
    required = {
        field.name: NEEDED[field.name]
        for field in dataclasses.fields(record)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    record(**required)
    for option in numbers_of(record):
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValueError, match=option.split("_")[0]):
                record(**required, **{option: value})


@pytest.mark.parametrize("limit", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("name", ["keep_steps", "days", "max_bytes"])
def test_a_store_is_not_told_to_forget_by_a_limit_that_is_none(
    tmp_path: Path, name: str, limit: float
) -> None:
    with (
        RolloutStore(tmp_path / "rollouts.sqlite") as store,
        pytest.raises(ValueError, match=f"{name}={limit}: give a number above 0"),
    ):
        store.expire(**{name: limit})  # type: ignore[arg-type]
