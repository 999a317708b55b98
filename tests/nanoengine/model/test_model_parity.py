"""The model computes what transformers computes: tokens, logits, gradients, in every family."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILY_SHAPES, MOE_SHAPES, SHAPES, save_reference
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kernels import linear_logprob, logits_logprob
from nanoengine.formats.hf import hf_views, load_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.transformer import Transformer

ALL_SHAPES = [*SHAPES, *MOE_SHAPES, *FAMILY_SHAPES]


def packed_hidden(model: Transformer, sequences: Sequence[Tensor], **options: bool) -> Tensor:
    lengths = [len(ids) for ids in sequences]
    context = PackedContext.from_lengths(lengths)
    return model(torch.cat(list(sequences)), packed_positions(lengths), context, **options)


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths]


def greedy(model: Transformer, prompts: Sequence[Tensor], num_tokens: int) -> list[list[int]]:
    """Decode by running the whole packed batch again for every token."""
    sequences = list(prompts)
    for _ in range(num_tokens):
        lengths = torch.tensor([len(ids) for ids in sequences])
        last = packed_hidden(model, sequences)[lengths.cumsum(0) - 1]
        tokens = model.logits(last).argmax(-1)
        sequences = [
            torch.cat([ids, token[None]]) for ids, token in zip(sequences, tokens, strict=True)
        ]
    return [ids[len(p) :].tolist() for ids, p in zip(sequences, prompts, strict=True)]


def greedy_reference(
    reference: PreTrainedModel, prompts: Sequence[Tensor], num_tokens: int
) -> list[list[int]]:
    """transformers' cached decoding of a left-padded batch."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    width = int(lengths.max())
    padded = torch.stack([nn.functional.pad(ids, (width - len(ids), 0)) for ids in prompts])
    out = reference.generate(
        padded,
        attention_mask=(torch.arange(width) >= width - lengths[:, None]).long(),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return out[:, width:].tolist()


class ExactNorm(nn.Module):
    """transformers computes norms in fp32 even in an fp64 model; this follows the dtype."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.weight = old.weight
        self.eps = old.eps if hasattr(old, "eps") else old.variance_epsilon
        self.offset = 1.0 if type(old).__name__.startswith("Gemma") else 0.0

    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * rstd * (self.offset + self.weight)


def exact_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if child.__class__.__name__.endswith("RMSNorm"):
            setattr(module, name, ExactNorm(child))
        else:
            exact_norms(child)


def exact_routers(module: nn.Module) -> None:
    """transformers takes the softmax of the router in fp32 whatever the model's dtype."""

    class Router(nn.Module):
        def __init__(self, old: nn.Module) -> None:
            super().__init__()
            self.weight, self.k, self.renormalize = old.weight, old.top_k, old.norm_topk_prob

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = x @ self.weight.T
            weights, ids = logits.softmax(-1).topk(self.k)
            if self.renormalize:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, ids

    for name, child in module.named_children():
        if hasattr(child, "norm_topk_prob"):
            setattr(module, name, Router(child))
        else:
            exact_routers(child)


def load_fp64_reference(folder: Path) -> PreTrainedModel:
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    exact_norms(reference)
    exact_routers(reference)
    table = reference.model.embed_tokens
    if hasattr(table, "embed_scale"):
        table.embed_scale = torch.tensor(table.scalar_embed_scale, dtype=torch.float64)
    return reference


@pytest.mark.parametrize("shape", ALL_SHAPES)
@torch.inference_mode()
def test_greedy_tokens_equal_transformers(shape: str, tmp_path: Path) -> None:
    reference = save_reference(shape, tmp_path)
    prompts = random_sequences(211, [1, 7, 23, 40])
    ours = greedy(load_model(tmp_path), prompts, 24)
    assert ours == greedy_reference(reference, prompts, 24)


@pytest.mark.parametrize("shape", ALL_SHAPES)
@torch.inference_mode()
def test_fp32_logits_are_as_exact_as_transformers(shape: str, tmp_path: Path) -> None:
    reference = save_reference(shape, tmp_path)
    exact = load_fp64_reference(tmp_path)
    model, model64 = load_model(tmp_path), load_model(tmp_path, torch.float64)
    ids = random_sequences(211, [150])[0]
    truth = exact(ids[None]).logits[0]
    theirs = (reference(ids[None]).logits[0] - truth).abs()
    ours = (model.logits(packed_hidden(model, [ids])) - truth).abs()
    assert ours.max() <= 2 * theirs.max()
    assert ours.square().mean() <= 4 * theirs.square().mean()
    assert (model64.logits(packed_hidden(model64, [ids])) - truth).abs().max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    ["llama-gqa-tied", "llama3-rope", "qwen2-tied", "qwen3-bias", "qwen3-moe", *FAMILY_SHAPES],
)
@torch.inference_mode()
def test_packed_batch_equals_each_sequence_alone_bit_for_bit(
    shape: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_reference(shape, tmp_path)
    model = load_model(tmp_path, dtype)
    lengths = [1, 2, 3, 17, 16, 64, 129, 5, 200, 33]
    sequences = random_sequences(211, lengths)
    together = packed_hidden(model, sequences).split(lengths)
    for ids, hidden in zip(sequences, together, strict=True):
        alone = packed_hidden(model, [ids])
        assert torch.equal(hidden, alone)
        assert torch.equal(model.logits(hidden), model.logits(alone))


def summed_logps(model: Transformer, sequences: Sequence[Tensor], **options: bool) -> Tensor:
    hidden = packed_hidden(model, sequences, **options)
    lengths = [len(ids) for ids in sequences]
    rows = torch.cat([h[:-1] for h in hidden.split(lengths)])
    targets = torch.cat([ids[1:] for ids in sequences])
    return model.logprobs(rows, targets)[0].sum()


def reference_gradients(reference: PreTrainedModel, sequences: Sequence[Tensor]) -> dict:
    for ids in sequences:
        logps = torch.log_softmax(reference(ids[None]).logits[0, :-1], -1)
        logps.gather(1, ids[1:, None]).sum().backward()
    grads = {name: p.grad for name, p in reference.named_parameters()}
    if reference.config.model_type == "gpt_oss":  # its files have the stacks
        return grads
    return {k: v for name, grad in grads.items() for k, v in by_expert(name, grad).items()}


def by_expert(name: str, stack: Tensor) -> dict[str, Tensor]:
    """transformers stacks the experts in memory and names each one in files, as we do."""
    kind = name.rpartition(".")[2]
    prefix = name.removesuffix(kind)
    if kind == "down_proj":
        return {f"{prefix}{i}.down_proj.weight": w for i, w in enumerate(stack)}
    if kind != "gate_up_proj":
        return {name: stack}
    halves = [(i, *w.chunk(2)) for i, w in enumerate(stack)]
    gates = {f"{prefix}{i}.gate_proj.weight": gate for i, gate, _ in halves}
    return gates | {f"{prefix}{i}.up_proj.weight": up for i, _, up in halves}


def hf_gradients(model: Transformer) -> dict[str, Tensor]:
    """Our gradients under Hugging Face names, through the same row slices as the weights."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    return {name: view.clone() for name, view in hf_views(model).items()}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_gradients_of_packed_sequences_equal_transformers_autograd(
    shape: str, checkpointing: bool, tmp_path: Path
) -> None:
    save_reference(shape, tmp_path)
    model = load_model(tmp_path, torch.float64)
    sequences = random_sequences(211, [9, 2, 31, 140])
    summed_logps(model, sequences, activation_checkpointing=checkpointing).backward()
    ours = hf_gradients(model)
    theirs = reference_gradients(load_fp64_reference(tmp_path), sequences)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert relative_error(ours[name], theirs[name]) < 1e-9, name


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "llama-mha-untied", "qwen3-bias"])
def test_main_grad_sums_lookup_and_head_like_autograd(shape: str, tmp_path: Path) -> None:
    save_reference(shape, tmp_path)
    model, with_buffers = load_model(tmp_path), load_model(tmp_path)
    sequences = random_sequences(211, [9, 31])
    summed_logps(model, sequences).backward()
    for parameter in with_buffers.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    for _ in range(2):
        summed_logps(with_buffers, sequences).backward()
    for (name, plain), buffered in zip(
        model.named_parameters(), with_buffers.parameters(), strict=True
    ):
        total = buffered.main_grad + (0 if buffered.grad is None else buffered.grad)
        torch.testing.assert_close(total, 2 * plain.grad, rtol=1e-5, atol=1e-5, msg=name)
    assert with_buffers.embedding.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_gives_the_same_gradient_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    save_reference("qwen3-bias", tmp_path)
    sequences = random_sequences(211, [9, 31])
    grads = []
    for checkpointing in (False, True):
        model = load_model(tmp_path, dtype)
        summed_logps(model, sequences, activation_checkpointing=checkpointing).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_changed_weight_answers_only_after_repack(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    model, ids = load_model(tmp_path), random_sequences(211, [12])
    with torch.inference_mode():
        before = packed_hidden(model, ids)
        holder = model.layers[1].down.packed
        model.layers[1].down.weight.data.mul_(2.0)
        model.repack()
        after = packed_hidden(model, ids)
    assert model.layers[1].down.packed is holder
    assert not torch.equal(before, after)


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "llama-mha-untied"])
def test_fp32_head_over_a_bf16_model(shape: str, tmp_path: Path) -> None:
    """Logits as exact as fp32 allows, the trainer's log-probs with the same bits, also after the
    weights change."""
    save_reference(shape, tmp_path)
    model = load_model(tmp_path, torch.bfloat16, head_dtype=torch.float32)
    ids = random_sequences(211, [40])[0]
    for _ in range(2):
        hidden = packed_hidden(model, [ids])
        logits = model.logits(hidden)
        exact = hidden.double() @ model.lm_head_weight.double().T
        assert (logits - exact).abs().max() < 1e-5 * exact.abs().max()
        trained = linear_logprob(
            hidden,
            model.lm_head_weight,
            ids,
            packed=model.lm_head_packed,
            logits_dtype=model.head_dtype,
        )
        assert torch.equal(trained, logits_logprob(logits, ids))
        assert torch.equal(model.logprobs(hidden, ids)[0], trained)
        with torch.no_grad():
            model.lm_head_weight.mul_(1.5)
        model.repack()


def test_the_head_follows_parameters_that_are_cast_in_place(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    model, ids = load_model(tmp_path), random_sequences(211, [20])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.repack()
    cast = model.logits(packed_hidden(model, ids))
    loaded = load_model(tmp_path, torch.bfloat16)
    assert torch.equal(cast, loaded.logits(packed_hidden(loaded, ids)))
    model.head_dtype = torch.float32
    model.repack()
    assert model.logits(packed_hidden(model, ids)).dtype == torch.float32


PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the sum of a list.",
    "Name three primary colors.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Explain photosynthesis in one sentence.",
    "List the days of the week.",
    "Who wrote Romeo and Juliet?",
    "Give me a haiku about the sea.",
    "What does HTTP stand for?",
    "Sort the numbers 5, 3, 9, 1.",
    "How many legs does a spider have?",
    "Write a SQL query that counts the rows of a table.",
    "What is the boiling point of water?",
    "Suggest a name for a cat.",
    "Reverse the word 'laptop'.",
]


@pytest.mark.slow
@pytest.mark.smollm2
@torch.inference_mode()
def test_smollm2_greedy_tokens_equal_transformers(smollm2_folder: Path) -> None:
    """Teacher-forced: given transformers' tokens so far, ours picks the same next token at each of
    the 64 positions, which is the same claim as decoding freely, in one packed pass."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    model = load_model(smollm2_folder)
    prompts = [
        torch.tensor(
            tokenizer.encode(f"<|im_start|>user\n{p}<|im_end|>\n<|im_start|>assistant\n").ids
        )
        for p in PROMPTS
    ]
    theirs = list(torch.tensor(greedy_reference(reference, prompts, 64)))
    sequences = [torch.cat(pair) for pair in zip(prompts, theirs, strict=True)]
    hidden = packed_hidden(model, sequences).split([len(ids) for ids in sequences])
    for prompt, expected, h in zip(prompts, theirs, hidden, strict=True):
        assert torch.equal(model.logits(h[len(prompt) - 1 : -1]).argmax(-1), expected)


@pytest.mark.smollm2
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_smollm2_packed_batch_equals_each_sequence_alone_bit_for_bit(
    dtype: torch.dtype, smollm2_folder: Path
) -> None:
    model = load_model(smollm2_folder, dtype)
    lengths = [1, 2, 40, 150, 16]
    sequences = random_sequences(model.config.vocab_size, lengths)
    together = packed_hidden(model, sequences).split(lengths)
    for ids, hidden in zip(sequences, together, strict=True):
        alone = packed_hidden(model, [ids])
        assert torch.equal(hidden, alone)
        assert torch.equal(model.logits(hidden), model.logits(alone))
