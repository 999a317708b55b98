"""The policy that KL terms and distillation compare with.

Either another model of the same vocabulary (a teacher), or the policy as RL began. The latter is
written into the run's folder, because a resumed run must compare with the same weights.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nanoengine.frozen import FrozenPolicy
from nanoengine.model.hf import load_model, save_model
from nanoengine.model.sources import resolve_model
from nanoengine.model.transformer import Transformer
from nanorl.config import RunConfig


def open_reference(
    config: RunConfig, policy: Transformer, folder: Path, *, has_begun: bool
) -> FrozenPolicy:
    """`folder` is where the run keeps its own; `has_begun` says that RL steps were taken, so that
    `policy` is not it any more. `ValueError` if it is missing or has another vocabulary."""
    if config.rl.reference:
        source = resolve_model(config.rl.reference)
        model = load_model(source, policy.dtype, str(policy.device))
        if model.config.vocab_size != policy.config.vocab_size:
            raise ValueError(
                f"--rl.reference {config.rl.reference}: its vocabulary of "
                f"{model.config.vocab_size} is not the policy's {policy.config.vocab_size}; choose "
                "a model with the same tokenizer"
            )
    else:
        if not folder.is_dir():
            if has_begun:
                raise ValueError(
                    f"{folder} is missing: it holds the policy as RL began, which this run "
                    "compares with; put it back, or start another run"
                )
            _keep(policy, folder)
        model = load_model(folder, policy.dtype, str(policy.device))
    limits = config.engine
    return FrozenPolicy(
        model,
        micro_batch_tokens=limits.micro_batch_tokens,
        share_prefix=limits.share_prefix,
        lm_head_fp32=limits.lm_head_fp32,
    )


def _keep(policy: Transformer, folder: Path) -> None:
    """Whole or not at all."""
    draft = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        save_model(policy, draft)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
