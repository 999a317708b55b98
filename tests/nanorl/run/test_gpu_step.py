"""A whole GRPO step on a GPU that is not there (fake_cuda.py): rollouts, advantages, optimizer
step, new weights into the rollout engine. Tensors have a device and no values: what is tested is
that all of a step's tensors meet on the GPU, and how often host and GPU talk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import SHAPE, Copy, FakeCuda, WrongDevice, fake_gpu

from nanoengine.config import EngineConfig
from nanoengine.heads.scorer import Scorer
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.scoring import PassScorer
from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.gpu.cuda_graph import run_plainly
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants import full_runner, parts
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.distributed.weights.in_process import make_publisher
from nanorl.learner import Learner
from nanorl.options import agent_kit as kit
from nanorl.options import run_sizes as sizes
from nanorl.options.agent_config import AgentConfig
from nanorl.options.parts import Parts
from nanorl.options.phase_config import RLConfig
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.scorers.scored_learner import make_learner, update_plan
from nanorl.scorers.value_critic import Critic
from nanorl.types import Rollout

pytest.importorskip("triton", reason="Triton exists on Linux only")


PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
GPU = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(parts, "CudaCapture", lambda device: run_plainly)
    with fake_gpu() as gpu:
        yield gpu


def make_model() -> Transformer:
    model = Transformer(SHAPE, torch.bfloat16, "cuda:0")
    model.init_weights(0)
    return model


def make_trainer(**options: Any) -> Engine:
    settings = {"dtype": "bf16", "lr": 1e-3, "share_prefix": True, **options}
    return Engine(make_model(), EngineConfig(**settings))


def play(engine: LLMEngine) -> list[list[Rollout]]:
    """A group of four for each prompt; one of each group succeeds."""
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0.7))
    pairs = list(zip(prompts, outputs, strict=True))
    return [[as_rollout(g, m, *pairs[4 * g + m]) for m in range(4)] for g in range(2)]


def as_rollout(group: int, member: int, prompt: list[int], output: Output) -> Rollout:
    return Rollout(
        task_id=str(group),
        group_id=str(group),
        rollout_id=f"{group}-{member}",
        tokens=prompt + output.ids,
        loss_mask=[0] * len(prompt) + [1] * len(output.ids),
        logps=[0.0] * len(prompt) + output.logps,
        versions=[-1] * len(prompt) + output.versions,
        reward=float(member == 0),
    )


def counted(copies: list[Copy]) -> Counter[str]:
    return Counter(copy.kind for copy in copies)


def a_step(gpu: FakeCuda, config: RunConfig, **models: Any) -> tuple[dict[str, Any], AsyncEngine]:
    """Rollouts, then what the learner makes of them, in threads that see the GPU too."""
    rollout_engine = LLMEngine(make_model(), InferConfig())
    with ThreadPoolExecutor(1, initializer=gpu.__enter__) as thread:
        generator = AsyncEngine(rollout_engine, executor=thread)
        groups = play(rollout_engine)
        trainer = make_trainer()
        publisher = make_publisher(trainer, generator, max_staleness=config.rl.max_staleness)
        learner = make_learner(config, engine=trainer, publisher=publisher, thread=thread, **models)
        metrics = asyncio.run(learner.train_and_publish(groups, 1))
    return metrics, generator


def configured(**rl: Any) -> RunConfig:
    agent = AgentConfig(max_context_tokens=64, max_turn_tokens=16)
    return RunConfig(rl=RLConfig(group_size=4, tasks_per_step=2, **rl), agent=agent)


def test_a_grpo_step_stays_on_the_gpu(gpu: FakeCuda) -> None:
    metrics, generator = a_step(gpu, configured())
    assert metrics["num_trained_rollouts"] == 8 and metrics["grad_norm"] > 0
    assert generator.version == 1 and not generator.engine.is_asleep
    launched = set(gpu.launches)
    assert {"_decode_kernel", "sample_kernel", "adamw_kernel", "_dkdv_kernel"} <= launched
    assert not any(copy.kind == "sync" for copy in gpu.take())


def test_a_deterministic_trainer_scores_by_the_kernels_of_a_deterministic_engine(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    trainer = make_trainer(deterministic=True, share_prefix=False, lm_head_fp32=True)
    samples = [Sample(tokens=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1])] * 2

    def by_cublas(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("a product whose algorithm depends on the number of rows")

    with monkeypatch.context() as patch:
        for module, name in ((torch.nn.functional, "linear"), (torch, "mm")):
            patch.setattr(module, name, by_cublas)
        trainer.forward_logprobs(samples)
    num_products = 4 * SHAPE.num_layers + 1
    assert gpu.launches["_matmul_kernel"] == num_products
    trainer.train_step(samples, lambda logp_T, *_: (-logp_T.sum(), {}))
    assert gpu.launches["_matmul_kernel"] > 2 * num_products  # the gradients of the inputs too


@pytest.mark.parametrize(
    "spec",
    [
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        {"kl_coef": 0.01, "entropy_coef": 0.01},
        {"advantage": "gae", "kl_reward_coef": 0.1},
        {"advantage": "none", "loss": "opd_topk", "top_k": 3},
    ],
    ids=["gspo", "reference", "critic", "top-k"],
)
def test_other_algorithms_models_stay_on_the_gpu(gpu: FakeCuda, spec: dict[str, Any]) -> None:
    algorithm = AlgorithmSpec(**spec)
    models: dict[str, Any] = {}
    if algorithm.needs_reference:
        models["reference"] = Scorer(make_model().requires_grad_(False), share_prefix=True)
    if algorithm.needs_critic:
        critic_config = EngineConfig(dtype="bf16", lr=1e-3, share_prefix=True)
        models["critic"] = Critic(make_model(), critic_config, value_clip=0.2)
    config = configured(algorithm=algorithm)
    metrics, _ = a_step(gpu, config, **models)
    assert metrics["num_trained_rollouts"] == 8


def test_stale_rollouts_and_several_epochs_stay_on_the_gpu(gpu: FakeCuda) -> None:
    metrics, generator = a_step(gpu, configured(max_staleness=1, epochs=2))
    assert metrics["num_trained_rollouts"] == 8
    assert generator.version == 1


def test_a_training_step_talks_to_the_gpu_a_fixed_number_of_times(gpu: FakeCuda) -> None:
    """Up: each micro-batch and, of a tree, its attention layout, from pinned memory and not waited
    for. Down: log-probs, losses with statistics, and the gradient's norm."""
    rollouts = [r for group in play(LLMEngine(make_model(), InferConfig())) for r in group]
    for n, rollout in enumerate(rollouts):
        rollout.tokens[-2] = 2 + n  # so weak a model says the same everywhere
    trainer = make_trainer(micro_batch_tokens=13)
    for step in range(2):
        batch = build_batch(
            [rollouts[:4], rollouts[4:]], AlgorithmSpec(), max_tokens=64, version=step
        )
        gpu.take()
        trainer.train_step(batch.samples, batch.loss_fn)
        copies = gpu.take()
    micros = trainer._passes(batch.samples)
    num_trees = sum(micro.prefix_of_S is not None for micro in micros)
    assert len(micros) > 2 and num_trees > 0
    uploads = [copy for copy in copies if copy.kind == "upload"]
    assert counted(copies) == {"upload": len(micros) + num_trees, "download": 3}
    assert all(copy.is_async for copy in uploads), uploads


def test_the_cache_is_away_while_the_optimizer_works(gpu: FakeCuda) -> None:
    """And not where rollouts go on beside it."""
    seen = []

    class Watch(Learner):
        def train_on(self, *arguments: Any) -> dict[str, Any]:
            seen.append(rollout_engine._runner.cache.is_asleep)
            return super().train_on(*arguments)

    for max_staleness in (0, 1):
        rollout_engine = LLMEngine(make_model(), InferConfig())
        with ThreadPoolExecutor(1, initializer=gpu.__enter__) as thread:
            trainer, generator = make_trainer(), AsyncEngine(rollout_engine, executor=thread)
            learner = Watch(
                update_plan(configured(max_staleness=max_staleness)),
                engine=trainer,
                publisher=make_publisher(trainer, generator, max_staleness=max_staleness),
                thread=thread,
            )
            asyncio.run(learner.train_and_publish(play(rollout_engine), 1))
        assert not rollout_engine.is_asleep
        play(rollout_engine)  # the new cache serves
    assert seen == [True, False]


# -- planted bugs: the net catches what it is spread for -------------------------------------------


def test_an_index_on_the_cpu_is_found(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PassScorer.part

    def with_cpu_index(self: PassScorer, micro: Any) -> Any:
        made = part(self, micro)
        return replace(made, counted=torch.arange(len(micro.target_ids_T)))

    monkeypatch.setattr(PassScorer, "part", with_cpu_index)
    with pytest.raises(WrongDevice, match=r"nanoengine/scoring\.py"):
        a_step(gpu, configured())


def test_a_mask_made_on_the_cpu_is_found(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = full_runner.sample_on_device

    def with_cpu_mask(logits_SV: torch.Tensor, asked: Any) -> Any:
        banned = torch.zeros(SHAPE.vocab_size, dtype=torch.bool)
        return draw(logits_SV.masked_fill(banned, -torch.inf), asked)

    monkeypatch.setattr(full_runner, "sample_on_device", with_cpu_mask)
    with pytest.raises(WrongDevice, match=r"masked_fill"):
        a_step(gpu, configured())


def test_weights_on_another_gpu_are_found() -> None:
    with fake_gpu(num_gpus=2):
        model = Transformer(SHAPE, torch.bfloat16, "cuda:1")
        model.norm.data = model.norm.data.to("cpu").to("cuda:0")
        with pytest.raises(ValueError, match="weight: is on cuda:0, must be on x's cuda:1"):
            LLMEngine(model, InferConfig(cuda_graphs=False)).generate(
                PROMPTS, SamplingParams(max_tokens=2)
            )


# -- the command's own assembly --------------------------------------------------------------------


def test_a_run_is_built_on_the_gpu_and_says_so(
    gpu: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of `--preset tiny --device cuda`, without their sandbox: both models and the cache
    lie on the GPU, both threads work there, and the options that are saved name what was chosen."""
    monkeypatch.setattr(kit, "run_sandbox", mock.MagicMock())
    config = replace(get_preset("tiny").config(), out=tmp_path, device="cuda")
    parts = Parts(replace(config, rl=replace(config.rl, max_staleness=1)))
    roles = InlineRoles(parts)
    assert roles.engine.model.device == roles.rollout_engine.model.device == GPU
    masters = roles.engine.optimizer.entries("master")
    assert all(master.device == GPU for _, master in masters)
    assert roles.rollout_engine._runner.cache.data.device == GPU
    assert roles.rollout_engine._runner.decode is not None  # graphs
    saved = parts.config.to_json()
    assert saved["device"] == "cuda:0"
    assert all(saved["engine"][name] > 0 for name in sizes.SIZES)
    for thread in (roles.compute, roles.optimizer_thread):
        thread.submit(int).result()
    assert gpu.entered == [GPU, GPU, GPU]  # the caller's and two threads
    roles.close()
