"""GRPO on one page: sample groups, score them, take one optimizer step, hand the weights back.

The task: name as many even token ids as you can. A model of random weights learns it in seconds on
one CPU core. Everything here is the real thing: `run/trainer.py` runs this loop too, and adds
tools, asynchrony, resuming, evaluation and a report.

    python scripts/grpo_on_a_page.py
"""

from __future__ import annotations

import torch

from nanoengine import Engine, EngineConfig, ModelConfig, Transformer
from nanoinfer import InferConfig, LLMEngine, Output, SamplingParams
from nanorl.batch_metrics import logp_gap
from nanorl.batching import build_batch
from nanorl.grpo import GRPO
from nanorl.types import Rollout

STEPS, TASKS, GROUP, LENGTH = 40, 4, 16, 12
TINY = ModelConfig(
    model_type="llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def new_model() -> Transformer:
    model = Transformer(TINY)
    model.init_weights(seed=0)
    return model


def to_rollout(step: int, task: int, member: int, prompt: list[int], output: Output) -> Rollout:
    """The engine's own ids, log-probs and versions: nothing is tokenised or scored again."""
    n, m = len(prompt), len(output.ids)
    return Rollout(
        task_id=f"t{task}", group_id=f"s{step}-t{task}", rollout_id=f"s{step}-t{task}-{member}",
        tokens=prompt + output.ids,
        loss_mask=[0] * n + [1] * m,  # only what the policy sampled is trained on
        logps=[0.0] * n + output.logps, versions=[-1] * n + output.versions,
        reward=sum(token % 2 == 0 for token in output.ids) / m,
    )  # fmt: skip


def train(steps: int = STEPS) -> list[dict[str, float]]:
    """Returns the reward, gradient norm and log-prob gap of every step."""
    trainer = Engine(new_model(), EngineConfig(lr=1e-2, share_prefix=True))
    sampler = LLMEngine(new_model(), InferConfig(num_blocks=256, eos_ids=()))
    algorithm = GRPO()  # AlgorithmSpec(advantage="dr_grpo") is another, and so on
    history = []
    for step in range(steps):
        prompts = [[100 + task, 200 + step, 300] for task in range(TASKS)]
        params = SamplingParams(max_tokens=LENGTH, n=GROUP, seed=step)
        outputs = iter(sampler.generate(prompts, params))
        groups = [
            [to_rollout(step, task, member, prompt, next(outputs)) for member in range(GROUP)]
            for task, prompt in enumerate(prompts)
        ]
        batch = build_batch(groups, algorithm, max_tokens=3 + LENGTH, version=step)
        if not batch.samples:  # every group is solved, and equal rewards teach nothing
            break
        result = trainer.train_step(batch.samples, batch.loss_fn)
        gap = logp_gap(batch.samples, trainer.last_logps)["logp_gap_max"]
        sampler.update_weights(trainer.export_state(), version=step + 1)
        reward, grad_norm = batch.metrics["reward"], result["grad_norm"]
        print(f"step {step:2d}  reward {reward:.2f}  grad norm {grad_norm:.2f}  log-prob gap {gap}")
        history.append({"reward": reward, "grad_norm": grad_norm, "logp_gap": gap})
    return history


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
