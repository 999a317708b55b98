"""The policy that KL terms and distillation compare with.

Either another model of the same vocabulary (a teacher), or the policy as RL began. The latter is
written into the run's folder, because a resumed run must compare with the same weights.
"""

from __future__ import annotations

from pathlib import Path

from nanoengine.frozen import FrozenPolicy
from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import load_model, replace_model
from nanoengine.model.sources import resolve_model
from nanoengine.model.transformer import Transformer
from nanorl.config import RunConfig


def check_reference(config: RunConfig, vocab_size: int) -> None:
    """`ValueError` unless `rl.reference`, where it is given, is a model of the same vocabulary."""
    if not config.rl.reference:
        return
    found = ModelConfig.from_folder(_resolve(config)).vocab_size
    if found != vocab_size:
        raise ValueError(
            f"--rl.reference {config.rl.reference}: its vocabulary of {found} is not the policy's "
            f"{vocab_size}; choose a model with the same tokenizer"
        )


def _resolve(config: RunConfig) -> Path:
    try:
        return resolve_model(config.rl.reference, config.cache_dir)
    except ValueError as error:
        raise ValueError(f"--rl.reference {config.rl.reference}: {error}") from error


def open_reference(
    config: RunConfig, policy: Transformer, folder: Path, *, has_begun: bool
) -> FrozenPolicy:
    """`folder` is where the run keeps its own; `has_begun` says that RL steps were taken, so that
    `policy` is not it any more. `ValueError` if the run's own is missing."""
    if config.rl.reference:
        model = load_model(_resolve(config), policy.dtype, str(policy.device))
    else:
        if not folder.is_dir():
            if has_begun:
                raise ValueError(
                    f"{folder} is missing: it holds the policy as RL began, which this run "
                    "compares with; put it back, or start another run"
                )
            replace_model(policy, folder)
        model = load_model(folder, policy.dtype, str(policy.device))
    limits = config.engine
    return FrozenPolicy(
        model,
        micro_batch_tokens=limits.micro_batch_tokens,
        share_prefix=limits.share_prefix,
        lm_head_fp32=limits.lm_head_fp32,
    )
