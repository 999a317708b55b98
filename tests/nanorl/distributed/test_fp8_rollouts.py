"""Rollouts in fp8, training in full: `--engine.quantization fp8`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nanoengine.architectures.quantized import Fp8Linear
from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.distributed.weights.in_process import make_publisher
from nanorl.options.agent_config import AgentConfig
from nanorl.options.engine_config import EngineLimits
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.scorers.scored_learner import make_learner
from nanorl.types import Rollout

SHAPE = ModelConfig(
    vocab_size=61,
    hidden_size=160,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_ids=(2,),
)
PROMPTS = [[5, 6, 7], [11, 12, 13, 14]]


def make_model() -> Transformer:
    model = Transformer(SHAPE)
    model.init_weights(0)
    return model


def play(engine: LLMEngine) -> list[list[Rollout]]:
    """A group of four for each prompt; one of each group succeeds."""
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    params = [SamplingParams(max_tokens=9, seed=i, ignore_eos=True) for i in range(len(prompts))]
    groups: list[list[Rollout]] = [[], []]
    for i, (prompt, output) in enumerate(
        zip(prompts, engine.generate(prompts, params), strict=True)
    ):
        rollout = Rollout(
            task_id=str(i // 4),
            group_id=str(i // 4),
            rollout_id=str(i),
            tokens=prompt + output.ids,
            loss_mask=[0] * len(prompt) + [1] * len(output.ids),
            logps=[0.0] * len(prompt) + output.logps,
            versions=[-1] * len(prompt) + output.versions,
            reward=float(i % 4 == 0),
        )
        groups[i // 4].append(rollout)
    return groups


def configured(**options: Any) -> RunConfig:
    return RunConfig(
        rl=RLConfig(group_size=4, tasks_per_step=2),
        agent=AgentConfig(max_context_tokens=64, max_turn_tokens=16),
        engine=EngineLimits(quantization="fp8"),
        **options,
    )


def test_a_step_trains_on_fp8_rollouts_and_their_matrices_follow_the_weights() -> None:
    rollout_engine = LLMEngine(make_model(), InferConfig(num_blocks=64, quantization="fp8"))
    trainer = Engine(make_model(), EngineConfig(lr=1e-3))
    matrix = rollout_engine.model.layers[0].qkv
    assert isinstance(matrix, Fp8Linear)
    before = matrix.fp8[0].float() * matrix.fp8[1].repeat_interleave(128, 1)[:, :160]
    with ThreadPoolExecutor(1) as thread:
        generator = AsyncEngine(rollout_engine, executor=thread)
        publisher = make_publisher(trainer, generator)
        learner = make_learner(configured(), engine=trainer, publisher=publisher, thread=thread)
        metrics = asyncio.run(learner.train_and_publish(play(rollout_engine), 1))
    assert metrics["num_trained_rollouts"] == 8 and metrics["grad_norm"] > 0
    assert 0 < metrics["logp_gap_mean"] < 0.02
    exact = trainer.model.layers[0].qkv.weight
    assert torch.equal(matrix.weight, exact)  # the trainer's, to the bit
    after = matrix.fp8[0].float() * matrix.fp8[1].repeat_interleave(128, 1)[:, :160]
    assert (after - exact).norm() < 0.05 * exact.norm() and not torch.equal(after, before)


def test_options_that_contradict_fp8_rollouts_name_the_way_out() -> None:
    assert configured().rl.algorithm.resolved_correction == "tis"
    with pytest.raises(ValueError, match=r"--deterministic with --engine.quantization fp8"):
        configured(deterministic=True)
    uncorrected = RLConfig(algorithm=AlgorithmSpec(correction="none"))
    with pytest.raises(ValueError, match=r"set --rl.algorithm.correction tis"):
        RunConfig(rl=uncorrected, engine=EngineLimits(quantization="fp8"))
