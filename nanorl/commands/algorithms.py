"""`nanorl algorithms`: the published recipes that `nanorl train --algorithm NAME` takes.

    nanorl algorithms            each in a line
    nanorl algorithms dapo       what it changes against grpo, as options

docs/algorithms.md says more of each.
"""

from __future__ import annotations

import dataclasses

import tyro

from nanorl.algorithms.recipes import RECIPES, named_spec


def algorithms(name: tyro.conf.Positional[str] = "") -> None:
    """The published recipes for --algorithm; of one by its name, the options that it sets.

    Args:
        name: A recipe.
    """
    print(recipe_text(name) if name else all_recipes())


def all_recipes() -> str:
    """Every recipe in a line."""
    lines = (f"  {name:<22} {recipe.summary}" for name, recipe in RECIPES.items())
    return "\n".join(
        [
            "nanorl train --algorithm NAME, where NAME is one of",
            "",
            *lines,
            "",
            "nanorl algorithms NAME: the options of one. --rl.algorithm.* changes parts of it.",
        ]
    )


def recipe_text(name: str) -> str:
    """A recipe as its differences from grpo. ValueError without one of that name."""
    plain, spec = named_spec("grpo"), named_spec(name)
    lines = [
        _option(field.name, getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if getattr(spec, field.name) != getattr(plain, field.name)
    ]
    differs = f"--algorithm {name} is grpo with" if lines else f"--algorithm {name}: the default"
    return "\n".join([f"{name}: {RECIPES[name].summary}", "", differs, *lines])


def _option(name: str, value: object) -> str:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"  --rl.algorithm.{'' if value else 'no-'}{dashed}"
    return f"  --rl.algorithm.{dashed} {value}"
