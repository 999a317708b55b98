"""The pieces of parallel training: split vocabulary, ring attention, traffic, memory, refusals.

The worked numbers of docs/parallelism.md are computed here, in tests of the same names.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import parallel_cases
import parallel_part_cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_cases import VOCAB, Case
from pool import WorkerPool

from nanoengine.config import EngineConfig
from nanoengine.formats import hf
from nanoengine.model.transformer import Transformer
from nanoengine.packing import make_micro_batches
from nanoengine.parallel.expert_parallel import ExpertParallel
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh, wire_bytes
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.sft.chats import num_loss_tokens
from nanoengine.state.whole_engine import Engine

DOCS = Path(__file__).resolve().parents[3] / "docs" / "parallelism.md"
HIDDEN, LAYERS, KV_WIDTH = 48, 3, 32  # of the model in parallel_cases.py
BYTES = 8  # fp64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_split_vocabulary_logp_entropy_and_gradients_are_those_of_torch(
    pool: WorkerPool, world: int
) -> None:
    num_rows = 150  # three chunks of rows, see the worker
    hidden, weight = normal(num_rows, HIDDEN), normal(VOCAB, HIDDEN, seed=1) / 4
    ids = torch.arange(num_rows) * 10 % VOCAB
    results = pool.run(
        world, parallel_part_cases.logprobs_over_the_vocabulary, hidden, weight, ids, 0.7
    )
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp_all = torch.log_softmax(x @ w.t() / 0.7, -1)
    logp = logp_all.gather(1, ids.unsqueeze(1)).squeeze(1)
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    slope = torch.arange(1.0, num_rows + 1, dtype=torch.float64)
    (logp * slope + entropy * slope.flip(0)).sum().backward()
    loss = F.cross_entropy(hidden @ weight.t(), ids, reduction="none")
    assert x.grad is not None and w.grad is not None
    for found in results:
        for mine, true in zip(found[:4], (logp, entropy, loss, x.grad), strict=True):
            torch.testing.assert_close(mine, true.detach(), rtol=1e-10, atol=1e-12)
    dweight = torch.cat([found[4] for found in results])
    torch.testing.assert_close(dweight, w.grad, rtol=1e-10, atol=1e-12)


def masked_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """One sequence: the query at p sees keys j with p - window < j <= p."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    at = torch.arange(len(q))
    seen = (at[:, None] - window < at) & (at <= at[:, None])
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))


# Runs of 275 (more than a block of queries) and 138 rows, and some shorter than the ranks. Windows
# end inside a run, just before, at and behind its first key, and reach over several.
RING_CASES = [
    *((2, w) for w in (None, 1, 5, 100, 274, 275, 276, 700, 5000)),
    *((4, w) for w in (None, 1, 138, 139, 600)),
]


@pytest.mark.parametrize(("world", "window"), RING_CASES)
def test_ring_attention_is_attention_over_packed_sequences(
    pool: WorkerPool, world: int, window: int | None
) -> None:
    lengths = [1100, 37, 8, 3, 1]
    total, heads, kv_heads, width = sum(lengths), 4, 2, 8
    q, do = normal(total, heads, width), normal(total, heads, width, seed=3)
    k, v = normal(total, kv_heads, width, seed=1), normal(total, kv_heads, width, seed=2)
    options = {} if window is None else {"window": window, "scale": 0.3}
    results = pool.run(world, parallel_part_cases.ring_attention, lengths, q, k, v, do, options)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    mask = options.get("scale", width**-0.5), int(options.get("window", total))
    o = torch.cat([masked_softmax(*part, *mask) for part in parts])
    o.backward(do)
    true = [o.detach(), *(x.grad for x in inputs)]
    found = [torch.full_like(x, float("nan")) for x in true if x is not None]
    for rows, values, _ in results:
        for whole, part in zip(found, values, strict=True):
            whole[rows] = part
    for mine, expected in zip(found, true, strict=True):
        assert expected is not None
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    longest = max(len(rows) for rows, _, _ in results)
    assert longest <= total / world + 2 * len(lengths)  # even: each run is off by less than one


# -- traffic -----------------------------------------------------------------------------------


def one_step(pool: WorkerPool, case: Case) -> list[parallel_cases.Result]:
    by_rank = pool.run(case.layout.world, parallel_cases.on_rank, [case])
    return [results[0] for results in by_rank]


def rows_and_predictions(hand: list[int] | None = None) -> tuple[int, int]:
    """Rows the model reads, and those that reach the head, of a batch in one micro-batch."""
    samples = parallel_cases.make_samples()
    taken = [samples[i] for i in (range(len(samples)) if hand is None else hand)]
    return sum(len(s.tokens) - 1 for s in taken), sum(sum(s.loss_mask) for s in taken)


def parameters() -> int:
    return sum(p.numel() for p in parallel_cases.make_model(Case()).parameters())


def in_docs(*numbers: float) -> None:
    """Each number stands in docs/parallelism.md, with its thousands separated by spaces."""
    text = DOCS.read_text()
    for number in numbers:
        assert f"{number:,.0f}".replace(",", " ") in text, f"{number:,.0f} is not in {DOCS.name}"


def test_worked_tensor_parallel(pool: WorkerPool) -> None:
    """Two all-reduces a layer forward, two backward, one for the embedding, one for the head."""
    results = one_step(pool, Case(layout=Layout(tp=2), budget=1000))
    rows, picked = rows_and_predictions()
    activations = rows * HIDDEN * BYTES
    head = picked * BYTES * (1 + 3)  # maximum; sum of exponentials, target's logit, entropy
    calls = 4 * LAYERS + 2
    expected = (calls + 2 + 1, calls * activations + head + 8)  # 8: the norm's square
    assert all(result.traffic == {("all_reduce", "tp"): expected} for result in results)
    in_docs(rows, picked, activations, calls, head, expected[1])
    in_docs(wire_bytes("all_reduce", activations, 2))


def test_worked_sequence_parallel(pool: WorkerPool) -> None:
    """The same bytes on the wire: an all-reduce is a reduce-scatter and an all-gather."""
    results = one_step(pool, Case(layout=Layout(tp=2), sequence_parallel=True, budget=1000))
    rows, picked = rows_and_predictions()
    padded = -(-rows // 2) * 2 * HIDDEN * BYTES
    norms = (2 * LAYERS + 1 + LAYERS) * HIDDEN  # and the output biases
    calls = 4 * LAYERS + 2
    for result in results:
        assert result.traffic["all_gather", "tp"] == (calls, calls * padded)
        assert result.traffic["reduce_scatter", "tp"] == (calls, calls * padded)
        num_bytes = result.traffic["all_reduce", "tp"][1]
        assert num_bytes == norms * BYTES + picked * BYTES * 4 + 8
    in_docs(padded, norms * BYTES)
    whole = wire_bytes("all_reduce", padded, 2)
    parts = wire_bytes("all_gather", padded, 2) + wire_bytes("reduce_scatter", padded, 2)
    assert whole == parts


def test_worked_data_parallel(pool: WorkerPool) -> None:
    """One all-reduce of the gradient a step, however many micro-batches."""
    for budget in (60, 1000):
        results = one_step(pool, Case(layout=Layout(dp=2), budget=budget, bucket_bytes=200_000))
        for result in results:
            calls, num_bytes = result.traffic["all_reduce", "dp"]
            padding = num_bytes - parameters() * BYTES - 16  # 16: the weight of the batch, the norm
            assert 0 <= padding < 64 * BYTES * 40  # parameters start on cache lines
            assert result.num_early >= calls - 3  # all but the last left during backward
    in_docs(parameters(), parameters() * BYTES)


def test_worked_zero(pool: WorkerPool) -> None:
    """Bytes of a rank's whole tensors between steps, ZeRO 0 to 3 on two ranks, in fp32."""
    for levels in pool.run(2, parallel_part_cases.memory_of_each_level):
        size = levels[0]["weights"]
        assert [level["weights"] for level in levels] == pytest.approx([size, size, size, 0], 0.02)
        assert [level["moments"] / size for level in levels] == pytest.approx([2, 1, 1, 1], 0.02)
        gradients = [level["gradients"] for level in levels]
        assert gradients == pytest.approx([size, size, 0, 0], 0.02)
        assert levels[3]["layers"] == LAYERS
        assert levels[3]["peak_weights"] <= 3  # running, prefetched, and the last one's reduction
    assert [16, 12, 10, 8] == [4 + 4 + 8, 4 + 4 + 4, 4 + 2 + 4, 2 + 2 + 4]
    in_docs(16, 12, 10, 8)


def test_worked_context_parallel(pool: WorkerPool) -> None:
    """Keys and values travel cp - 1 hops forward and again backward, their gradients cp hops."""
    results = one_step(pool, Case(layout=Layout(cp=2), budget=1000))
    rows, _ = rows_and_predictions()
    whole = 2 * rows * KV_WIDTH * BYTES  # keys and values of all tokens, one layer
    sent = sum(result.traffic["send", "cp"][1] for result in results)
    received = sum(result.traffic["recv", "cp"][1] for result in results)
    assert sent == received == LAYERS * whole * (1 + 1 + 2)
    in_docs(whole, sent)


def test_worked_expert_parallel(pool: WorkerPool) -> None:
    """A row for each choice of each token, four ways in each of two layers, wherever it goes."""
    case = Case(layout=Layout(ep=2), family="qwen3_moe", budget=1000)
    results = one_step(pool, case)
    rows, _ = rows_and_predictions()
    slots = rows * parallel_cases.EXPERTS["num_experts_per_token"]
    layers = LAYERS - len(parallel_cases.EXPERTS["dense_layers"])
    travelling = slots * HIDDEN * BYTES
    total = layers * (4 * travelling + slots * 4)  # and the number of each row's expert, int32
    assert sum(result.traffic["all_to_all", "ep"][1] for result in results) == total
    assert all(result.traffic["all_to_all", "ep"][0] == 5 * layers for result in results)
    in_docs(slots, travelling, total)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_log_probs_have_the_same_bits_wherever_the_experts_are(
    pool: WorkerPool, dtype: str
) -> None:
    case = Case(layout=Layout(ep=2), family="qwen3_moe", dtype=dtype)
    alone = reference_logps(replace(case, layout=Layout()))
    for logps in pool.run(2, parallel_part_cases.logps_on_a_mesh, case):
        for index, values in logps.items():
            assert torch.equal(values, alone[index])


def reference_logps(case: Case) -> dict[int, torch.Tensor]:
    return parallel_cases.run(case).logps


def test_experts_that_cannot_be_split_are_refused() -> None:
    def mesh(**axes: int) -> Mesh:
        return Mesh(Layout(**axes), 0, dist.HashStore())

    moe = parallel_cases.model_config(Case(family="qwen3_moe"))
    with pytest.raises(ValueError, match="ep=2: the model has no experts to split; use dp=2"):
        ExpertParallel.of(mesh(ep=2), parallel_cases.model_config(Case()))
    with pytest.raises(ValueError, match="ep=3: must divide num_experts=8"):
        ExpertParallel.of(mesh(ep=3), moe)
    with pytest.raises(ValueError, match="ep=2 with tp=2: experts are split over one of the two"):
        ExpertParallel.of(mesh(ep=2, tp=2), moe)
    with pytest.raises(ValueError, match="experts are not split over this mesh"):
        Engine(Transformer(moe), EngineConfig(), mesh(ep=2))
    with pytest.raises(ValueError, match="tp=32: must divide num_heads"):
        TensorParallel.of(mesh(tp=32), moe)
    with pytest.raises(ValueError, match="tp=4: must divide moe_intermediate_size=18"):
        TensorParallel.of(mesh(tp=4), replace(moe, moe_intermediate_size=18))


def test_a_rank_leaves_out_the_experts_of_others_and_no_unknown_ones() -> None:
    config = parallel_cases.model_config(Case(family="qwen3_moe"))
    state = dict(hf.export_state(parallel_cases.make_model(Case(family="qwen3_moe"))))
    experts = ExpertParallel.of(Mesh(Layout(ep=2), 1, dist.HashStore()), config)
    model = Transformer(config, experts=experts)
    hf.load_state(model, state.items())
    for name, view in hf.hf_views(model).items():  # experts 4 to 7
        assert torch.equal(view, state[name].float())
    ninth = {hf.renumber_expert(name, 8): t for name, t in state.items() if ".experts.0." in name}
    with pytest.raises(ValueError, match=r"unknown: model\.layers\.0\.mlp\.experts\.8\."):
        hf.load_state(model, (state | ninth).items())


# -- state, memory, errors ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_level_of_zero_gives_the_same_bits_on_two_ranks(pool: WorkerPool, dtype: str) -> None:
    """Of one micro-batch: of several, ZeRO-2 adds up ranks first and micro-batches then."""
    for levels in pool.run(2, parallel_part_cases.weights_after_two_steps, dtype):
        for level in levels[1:]:
            assert all(torch.equal(level[name], tensor) for name, tensor in levels[0].items())


@pytest.mark.parametrize(
    "case",
    [
        Case(layout=Layout(tp=2), family="qwen3", tied=False, dtype="fp32"),
        Case(layout=Layout(tp=2), family="phi3", tied=False, dtype="fp32"),
        Case(layout=Layout(dp=2), zero=3, dtype="fp32"),
        Case(layout=Layout(dp=2), zero=3, dtype="bf16"),
        Case(layout=Layout(dp=2), zero=1, dtype="bf16"),
    ],
    ids=["tp2", "tp2-phi3", "zero3", "zero3-bf16", "zero1-bf16"],
)
def test_exported_weights_load_anywhere_and_score_the_same(pool: WorkerPool, case: Case) -> None:
    alone = Engine(
        parallel_cases.make_model(case),
        EngineConfig(dtype=case.dtype, lr=1e-2, micro_batch_tokens=case.budget),  # type: ignore[arg-type]
    )
    for state, logps in pool.run(2, parallel_part_cases.export_and_load, case):
        alone.load_weights(state.items())  # strict: every name, every shape
        expected = alone.forward_logprobs(parallel_cases.make_samples())
        for mine, true in zip(logps, expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=0, atol=2e-5)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_sharded_optimizer_comes_back_from_offload_with_the_same_bits(
    pool: WorkerPool, zero: int
) -> None:
    case = Case(layout=Layout(dp=2), zero=zero, dtype="bf16")
    runs = [
        pool.run(2, parallel_part_cases.offloaded_run, case, parks)[0] for parks in (False, True)
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("zero", [0, 1])
def test_an_expert_is_summed_over_its_own_replicas_and_counted_once(
    pool: WorkerPool, zero: int
) -> None:
    """Rank 2·dp + ep has a gradient of rank + 1 for the shared and ten times that for its expert:
    1 + 2 + 3 + 4 shared, 10 + 30 for expert 0, 20 + 40 for expert 1."""
    found: dict[str, list[float]] = {}
    for rank, (norm, gradients) in enumerate(pool.run(4, parallel_part_cases.experts_step, zero)):
        assert norm == pytest.approx(math.sqrt(3 * (10**2 + 40**2 + 60**2)))
        for name, values in gradients.items():
            key = f"expert {rank % 2}" if name == "expert" else name
            assert found.setdefault(key, values) == values
    assert found == {"shared": [10.0] * 3, "expert 0": [40.0] * 3, "expert 1": [60.0] * 3}


def test_shared_prefixes_also_work_on_split_matrices(pool: WorkerPool) -> None:
    case = Case(family="qwen3")
    alone = Engine(parallel_cases.make_model(case), EngineConfig(dtype="fp64", share_prefix=True))
    expected = alone.forward_logprobs(parallel_part_cases.a_group(), temperature=0.7)
    for logps in pool.run(2, parallel_part_cases.shared_prefix_logps):
        for mine, true in zip(logps, expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=0, atol=1e-6)


def test_a_split_head_in_fp32_is_the_exact_product_of_bf16_hidden_states(pool: WorkerPool) -> None:
    for error in pool.run(2, parallel_part_cases.fp32_head):
        assert error < 1e-5


def test_an_infinite_loss_on_one_rank_stops_every_rank_before_the_update(pool: WorkerPool) -> None:
    for zero in (1, 3):
        case = Case(layout=Layout(dp=2), zero=zero)
        for message in pool.run(2, parallel_part_cases.one_rank_has_an_infinite_loss, case):
            assert "weights and moments are untouched" in message


def test_what_cannot_work_is_refused_with_the_reason(pool: WorkerPool) -> None:
    patterns = [
        "tp=2: must divide num_kv_heads=3",
        "not split over this mesh",
        "cp > 1",
        "weight_fn gave 0.0",
    ]
    for messages in pool.run(2, parallel_part_cases.refusals):
        for message, pattern in zip(messages, patterns, strict=True):
            assert pattern in message


def test_one_process_with_a_mesh_has_the_bits_of_one_without() -> None:
    case = Case(dtype="fp32", steps=2, max_grad_norm=0.5)
    plain = parallel_cases.run(case)
    engine_mesh = parallel_cases.run(case, parallel_cases.Mesh(Layout()))
    assert plain.steps == engine_mesh.steps
    for a, b in zip(plain.owned, engine_mesh.owned, strict=True):
        assert torch.equal(a.gradient, b.gradient) and torch.equal(a.master, b.master)


def test_the_micro_batches_of_a_batch_hold_its_trained_tokens() -> None:
    samples = parallel_cases.make_samples()
    micros = make_micro_batches(samples, 90)
    assert len(micros) > 2  # the parity tests accumulate
    assert sum(float(m.loss_mask_T.sum()) for m in micros) == num_loss_tokens(samples)
    assert any(not float(m.loss_mask_T.sum()) for m in make_micro_batches(samples, 1))
    assert math.isclose(rows_and_predictions()[1], num_loss_tokens(samples))
