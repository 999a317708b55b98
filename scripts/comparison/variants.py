"""What is compared: variants, each a label and the options of `nanorl train` that make it.

A file of variants is JSON:

    {"title": "Staleness", "baseline": "tis-s0", "factors": [
        {"tis": "--rl.algorithm.correction tis", "mis": "--rl.algorithm.correction mis"},
        {"s0": "--rl.max-staleness 0", "s4": {"options": "--rl.max-staleness 4", "reason": "why"}}
    ]}

A variant takes one entry of every factor; its label is theirs with - in between. `{model:LABEL}`
among the options stands for the trained model of that variant with the same seed, which is made
first. With `"recipes": true` every recipe of nanorl/algorithms/recipes.py is a variant, and the
only factor says what one needs beside `--algorithm NAME`, with the reason. Options in "common" go
to every variant, before its own.
Left out: options that depend on the seed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from nanorl.algorithms.recipes import RECIPES

FOLDER = Path(__file__).resolve().parent
BASE = "base"
"""The label of the runs that all others begin in."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_MODEL = re.compile(r"\{model:([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One column of a comparison: its options as a command line has them, and why they differ."""

    label: str
    options: str
    reason: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """The labels of the variants whose trained models the options name."""
        return tuple(dict.fromkeys(_MODEL.findall(self.options)))

    def words(self, models: dict[str, Path]) -> list[str]:
        """The options with the folders of those models."""
        return [_MODEL.sub(lambda m: str(models[m[1]]), word) for word in shlex.split(self.options)]


@dataclass(frozen=True, kw_only=True)
class VariantSet:
    """Variants by label, in their order; all are compared with `baseline`."""

    title: str
    baseline: str
    variants: dict[str, Variant]

    def chosen(self, labels: Sequence[str]) -> VariantSet:
        """Those of the labels; all of them for none. ValueError where one is not there."""
        if not labels:
            return self
        if missing := [label for label in labels if label not in self.variants]:
            raise ValueError(
                f"--algorithms {missing[0]}: no such variant; there are {', '.join(self.variants)}"
            )
        kept = {label: one for label, one in self.variants.items() if label in labels}
        for one in kept.values():
            if absent := [label for label in one.needs if label not in kept]:
                raise ValueError(
                    f"--algorithms: {one.label} reads the trained model of {absent[0]}, which is "
                    f"not among them; add {absent[0]}"
                )
        return VariantSet(title=self.title, baseline=self.baseline, variants=kept)


def read_variants(name: str) -> VariantSet:
    """A set that comes along (recipes, staleness) or a JSON file. ValueError says what is wrong."""
    path = FOLDER / f"{name}.json" if (FOLDER / f"{name}.json").is_file() else Path(name)
    shipped = ", ".join(sorted(one.stem for one in FOLDER.glob("*.json")))
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"--variants {name}: there is no such file; name one, or one of {shipped}"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"--variants {name}: not JSON ({error})") from None
    try:
        return _variant_set(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--variants {name}: {error or type(error).__name__}; wanted is "
            '{"title": "...", "baseline": "A", "factors": [{"A": "--option value", "B": "..."}]}'
        ) from None


def _variant_set(data: dict[str, Any]) -> VariantSet:
    common = str(data.get("common", ""))
    factors = [{label: _entry(one) for label, one in f.items()} for f in data["factors"]]
    if data.get("recipes", False):
        factors = [_of_recipes(*factors)]
    found = {}
    for entries in product(*(factor.items() for factor in factors)):
        label = "-".join(name for name, _ in entries)
        found[label] = Variant(
            label=_checked(label),
            options=" ".join(filter(None, [common, *(options for _, (options, _) in entries)])),
            reason="; ".join(reason for _, (_, reason) in entries if reason),
        )
    for one in found.values():
        if unknown := [label for label in one.needs if label not in found or label == one.label]:
            raise ValueError(f"{one.label} needs {{model:{unknown[0]}}}, which is no other variant")
    if data["baseline"] not in found:
        raise ValueError(f"the baseline {data['baseline']!r} is none of {', '.join(found)}")
    return VariantSet(title=str(data["title"]), baseline=data["baseline"], variants=found)


def _entry(value: Any) -> tuple[str, str]:
    if isinstance(value, str):
        return value, ""
    if set(value) != {"options", "reason"}:
        raise ValueError(f"{value} must be a text, or have options and reason")
    return str(value["options"]), str(value["reason"])


def _of_recipes(settings: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    if unknown := sorted(settings.keys() - RECIPES.keys()):
        raise ValueError(f"{unknown[0]} is no recipe; there are {', '.join(RECIPES)}")
    return {
        name: (f"--algorithm {name} {options}".strip(), reason)
        for name in RECIPES
        for options, reason in [settings.get(name, ("", ""))]
    }


def _checked(label: str) -> str:
    if not _LABEL.fullmatch(label) or label == BASE:
        raise ValueError(
            f"the label {label!r} names a folder: use letters, digits and . _ + -, and not {BASE!r}"
        )
    return label
