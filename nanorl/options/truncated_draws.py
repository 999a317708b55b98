"""`--rl.top-p`, `--rl.min-p` and `--rl.top-k`: what a run with truncated rollouts asks its engine
for, and what it cannot be combined with.

Rollouts report what was kept (nanoinfer/options/kept_sampling.py), a rollout holds it (`kept`), and
whoever trains takes log-probs over the same tokens (nanoengine/heads/kept_tokens.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanorl.options.phase_config import RLConfig

if TYPE_CHECKING:
    from nanorl.options.run_config import RunConfig


def check_truncation(config: RunConfig) -> None:
    """`ValueError` names the first option that has no log-probs over what was kept."""
    rl = config.rl
    names = [one for one in ("top_p", "min_p", "top_k") if getattr(rl, one) != getattr(_OFF, one)]
    flag = f"--rl.{names[0].replace('_', '-')} {getattr(rl, names[0])}"
    for other, why in _refusals(config):
        raise ValueError(f"{flag} with {other}: {why}; leave one of them out")


_OFF = RLConfig()


def _refusals(config: RunConfig) -> Iterator[tuple[str, str]]:
    spec, rollout = config.rl.algorithm, config.rollout
    if config.device.startswith("cuda"):
        yield f"--device {config.device}", "what was kept is reported and scored on a CPU alone"
    for name in ("tp", "cp", "pp", "ep"):
        if (size := getattr(config.learner, name)) > 1:
            why = "log-probs over what was kept need the vocabulary, and the tokens, in one piece"
            yield f"--learner.{name} {size}", why
    if rollout.tp > 1:
        yield f"--rollout.tp {rollout.tp}", "an engine that is split does not report what it kept"
    if rollout.addresses:
        why = "a server does not report what it kept"
        yield f"--rollout.addresses {rollout.addresses[0]}", why
    if config.engine.quantization != "none":
        why = "what 8 bits keep is not what training would"
        yield f"--engine.quantization {config.engine.quantization}", why
    if spec.loss_part.is_distillation or spec.has_hindsight or spec.distill_coef:
        why = "a teacher's log-probs are of the whole vocabulary, or of another prompt"
        yield f"--algorithm {config.algorithm}, which asks a teacher", why
    if spec.observation_coef:
        why = "nobody drew the observations that it learns"
        yield f"--rl.algorithm.observation-coef {spec.observation_coef:g}", why
