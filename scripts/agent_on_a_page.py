"""An agent on one page: it reads a task, writes a program, a sandbox runs it, it reads what came
out and answers; the answer is scored, and GRPO makes the next one better.

The four parts, each on the real engines: a sandboxed environment, a policy, a rollout worker (two
turns, of which only the policy's own tokens are trained on) and a trainer (advantages within the
group of one task). The language has 93 words, the model random weights. A short warm start
shows what an episode looks like, with a program that fits the task in three of ten and is drawn
at random else; RL finds out which one pays: from 50 % to 99 % in a minute on one CPU core.
`nanorl/` is this page with every option.

    python scripts/agent_on_a_page.py
"""

from __future__ import annotations

import random

import torch

from nanoengine import Engine, EngineConfig, ModelConfig, Transformer
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoinfer import InferConfig, LLMEngine, Output, SamplingParams
from nanorl.batch_metrics import logp_gap
from nanorl.batching import build_batch
from nanorl.grpo import GRPO
from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.pool import SandboxPool
from nanorl.types import Rollout

WARM_STEPS, STEPS, TASKS, GROUP = 250, 40, 16, 8
TEACHER = 0.3  # so often a demonstration's program is the right one on purpose
MOST = 4  # tokens of a turn: `print(`, an expression, `)`, <eos>
TRUTH = {"sum": "a + b", "product": "a * b", "larger": "max(a, b)", "smaller": "min(a, b)"}
WORDS = ["<eos>", "print(", *TRUTH.values(), ")", "<out>", "error", *TRUTH, *map(str, range(2, 82))]
ID = {word: i for i, word in enumerate(WORDS)}


def ids(*words: object) -> list[int]:
    return [ID[str(word)] for word in words]


class Environment:
    """Hands out tasks, runs the programs of the policy behind real walls, and judges its answer."""

    def __init__(self, sandbox: SandboxPool) -> None:
        self.sandbox = sandbox

    def task(self, rng: random.Random) -> tuple[str, int, int]:
        return rng.choice(list(TRUTH)), rng.randint(2, 9), rng.randint(2, 9)

    def run(self, task: tuple[str, int, int], action: list[int]) -> list[int]:
        """The observation: the number that the program printed, or that it printed none."""
        program = f"a, b = {task[1]}, {task[2]}\n" + " ".join(WORDS[i] for i in action if i)
        printed = self.sandbox.run_sync(program, files={}, timeout_s=2.0).stdout.decode().strip()
        return ids("<out>", printed if printed in ID else "error")

    def reward(self, task: tuple[str, int, int], answer: list[int]) -> float:
        a, b = task[1:]
        truth = {"sum": a + b, "product": a * b, "larger": max(a, b), "smaller": min(a, b)}
        return float(answer[:1] == ids(truth[task[0]]))


class Policy:
    """One model that two engines read, in turns: one trains it, one samples."""

    def __init__(self) -> None:
        model = self.new_model()
        self.trainer = Engine(model, EngineConfig(lr=3e-3, share_prefix=True))
        self.sampler = LLMEngine(model, InferConfig(num_blocks=512, eos_ids=(0,)))
        self.version = 0

    @staticmethod
    def new_model() -> Transformer:
        shape = ModelConfig(
            model_type="llama", vocab_size=len(WORDS), hidden_size=64, intermediate_size=128,
            num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=32,
            tie_word_embeddings=True,
        )  # fmt: skip
        model = Transformer(shape)
        model.init_weights(seed=0)
        return model

    def publish(self) -> None:
        self.version += 1
        self.sampler.adopt_weights(version=self.version)

    def act(self, histories: list[list[int]], seed: int) -> list[Output]:
        turns = [SamplingParams(max_tokens=MOST, seed=seed + i) for i in range(len(histories))]
        return self.sampler.generate(histories, turns)


def play(env: Environment, policy: Policy, step: int) -> list[list[Rollout]]:
    """The rollout worker: GROUP episodes of each of TASKS tasks, all at once, turn by turn."""
    rng = random.Random(step)
    tasks = [task for task in (env.task(rng) for _ in range(TASKS)) for _ in range(GROUP)]
    prompts = [ids(*task) for task in tasks]
    first = policy.act(prompts, seed=step << 20)
    seen = [env.run(task, output.ids) for task, output in zip(tasks, first, strict=True)]
    histories = [p + o.ids + s for p, o, s in zip(prompts, first, seen, strict=True)]
    second = policy.act(histories, seed=(step << 20) + len(tasks))
    rollouts = []
    for i, (task, one, two) in enumerate(zip(tasks, first, second, strict=True)):
        start = len(prompts[i])
        quiet = len(seen[i])
        rollouts.append(Rollout(
            task_id=f"{task}", group_id=f"{step}-{i // GROUP}", rollout_id=f"{step}-{i}",
            tokens=histories[i] + two.ids,
            # 1 where the policy sampled: never its prompt, and never what the sandbox said.
            loss_mask=[0] * start + [1] * len(one.ids) + [0] * quiet + [1] * len(two.ids),
            logps=[0.0] * start + one.logps + [0.0] * quiet + two.logps,
            versions=[-1] * start + one.versions + [-1] * quiet + two.versions,
            reward=env.reward(task, two.ids),
        ))  # fmt: skip
    return [rollouts[i : i + GROUP] for i in range(0, len(rollouts), GROUP)]


def demonstrate(env: Environment, rng: random.Random) -> Sample:
    """An episode as a poor teacher plays it: now and then its program fits the task."""
    task = env.task(rng)
    fits = TRUTH[task[0]] if rng.random() < TEACHER else rng.choice(list(TRUTH.values()))
    program = ids("print(", fits, ")", "<eos>")
    seen = env.run(task, program)
    tokens = ids(*task) + program + seen + seen[1:] + ids("<eos>")
    return Sample(tokens=tokens, loss_mask=[0] * 3 + [1] * 4 + [0] * 2 + [1] * 2)


def train(warm_steps: int = WARM_STEPS, steps: int = STEPS) -> list[dict[str, float]]:
    """Returns reward and log-prob gap of every step of RL."""
    with SandboxPool(SandboxSpec(), num_workers=1) as sandbox:
        env, policy, rng = Environment(sandbox), Policy(), random.Random(0)
        shown = [demonstrate(env, rng) for _ in range(512)]
        for _ in range(warm_steps):
            policy.trainer.train_step(rng.sample(shown, 32), sft_loss, num_loss_tokens)
        policy.trainer.restart(EngineConfig(lr=2e-3, share_prefix=True))
        history = []
        for step in range(steps):
            policy.publish()
            groups = play(env, policy, step)
            batch = build_batch(groups, GRPO(), max_tokens=32, version=policy.version)
            policy.trainer.train_step(batch.samples, batch.loss_fn)
            gap = logp_gap(batch.samples, policy.trainer.last_logps)["logp_gap_max"]
            history.append({"reward": batch.metrics["reward"], "gap": gap})
            print(f"step {step:2d}  success {history[-1]['reward']:4.0%}  log-prob gap {gap}")
        return history


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
