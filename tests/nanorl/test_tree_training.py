"""Trees in a policy update: gradients through `build_batch`, and the rollout engine's log-probs."""

from __future__ import annotations

import random

import pytest
import torch
from random_trees import VOCAB, make_model, random_sequences

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample, make_micro_batches
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.distributed.warm_start import sft_samples
from nanorl.types import Branch, Rollout

SPECS = {
    "grpo": AlgorithmSpec(entropy_coef=0.02),
    "gspo": AlgorithmSpec(loss="gspo", aggregation="seq_mean_token_mean"),
    "reinforce_pp": AlgorithmSpec(advantage="reinforce_pp", aggregation="seq_mean_token_sum"),
}


def random_group(chance: random.Random, group: str) -> list[Rollout]:
    """The sequences of a random tree, dealt out to a few rollouts."""
    sequences = []
    for tokens in random_sequences(chance):
        mask = [0, *(int(chance.random() < 0.7) for _ in tokens[1:])]
        logps = [-chance.uniform(0.1, 5.0) if m else 0.0 for m in mask]
        versions = [3 if m else -1 for m in mask]
        sequences.append(Branch(tokens=tokens, loss_mask=mask, logps=logps, versions=versions))
    count = chance.randint(1, len(sequences))
    return [
        Rollout(
            task_id=group,
            group_id=group,
            rollout_id=f"{group}-{member}",
            reward=chance.random(),
            branches=sequences[member + count :: count],
            tokens=own.tokens,
            loss_mask=own.loss_mask,
            logps=own.logps,
            versions=own.versions,
        )
        for member, own in enumerate(sequences[:count])
    ]


@pytest.mark.parametrize("name", SPECS)
def test_the_update_on_branches_is_that_of_separate_rows(name: str) -> None:
    chance = random.Random(name)
    groups = [random_group(chance, f"g{g}") for g in range(10)]
    assert any(rollout.branches for group in groups for rollout in group)
    batch = build_batch(groups, SPECS[name], max_tokens=200, version=3)
    found = []
    for share, budget in ((False, 10_000), (True, 10_000), (True, 60)):
        model = make_model()
        config = EngineConfig(
            dtype="fp64", max_grad_norm=0.0, share_prefix=share, micro_batch_tokens=budget
        )
        has_entropy = SPECS[name].entropy_coef != 0
        Engine(model, config).train_step(batch.samples, batch.loss_fn, entropy=has_entropy)
        found.append({name: p.main_grad for name, p in model.named_parameters()})
    expected, *trees = found
    for tree in trees:
        for parameter, gradient in expected.items():
            error = float((tree[parameter] - gradient).norm() / gradient.norm())
            assert error < 1e-10, (parameter, error)


def sampled_tree(engine: LLMEngine, chance: random.Random) -> list[Sample]:
    """What the engine sampled after prompts of which most go on from the middle of a rollout."""
    sequences: list[tuple[list[int], list[int], list[float]]] = []
    prompt = [chance.randrange(VOCAB) for _ in range(21)]
    for seed in range(10):
        params = SamplingParams(max_tokens=5 + 7 * (seed % 5), seed=seed, ignore_eos=True)
        (output,) = engine.generate([prompt], [params])
        tokens, n = prompt + output.ids, len(prompt)
        sequences.append((tokens, [0] * n + [1] * len(output.ids), [0.0] * n + output.logps))
        earlier = chance.choice(sequences)[0]
        kept = chance.randint(15, len(earlier))
        prompt = earlier[:kept] + [chance.randrange(VOCAB) for _ in range(chance.choice((1, 4)))]
    return [
        Sample(tokens=tokens, loss_mask=mask, fields={"rollout": logps}, group="g")
        for tokens, mask, logps in sequences
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_trainers_log_probs_of_a_deep_tree_are_the_rollout_engines(dtype: str) -> None:
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    config = ModelConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    model = Transformer(config, torch_dtype)
    model.init_weights(seed=0, std=0.2)
    limits = InferConfig(num_blocks=100, max_batch_tokens=256, max_num_seqs=8)
    samples = sampled_tree(LLMEngine(model, limits), random.Random(0))
    (micro,) = make_micro_batches(samples, 10_000, share_prefix=True)
    depth: list[int] = []
    for parent in micro.prefix_of_S or []:
        depth.append(depth[parent] + 1 if parent >= 0 else 0)
    assert max(depth) > 2 and micro.num_rows < 0.7 * len(micro.target_ids_T)
    for budget in (10_000, 120):
        trainer = Engine(
            model,
            EngineConfig(dtype=dtype, share_prefix=True, micro_batch_tokens=budget),  # type: ignore[arg-type]
        )
        for sample, logps in zip(
            samples, trainer.forward_logprobs(samples, only_masked=True), strict=True
        ):
            assert logps.tolist() == sample.fields["rollout"]


def test_a_warm_start_step_reads_what_its_traces_share_once_and_has_the_gradients_of_all() -> None:
    """Traces of different tasks begin with the same system message, which lists the tools."""
    chance = random.Random(3)

    def some(count: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(count)]

    tools, traces = some(90), []
    for number in range(8):
        task, said = some(6), some(5 + number)
        tokens = tools + task + said
        mask = [0] * (len(tokens) - len(said)) + [1] * len(said)
        nothing = [0.0] * len(tokens)
        traces.append(
            Rollout(
                task_id=str(number),
                group_id=f"teacher-{number}",
                rollout_id=f"teacher-{number}",
                tokens=tokens,
                loss_mask=mask,
                logps=nothing,
                versions=[0] * len(tokens),
            )
        )
    samples = sft_samples(traces)
    (micro,) = make_micro_batches(samples, 10_000, share_prefix=True)
    own = sum(len(sample.tokens) - 1 - len(tools) for sample in samples)
    assert micro.num_rows == len(tools) + own, "each trace brings its own tokens alone"
    gradients = []
    for share in (False, True):
        model = make_model()
        config = EngineConfig(dtype="fp64", max_grad_norm=0.0, share_prefix=share)
        Engine(model, config).train_step(samples, sft_loss, num_loss_tokens)
        gradients.append({name: p.main_grad for name, p in model.named_parameters()})
    for parameter, gradient in gradients[0].items():
        error = float((gradients[1][parameter] - gradient).norm() / gradient.norm())
        assert error < 1e-10, (parameter, error)
