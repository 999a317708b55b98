"""What the ranks do in test_parallel_parts.py."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import parallel_cases
import torch
from parallel_cases import Case
from pool import Rank
from torch import Tensor, nn

from nanoengine.config import AdamWConfig, EngineConfig
from nanoengine.engine import NonFiniteLoss
from nanoengine.model.attention import PackedContext
from nanoengine.packing import Sample, make_micro_batches
from nanoengine.parallel import tensor_parallel
from nanoengine.parallel.context_parallel import ContextSplit
from nanoengine.parallel.layout import DATA_AXES, Layout
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.sharded_adamw import ShardedAdamW
from nanoengine.parallel.tensor_parallel import TensorParallel, vocab_parallel_logprob
from nanoengine.sft.chats import num_loss_tokens
from nanoengine.state.whole_engine import Engine


def logprobs_over_the_vocabulary(
    rank: Rank, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, ...]:
    """logp, entropy, cross-entropy, d hidden, this rank's d weight, of a loss that uses both; by
    chunks of the fewest rows."""
    with mock.patch.object(tensor_parallel, "_CHUNK_ELEMENTS", 1):
        return _logprobs_over_the_vocabulary(rank, hidden, weight, ids, temperature)


def _logprobs_over_the_vocabulary(
    rank: Rank, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, ...]:
    mesh = rank.mesh(Layout(tp=rank.world))
    split = TensorParallel(mesh)
    lo, hi = split.run(len(weight))
    part = weight[lo:hi].clone().requires_grad_()
    x = hidden.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob(
        split.enter(x, len(x)),
        part,
        ids,
        split,
        len(weight),
        temperature=temperature,
        return_entropy=True,
    )
    plain = vocab_parallel_logprob(hidden, weight[lo:hi], ids, split, len(weight))
    assert isinstance(plain, Tensor), "no entropy was asked for"
    loss = -plain
    slope = torch.arange(1.0, len(ids) + 1, dtype=hidden.dtype)
    (logp * slope + entropy * slope.flip(0)).sum().backward()
    assert x.grad is not None and part.grad is not None
    return logp.detach(), entropy.detach(), loss, x.grad, part.grad


def ring_attention(
    rank: Rank,
    lengths: list[int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    options: dict[str, Any],
) -> tuple[list[int], list[Tensor], dict[Any, Any]]:
    """This rank's rows; its o, dq, dk, dv; the traffic. `options` are those of `attend`."""
    mesh = rank.mesh(Layout(cp=rank.world))
    samples = [Sample(tokens=[0] * (n + 1), loss_mask=[0] * (n + 1)) for n in lengths]
    (micro,) = make_micro_batches(samples, sum(lengths))
    assert [b - a for a, b in pairwise(micro.cu_seqlens.tolist())] == lengths
    split = ContextSplit(micro, mesh)
    mine = [split.take(x).requires_grad_() for x in (q, k, v)]
    o = split.attend(0, *mine, **options)
    o.backward(split.take(do))
    whole = split.gather(o[:, 0, 0].detach())
    assert torch.equal(split.take(whole), o[:, 0, 0])
    grads = [x.grad for x in mine if x.grad is not None]
    traffic = {key: (t.calls, t.bytes) for key, t in mesh.traffic.items()}
    return split.rows[split.rank].tolist(), [o.detach(), *grads], traffic


def make_engine(rank: Rank, case: Case, **settings: Any) -> Engine:
    mesh = rank.mesh(case.layout)
    config = parallel_cases.model_config(case)
    split = TensorParallel.of(mesh, config, sequence_parallel=case.sequence_parallel)
    model = parallel_cases.make_model(case, split)
    options = {"dtype": case.dtype, "zero": case.zero, "lr": 1e-2, **settings}
    return Engine(model, EngineConfig(micro_batch_tokens=case.budget, **options), mesh)


def hand_of(engine: Engine, seed: int = 0) -> list[Sample]:
    samples = parallel_cases.make_samples(seed)
    hands = parallel_cases.deal(samples, engine.mesh.size(DATA_AXES), "round")
    return [samples[i] for i in hands[engine.mesh.rank(DATA_AXES)]]


def train(engine: Engine, seed: int = 0) -> dict[str, float]:
    return engine.train_step(
        hand_of(engine, seed), parallel_cases.policy_loss, num_loss_tokens, entropy=True
    )


def export_and_load(rank: Rank, case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Weights after a step, exported, and loaded into a fresh engine; its log-probs."""
    engine = make_engine(rank, case)
    train(engine)
    state = {name: tensor.clone() for name, tensor in engine.export_state()}
    fresh = make_engine(rank, case)
    fresh.load_weights(state.items())
    fresh.optimizer.write_back()  # weights from masters: these were replaced too
    again = dict(fresh.export_state())
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    return state, fresh.forward_logprobs(parallel_cases.make_samples())


def weights_after_two_steps(rank: Rank, dtype: str) -> list[dict[str, Tensor]]:
    """For each level of ZeRO, in one micro-batch."""
    found = []
    for zero in range(4):
        case = Case(layout=Layout(dp=rank.world), zero=zero, dtype=dtype, budget=1000)
        engine = make_engine(rank, case, bucket_bytes=40_000, max_grad_norm=0.0)
        for seed in range(2):
            train(engine, seed)
        found.append({name: tensor.clone() for name, tensor in engine.export_state()})
    return found


def memory_of_each_level(rank: Rank) -> list[dict[str, int]]:
    """Bytes of whole weights, gradients, moments and masters between steps, and the most whole
    gradients and layers' weights at once during one."""
    found = []
    for zero in range(4):
        engine = make_engine(rank, Case(layout=Layout(dp=rank.world), zero=zero, dtype="fp32"))
        optimizer = engine.optimizer
        layers = [s for s in optimizer.states if s.bucket.layers]
        peak = {"gradients": 0, "weights": 0}

        def watch(*_: Any, layers: Any = layers, peak: Any = peak) -> None:
            gradients = sum(s.bucket.grad.untyped_storage().nbytes() > 0 for s in layers)
            weights = sum(s.weights.untyped_storage().nbytes() > 0 for s in layers)
            peak["gradients"] = max(peak["gradients"], gradients)
            peak["weights"] = max(peak["weights"], weights)

        for layer in engine.model.layers:
            layer.register_forward_hook(watch)
        for parameter in engine.model.parameters():
            parameter.register_post_accumulate_grad_hook(watch)
        train(engine)
        states = optimizer.states
        found.append(
            {
                "weights": sum(s.weights.untyped_storage().nbytes() for s in states),
                "gradients": sum(s.bucket.grad.untyped_storage().nbytes() for s in states),
                "moments": optimizer.exp_avg.nbytes + optimizer.exp_avg_sq.nbytes,
                "layers": len(layers),
                "peak_gradients": peak["gradients"],
                "peak_weights": peak["weights"],
            }
        )
    return found


def offloaded_run(rank: Rank, case: Case, parks: bool) -> dict[str, Tensor]:
    engine = make_engine(rank, case)
    for seed in range(2):
        train(engine, seed)
        if parks:
            engine.offload()
            assert engine.optimizer.exp_avg.untyped_storage().nbytes() == 0
            engine.forward_logprobs(hand_of(engine))  # still works
            try:
                train(engine)
                raise AssertionError("trained while offloaded")
            except ValueError as error:
                assert "reload" in str(error)
            engine.reload()
    return {name: tensor.clone() for name, tensor in engine.export_state()}


def one_rank_has_an_infinite_loss(rank: Rank, case: Case) -> str:
    engine = make_engine(rank, case)
    before = {name: tensor.clone() for name, tensor in engine.export_state()}

    def loss_fn(logp_T: Tensor, entropy_T: Tensor | None, micro: Any) -> Any:
        loss, sums = parallel_cases.policy_loss(logp_T, entropy_T, micro)
        return loss * (float("inf") if engine.mesh.rank() == 0 else 1.0), sums

    try:
        engine.train_step(hand_of(engine), loss_fn, num_loss_tokens, entropy=True)
    except NonFiniteLoss as error:
        assert engine.version == 0
        after = dict(engine.export_state())
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        return str(error)
    return "no error"


def logps_on_a_mesh(rank: Rank, case: Case) -> dict[int, Tensor]:
    """Of the samples of this rank, by their index."""
    return parallel_cases.run(case, rank.mesh(case.layout)).logps


class Experts(nn.Module):
    """One parameter that all ranks share, one that only ranks with the same ep coordinate do."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.ones(3))
        self.expert = nn.Parameter(torch.full((3,), 1.0 + ep))
        record_of(self.expert).is_expert = True


def experts_step(rank: Rank, zero: int) -> tuple[float, dict[str, list[float]]]:
    """The norm, and the elements of each parameter's gradient that this rank owns."""
    mesh = rank.mesh(Layout(dp=2, ep=2))
    model = Experts(mesh.rank("ep"))
    optimizer = ShardedAdamW([model], AdamWConfig(), mesh, zero=zero)
    optimizer.zero_grad()
    optimizer.start_pass(is_last=True)
    ((rank.rank + 1) * (model.shared.sum() + 10 * model.expert.sum())).backward()
    optimizer.end_pass()
    optimizer.finish_gradients()
    gradients = {entry.slot.name: part.tolist() for entry, part in optimizer.entries("grad")}
    return optimizer.grad_norm(), gradients


def fp32_head(rank: Rank) -> float:
    """The largest error of log-probs, after an update, against the product in fp64 of the bf16
    model's hidden states and its whole head."""
    engine = make_engine(rank, Case(layout=Layout(tp=rank.world), dtype="bf16"), lm_head_fp32=True)
    train(engine)
    head = dict(engine.export_state())["model.embed_tokens.weight"].double()
    worst = 0.0
    samples = parallel_cases.make_samples()
    for sample, logps in zip(samples, engine.forward_logprobs(samples), strict=True):
        ids = torch.tensor(sample.tokens)
        context = PackedContext.from_lengths([len(ids) - 1])
        with torch.no_grad():
            hidden = engine.model(ids[:-1], torch.arange(len(ids) - 1), context)
        every = torch.log_softmax(hidden.double() @ head.t(), -1)
        true = every.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
        worst = max(worst, float((logps[1:] - true).abs().max()))
    return worst


def shared_prefix_logps(rank: Rank) -> list[Tensor]:
    case = Case(layout=Layout(tp=rank.world), family="qwen3")
    engine = make_engine(rank, case, share_prefix=True)
    return engine.forward_logprobs(a_group(), temperature=0.7)


def a_group() -> list[Sample]:
    """Three completions of one prompt."""
    prompt = list(range(5, 29))
    ends = [[100, 7], [3, 3, 3, 3], [50]]
    return [
        Sample(tokens=prompt + end, loss_mask=[0] * len(prompt) + [1] * len(end), group="g")
        for end in ends
    ]


def refusals(rank: Rank) -> list[str]:
    """The messages of what a user may get wrong."""
    mesh = rank.mesh(Layout(tp=2))
    case = Case(layout=Layout(tp=2))
    narrow = parallel_cases.model_config(case)
    object.__setattr__(narrow, "num_kv_heads", 3)
    attempts: list[Any] = [
        lambda: TensorParallel.of(mesh, narrow),
        lambda: Engine(parallel_cases.make_model(case), EngineConfig(dtype="fp64"), mesh),
        lambda: Engine(
            parallel_cases.make_model(case),
            EngineConfig(share_prefix=True),
            rank.mesh(Layout(cp=2)),
        ),
        lambda: make_engine(rank, case).train_step(
            hand_of(make_engine(rank, case)), parallel_cases.policy_loss, lambda samples: 0.0
        ),
    ]
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    return messages
