"""However a request is scheduled, its tokens and log-probs are the same bits; and the trainer's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafts import PlantedDrafter, plant
from tiny_models import FAMILY_SHAPES, save_reference

from kernels import linear_logprob
from nanoengine.formats.hf import load_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.linear import LogprobOptions
from nanoengine.model.transformer import Transformer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanoinfer.sequence import Sequence

OF_THE_BOOK = "qwen3-untied-wide-head"
OTHERS = ("llama-gqa-tied", "qwen2-untied-theta", "qwen3-moe", "gpt-oss")
SHAPES = (OF_THE_BOOK, *(pytest.param(one, marks=pytest.mark.sweep) for one in OTHERS))
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_reference(request.param, path)
    return path


@pytest.fixture(scope="module", params=DTYPES, ids=("fp32", "bf16"))
def model(folder: Path, request: pytest.FixtureRequest) -> Transformer:
    return load_model(folder, request.param)


def prompts(num: int = 10, seed: int = 0) -> list[list[int]]:
    """Lengths around the block and padding boundaries; some share a start."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 3, 15, 16, 17, 33, 64, 127, 140, 160][:num]
    made = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in lengths]
    if num > 8:
        made[8] = made[7][:100] + made[8][:40]
    return made


def params(num: int, max_tokens: int = 24) -> list[SamplingParams]:
    """Mostly plain sampling, some greedy, some tempered or truncated."""
    options = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {}, {"top_k": 20, "top_p": 0.9}]
    return [
        SamplingParams(max_tokens=max_tokens + i % 7, seed=i, ignore_eos=True, **options[i % 5])
        for i in range(num)
    ]


def make(model: Transformer, **options: object) -> LLMEngine:
    sizes = {"num_blocks": 200, "max_batch_tokens": 512, "max_num_seqs": 32}
    return LLMEngine(model, InferConfig(**{**sizes, **options}))  # type: ignore[arg-type]


def one_by_one(model: Transformer) -> list[Output]:
    engine = make(model, prefix_caching=False)
    return [engine.generate([p], s)[0] for p, s in zip(prompts(), params(10), strict=True)]


def assert_same(outputs: list[Output], expected: list[Output]) -> None:
    for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
        assert a.ids == b.ids, i
        assert a.logps == b.logps, i


def following(expected: list[Output], seq: Sequence, count: int) -> list[int]:
    return expected[seq.handle].ids[seq.num_sampled :][:count]


def test_batching_chunking_caching_preemption_and_drafts_do_not_change_a_bit(
    model: Transformer,
) -> None:
    expected = one_by_one(model)
    requests = (prompts(), params(10))
    assert_same(make(model, prefix_caching=False).generate(*requests), expected)
    chunked = make(model, max_batch_tokens=11, max_num_seqs=11)
    assert_same(chunked.generate(*requests), expected)
    assert_same(chunked.generate(*requests), expected)  # from the prefix cache
    assert chunked.metrics()["cached_tokens"] > 400
    small_blocks = make(model, block_size=4, num_blocks=600)
    assert_same(small_blocks.generate(*requests), expected)
    tight = make(model, num_blocks=24, max_batch_tokens=64)
    assert_same(tight.generate(*requests), expected)
    assert tight.metrics()["num_preemptions"] > 0
    drafted = make(model, max_batch_tokens=64)
    plant(drafted, PlantedDrafter(lambda seq, n: following(expected, seq, n), 211, is_right=0.8))
    assert_same(drafted.generate(*requests), expected)
    assert drafted.metrics()["accepted_tokens"] > 80
    for engine in (chunked, small_blocks, tight, drafted):
        engine.check()


def test_a_group_samples_the_same_as_its_members_alone(model: Transformer) -> None:
    prompt = prompts()[7]
    group = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True) for i in range(6)]
    alone = [make(model, prefix_caching=False).generate([prompt], p)[0] for p in group]
    engine = make(model)
    together = engine.generate([prompt] * 6, group)
    assert_same(together, alone)
    assert len({tuple(o.ids) for o in together}) == 6
    assert engine.metrics()["computed_tokens"] == 127 + 5 + 6 * 19


def trainer_logps(
    model: Transformer, prompts: list[list[int]], outputs: list[Output], temperature: float
) -> list[list[float]]:
    """The training forward pass over all sequences packed, with autograd on."""
    ids = [p + o.ids for p, o in zip(prompts, outputs, strict=True)]
    lengths = [len(x) for x in ids]
    flat = torch.tensor([t for x in ids for t in x])
    hidden = model(flat, packed_positions(lengths), PackedContext.from_lengths(lengths))
    logp, _ = model.logprobs(hidden[:-1], flat[1:], LogprobOptions(temperature))
    assert logp.requires_grad
    rows, end = [], 0
    for prompt, length in zip(prompts, lengths, strict=True):
        rows.append(logp[end + len(prompt) - 1 : end + length - 1].tolist())
        end += length
    return rows


def test_rollout_logps_equal_the_training_forward_pass_bit_for_bit(model: Transformer) -> None:
    for temperature in (1.0, 0.6):
        each = [
            SamplingParams(max_tokens=30, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(10)
        ]
        outputs = make(model, max_batch_tokens=48).generate(prompts(), each)
        trained = trainer_logps(model, prompts(), outputs, temperature)
        assert [o.logps for o in outputs] == trained


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("shape", FAMILY_SHAPES)
def test_rollout_logps_of_every_family_equal_the_training_forward_pass_bit_for_bit(
    shape: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of prompts longer than the windows, in chunks, beside decodes; with the prompts' own, and of
    logits in fp32."""
    save_reference(shape, tmp_path)
    each = [
        SamplingParams(max_tokens=20, seed=i, ignore_eos=True, prompt_logps=True) for i in range(9)
    ]
    for is_wide in (False, True) if dtype == torch.bfloat16 else (False,):
        head_dtype = torch.float32 if is_wide else None
        trainer = load_model(tmp_path, dtype, head_dtype=head_dtype)
        engine = make(load_model(tmp_path, dtype), max_batch_tokens=48, lm_head_fp32=is_wide)
        outputs = engine.generate(prompts(9), each)
        assert [o.logps for o in outputs] == trainer_logps(trainer, prompts(9), outputs, 1.0)
        starts = [[prompt[0]] for prompt in prompts(9)]
        rests = [replace(o, ids=p[1:]) for o, p in zip(outputs, prompts(9), strict=True)]
        told = [o.prompt_logps for o in outputs]
        assert told == trainer_logps(trainer, starts, rests, 1.0)


def set_windows(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a window, some within a prompt, beside layers without; and another scale."""
    for i, layer in enumerate(model.layers):
        monkeypatch.setattr(layer, "window", (20, None, 3)[i % 3])
        monkeypatch.setattr(layer, "scale", 0.3)


def test_rollout_logps_of_layers_with_windows_equal_the_training_forward_pass(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True) for i in range(10)]
    without = trainer_logps(model, prompts(), make(model).generate(prompts(), each), 1.0)
    set_windows(model, monkeypatch)
    outputs = make(model, max_batch_tokens=48).generate(prompts(), each)
    trained = trainer_logps(model, prompts(), outputs, 1.0)
    assert [o.logps for o in outputs] == trained != without
    assert_same(make(model, block_size=4, num_blocks=600).generate(prompts(), each), outputs)


def test_a_multi_turn_rollout_from_the_cache_has_the_trainers_logps(model: Transformer) -> None:
    engine = make(model)
    contexts = [prompts()[6]] * 4
    for turn in range(3):
        each = [SamplingParams(max_tokens=13, seed=9 * turn + i, ignore_eos=True) for i in range(4)]
        outputs = engine.generate(contexts, each)
        assert [o.logps for o in outputs] == trainer_logps(model, contexts, outputs, 1.0)
        contexts = [
            c + o.ids + [50 + turn, 60 + i] * 5
            for i, (c, o) in enumerate(zip(contexts, outputs))  # noqa: B905
        ]
    assert engine.metrics()["cached_tokens"] > 4 * 2 * 64


def test_an_fp32_head_over_a_bf16_model_equals_the_trainers(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16)
    each = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True) for i in range(10)]
    outputs = make(model, lm_head_fp32=True).generate(prompts(), each)
    ids = prompts()[9] + outputs[9].ids
    hidden = model(
        torch.tensor(ids), packed_positions([len(ids)]), PackedContext.from_lengths([len(ids)])
    )
    logp = linear_logprob(
        hidden[:-1], model.lm_head_weight, torch.tensor(ids[1:]), logits_dtype=torch.float32
    )
    assert outputs[9].logps == logp[-12:].tolist()
