"""Runs whose rollouts draw from a part of the vocabulary, and train on log-probs of that part."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_runs import SMALL, RunProcess, Slow, rows
from talking_runs import WEIGHTS, talk

from nanoengine.heads import kept_tokens
from nanoinfer.params import SamplingParams
from nanorl.observability.store import RolloutStore
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout

OWN: dict[str, Any] = {"warm_start.steps": 2, "rl.top_p": 0.9, "rl.min_p": 0.02}
pytestmark = pytest.mark.xdist_group("heavy")


def run(out: Path, steps: int, **options: Any) -> Path:
    return talk(out, steps, OWN, options)


def rollouts(folder: Path) -> list[Rollout]:
    with RolloutStore(folder / "rollouts.sqlite") as store:
        return [store.get(entry.rollout_id) for entry in store.entries()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("whole") / "run", 3)


def test_rollouts_and_training_have_the_same_bits_in_every_step(whole: Path) -> None:
    found = rows(whole)
    assert len(found) == 3
    assert all(row["logp_gap_max"] == 0 and row["logp_gap_tokens"] > 0 for row in found)
    assert all(row["grad_norm"] > 0 for row in found)


def test_stored_rollouts_say_what_was_kept_at_every_sampled_token(whole: Path) -> None:
    found = rollouts(whole)
    assert len(found) == 18
    for one in found:
        places = zip(one.tokens, one.loss_mask, one.kept, strict=True)
        assert all((token in kept) if is_action else not kept for token, is_action, kept in places)
    sizes = [len(kept) for one in found for kept in one.kept if kept]
    assert 1 < sum(sizes) / len(sizes) < 480  # of some 500 tokens


def test_a_resumed_run_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    resumed = run(tmp_path / "run", 1)
    run(tmp_path / "run", 3, resume=True)
    assert (resumed / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert [row["loss"] for row in rows(resumed)] == [row["loss"] for row in rows(whole)]
    assert rollouts(resumed) == rollouts(whole)


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """By flags, with the sandbox's programs; step 2 is in the weights and in no checkpoint."""
    options = (*SMALL, "--save-every", "1", "--rl.top-p", "0.9", "--rl.min-p", "0.02")

    def play(name: str, *arguments: str, slow: Slow | None = None) -> RunProcess:
        out = ("--out", str(tmp_path / name))
        return RunProcess(tmp_path / f"{name}.log", *out, *arguments, slow=slow)

    whole = play("whole", *options)
    assert whole.wait(240) == 0, whole.output()
    marker = tmp_path / "slow"
    killed = play("killed", *options, slow=Slow(update=5, seconds=240, marker=marker))
    killed.await_file(marker, 120)
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    resumed = play("killed", "--resume")
    assert resumed.wait(240) == 0, resumed.output()
    one, other = tmp_path / "whole", tmp_path / "killed"
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
    assert [row["loss"] for row in rows(one)] == [row["loss"] for row in rows(other)]
    assert rollouts(one) == rollouts(other) and any(one.kept for one in rollouts(other))


def test_training_that_ignores_what_was_kept_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own watch over the log-probs of both engines finds it in the first step."""
    monkeypatch.setattr(kept_tokens, "kept_logprobs", lambda model, kept: model.logprobs)
    with pytest.raises(RuntimeError, match="rollout and training log-probs differ"):
        run(tmp_path / "run", 1, rl__top_k=5)


VARIANTS: dict[str, dict[str, Any]] = {
    "few tokens, cold, several steps a batch": {
        **{"rl.top_p": 1.0, "rl.min_p": 0.0, "rl.top_k": 5, "rl.temperature": 0.7},
        **{"dtype": "fp32", "rl.minibatches": 2, "rl.epochs": 2},
    },
    "an adapter": {"lora.rank": 4, "lora.alpha": 8.0},
    "an adapter over int8": {
        **{"lora.rank": 4, "lora.alpha": 8.0, "lora.base_dtype": "int8", "dtype": "bf16"}
    },
    "a reference and entropies": {"rl.algorithm.kl_coef": 0.1, "rl.keep_entropies": True},
    "a critic": {"algorithm": "ppo"},
    "a baseline that reads half the temperature": {"algorithm": "otb"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_ways_to_train_have_the_same_bits_too(name: str, tmp_path: Path) -> None:
    found = rows(run(tmp_path / "run", 2, **VARIANTS[name]))
    assert [row["logp_gap_max"] for row in found] == [0.0, 0.0]
    assert all(row["grad_norm"] > 0 for row in found)
    if "entropies" in name:
        assert found[0]["ref_kl"] == 0.0  # of the policy to its own copy, over the same tokens


def test_a_run_without_truncation_asks_for_a_plain_draw() -> None:
    rl = tiny().rl
    assert rl.sampling(7) == SamplingParams(temperature=rl.temperature, seed=7)
    assert rl.sampling(7).is_plain and not rl.truncates
    cut = replace(rl, top_k=3).sampling(7)
    assert (cut.top_k, cut.top_p, cut.min_p, cut.logps_mode) == (3, 1.0, 0.0, "kept")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": "cuda"}, "--device cuda"),
    ({"engine": {"quantization": "int8"}}, "--engine.quantization int8"),
    ({"cluster": {"backend": "local"}, "learner": {"tp": 2}}, "--learner.tp 2"),
    ({"cluster": {"backend": "local"}, "learner": {"cp": 2}}, "--learner.cp 2"),
    ({"cluster": {"backend": "local"}, "learner": {"pp": 2}}, "--learner.pp 2"),
    ({"cluster": {"backend": "local"}, "rollout": {"tp": 2}}, "--rollout.tp 2"),
    (
        {"cluster": {"backend": "local"}, "rollout": {"addresses": ["http://127.0.0.1:1"]}},
        "--rollout.addresses http://127.0.0.1:1",
    ),
    ({"algorithm": "opd"}, "--algorithm opd, which asks a teacher"),
    ({"algorithm": "echo"}, "--rl.algorithm.observation-coef"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_has_no_log_probs_over_what_was_kept_is_refused(
    options: dict[str, Any], words: str
) -> None:
    config = tiny()
    if "algorithm" in options:
        config = config.with_algorithm(options["algorithm"])
    sections = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in options.items()
        if name != "algorithm"
    }
    with pytest.raises(ValueError, match=r"--rl\.top-p 0\.95 with ") as caught:
        replace(config, rl=replace(config.rl, top_p=0.95), **sections)
    assert words in str(caught.value) and "leave one of them out" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0.0}, "--rl.top-p 0.0: must be 0.01 or more"),
        ({"top_p": 1.5}, "--rl.top-p 1.5: must be at most 1"),
        ({"min_p": 1.0}, "--rl.min-p 1.0: must be at most 0.99"),
        ({"min_p": -0.1}, "--rl.min-p -0.1: must be 0 or more"),
        ({"top_k": -1}, "--rl.top-k -1: must be 0 or more"),
    ],
)
def test_numbers_that_keep_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        replace(RunConfig().rl, **options)
