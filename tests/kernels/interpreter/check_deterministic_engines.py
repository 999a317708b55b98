"""What `deterministic` rests on, on a GPU: Triton's kernels, interpreted, give a token the same
bits in the trainer's packed pass, in prefill, in chunks of it and in decoding.

The interpreter multiplies tiles with NumPy, whose order of a sum depends on the tile's shape; a
GPU's units add a tile's products in the order of k for each element alone. `in_order` makes the
interpreter do that. What is left to a GPU (kernels/gpu) is whether its tensor cores do.
"""

import sys

import pytest
import torch
from shim import as_fp32
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels import flash_attn_varlen, linear, linear_logprob, logits_logprob, paged_attention
from kernels.triton.grouped_gemm import rows_a_tile
from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.state.whole_engine import Engine
from nanoinfer import model_runner
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.gpu.device_sampler import device_sampling
from nanoinfer.options.full_sampling import FullSamplingBatch
from nanoinfer.params import SamplingParams
from nanoinfer.variants import full_runner

DTYPES = [torch.float32, torch.bfloat16]
BLOCK = 16


def in_order(self, a, b, c, precision, imprecise):
    """`tl.dot` as a sum in the order of k, element by element."""
    left, right, total = as_fp32(a).data, as_fp32(b).data, c.data.copy()
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k : k + 1]
    return TensorHandle(total, c.dtype.scalar)


@pytest.fixture(autouse=True)
def dots_in_order(monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", in_order)


def paged(q, k, v, lengths, num_new, **options):
    """o of the last `num_new[i]` queries of each sequence, over a cache of shuffled blocks."""
    num_blocks = [-(-n // BLOCK) for n in lengths]
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.zeros(len(lengths), max(num_blocks), dtype=torch.int32)
    caches = [torch.full((len(order), BLOCK, *k.shape[1:]), torch.nan).to(k.dtype) for _ in "kv"]
    queries, first = [], 0
    for i, length in enumerate(lengths):
        for j in range(num_blocks[i]):
            tables[i, j] = order.pop()
            rows = slice(first + j * BLOCK, min(first + (j + 1) * BLOCK, first + length))
            for cache, x in zip(caches, (k, v), strict=True):
                cache[tables[i, j], : rows.stop - rows.start] = x[rows]
        first += length
        queries.append(q[first - num_new[i] : first])
    starts = torch.tensor([0, *torch.tensor(num_new).cumsum(0).tolist()], dtype=torch.int32)
    return paged_attention(
        torch.cat(queries), *caches, starts, torch.tensor(lengths, dtype=torch.int32), tables,
        max_query_len=max(num_new), max_seq_len=max(lengths), backend="triton",
        batch_invariant=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 1, 64), (3, 3, 40), (2, 1, 128), (1, 1, 256)])
def test_a_query_has_the_same_bits_in_training_prefill_chunks_and_decoding(heads, dtype):
    draw = torch.Generator().manual_seed(sum(heads))
    num_heads, num_kv, head_dim = heads
    lengths = torch.randint(1, 140, (3,), generator=draw).tolist()
    total = sum(lengths)
    q = torch.randn(total, num_heads, head_dim, generator=draw).to(dtype)
    k, v = (torch.randn(total, num_kv, head_dim, generator=draw).to(dtype) for _ in "kv")
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    limits = (max(lengths), max(lengths))
    packed = flash_attn_varlen(q, k, v, cu, cu, *limits, batch_invariant=True, backend="triton")
    chunk = [min(n, 1 + 37 * i) for i, n in enumerate(lengths)]
    for num_new in (lengths, chunk, [1] * len(lengths)):
        found = paged(q, k, v, lengths, num_new)
        ends = zip(cu[1:].tolist(), num_new, strict=True)
        expected = torch.cat([packed[end - n : end] for end, n in ends])
        assert torch.equal(found, expected), num_new
    alone = paged(q[:1], k[:1], v[:1], [1], [1])
    assert torch.equal(alone, packed[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_linear_and_of_the_output_head_do_not_depend_on_the_others(dtype):
    draw = torch.Generator().manual_seed(3)
    x, w = torch.randn(150, 70, generator=draw).to(dtype), torch.randn(203, 70, generator=draw)
    w, bias, ids = w.to(dtype), torch.randn(203).to(dtype), torch.randint(0, 203, (150,))
    options = {"batch_invariant": True, "backend": "triton"}
    whole = linear(x, w, bias, **options)
    logps = linear_logprob(x, w, ids, temperature=0.7, chunk_size=64, **options)
    for rows in (slice(0, 1), slice(149, 150), slice(3, 20), slice(60, 140)):
        assert torch.equal(linear(x[rows], w, bias, **options), whole[rows])
        mine = linear_logprob(x[rows], w, ids[rows], temperature=0.7, **options)
        assert torch.equal(mine, logps[rows])
        logits = linear(x[rows], w, **options)
        assert torch.equal(logits_logprob(logits, ids[rows], 0.7, backend="triton"), logps[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tile_of_an_expert_does_not_depend_on_the_number_of_rows(dtype):
    """Its M alone depends on it, and of what a tensor core does with that this test can say
    nothing: so it must not change."""
    assert rows_a_tile(8, 8, dtype) != rows_a_tile(10**6, 8, dtype)
    assert rows_a_tile(8, 8, dtype, True) == rows_a_tile(10**6, 8, dtype, True)


_MOE = {"num_experts": 4, "num_experts_per_token": 2, "norm_topk_prob": True}
FAMILIES = {
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {**_MOE, "qk_norm": True, "moe_intermediate_size": 16},
    "gpt_oss": {
        **_MOE,
        "moe_intermediate_size": 48,
        "attention_bias": True,
        "attention_output_bias": True,
        "sliding_window": 9,
        "window_layers": (0,),
    },
}


def make_model(family: str, dtype: torch.dtype) -> Transformer:
    config = ModelConfig(
        model_type=family,
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **FAMILIES[family],
    )
    model = Transformer(config, dtype)
    model.init_weights(5, std=0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))
    model.repack()
    return model


@pytest.fixture
def on_triton(monkeypatch):
    """Both engines take the paths of a GPU, over Triton's interpreter."""
    ours = [module for name, module in sys.modules.items() if name.startswith("kernels.")]
    for module in ours:
        for switch, value in (("use_triton", True), ("use_native", False)):
            if hasattr(module, switch):
                monkeypatch.setattr(module, switch, lambda *_, value=value, **__: value)

    def sent(self, step):
        sampling = FullSamplingBatch.of(step.sampling)
        drawing = device_sampling(sampling, 67, rescores_all=self._is_invariant)
        return full_runner.FullStep(**vars(step), drawing=drawing)

    monkeypatch.setattr(full_runner.FullRunner, "sent", sent)
    monkeypatch.setattr(model_runner, "make_decoder", lambda *_: None)


@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        (torch.float32, "qwen3"),
        (torch.bfloat16, "qwen3"),
        (torch.float32, "qwen3_moe"),
        (torch.float32, "gpt_oss"),
        (torch.bfloat16, "gpt_oss"),
    ],
)
def test_rollout_log_probs_equal_training_log_probs_bit_for_bit(on_triton, dtype, family):
    """Prompts of odd lengths, prefilled in chunks beside others that decode."""
    model = make_model(family, dtype)
    sizes = {"num_blocks": 40, "max_batch_tokens": 24, "max_num_seqs": 4}
    engine = LLMEngine(model, InferConfig(**sizes, deterministic=True))
    prompts = [[(7 * i + j) % 67 for j in range(n)] for i, n in enumerate((3, 41, 18))]
    each = [
        SamplingParams(max_tokens=n, temperature=0.7, seed=n, ignore_eos=True, prompt_logps=True)
        for n in (7, 3, 5)
    ]
    outputs = engine.generate(prompts, each)
    samples = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = [*prompt, *output.ids]
        samples.append(Sample(tokens=tokens, loss_mask=[0, *[1] * (len(tokens) - 1)]))
    name = "fp32" if dtype == torch.float32 else "bf16"
    trainer = Engine(model, EngineConfig(dtype=name, micro_batch_tokens=70, deterministic=True))
    trained = trainer.forward_logprobs(samples, temperature=0.7)
    for prompt, output, logps in zip(prompts, outputs, trained, strict=True):
        assert output.logps == logps[len(prompt) :].tolist()
        assert output.prompt_logps[-len(prompt) + 1 :] == logps[1 : len(prompt)].tolist()
