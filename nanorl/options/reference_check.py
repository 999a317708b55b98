"""Finds the models that `--rl.reference` names, before anything is computed."""

from __future__ import annotations

from pathlib import Path

from nanoengine.formats.families import sees
from nanoengine.formats.sources import resolve_model
from nanoengine.model.config import ModelConfig
from nanorl.options.reference_names import parse_references
from nanorl.options.run_config import RunConfig


def check_reference(config: RunConfig, policy: Path, shape: ModelConfig) -> None:
    """`ValueError` unless the models of `rl.reference`, where any are given, have the vocabulary of
    the policy, whose folder and shape these are, and see what it sees."""
    for one in parse_references(config.rl.reference):
        folder = resolve_reference(one.name, config)
        found = ModelConfig.from_folder(folder)
        if found.vocab_size != shape.vocab_size:
            raise ValueError(
                f"--rl.reference {one.name}: its vocabulary of {found.vocab_size} is not the "
                f"policy's {shape.vocab_size}; choose a model with the same tokenizer"
            )
        if sees(shape.model_type):
            _check_sight(one.name, folder, found, policy)


def _check_sight(name: str, folder: Path, found: ModelConfig, policy: Path) -> None:
    """A picture has to become the same patches for both."""
    if not sees(found.model_type):
        raise ValueError(
            f"--rl.reference {name}: it reads text, and the policy sees; choose a model that sees"
        )
    from nanoengine.vision.processor import PictureProcessor  # here: few models see

    theirs, ours = (PictureProcessor.from_folder(one).fingerprint for one in (folder, policy))
    if theirs != ours:
        raise ValueError(
            f"--rl.reference {name}: it is shown pictures otherwise than the policy is "
            "(preprocessor_config.json: sizes, patches, mean, std); choose a model with the same "
            "processor"
        )


def resolve_reference(name: str, config: RunConfig) -> Path:
    """The folder of a reference's model. `ValueError`, with the option, where there is none."""
    try:
        return resolve_model(name, config.cache_dir)
    except ValueError as error:
        raise ValueError(f"--rl.reference {name}: {error}") from error
