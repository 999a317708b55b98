"""Finds the models that `--rl.reference` names, before anything is computed."""

from __future__ import annotations

from pathlib import Path

from nanoengine.formats.sources import resolve_model
from nanoengine.model.config import ModelConfig
from nanorl.options.reference_names import parse_references
from nanorl.options.run_config import RunConfig


def check_reference(config: RunConfig, vocab_size: int) -> None:
    """`ValueError` unless the models of `rl.reference`, where any are given, have the same
    vocabulary."""
    for one in parse_references(config.rl.reference):
        found = ModelConfig.from_folder(resolve_reference(one.name, config)).vocab_size
        if found != vocab_size:
            raise ValueError(
                f"--rl.reference {one.name}: its vocabulary of {found} is not the policy's "
                f"{vocab_size}; choose a model with the same tokenizer"
            )


def resolve_reference(name: str, config: RunConfig) -> Path:
    """The folder of a reference's model. `ValueError`, with the option, where there is none."""
    try:
        return resolve_model(name, config.cache_dir)
    except ValueError as error:
        raise ValueError(f"--rl.reference {name}: {error}") from error
