"""The curriculum of a run: the one that `--rl.curriculum` names, with its arguments."""

from __future__ import annotations

from nanorl.envs.catalog import parse_arguments
from nanorl.flow.curriculum import Curriculum, load_curriculum
from nanorl.options.run_config import RunConfig


def run_curriculum(config: RunConfig) -> Curriculum:
    """A new one, which has learnt nothing. ValueError where there is none, or not with these
    arguments."""
    rl = config.rl
    return load_curriculum(
        rl.curriculum, parse_arguments(rl.curriculum_args, "--rl.curriculum-args")
    )
