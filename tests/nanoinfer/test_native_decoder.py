"""All layers in one call of C++ give the bits of the model's own forward pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import save_reference

from kernels.kv_cache import cache_rows, make_paged_plan
from nanoengine.architectures.quantized import quantize
from nanoengine.formats.hf import export_state, load_model
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.transformer import Transformer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.kv_cache import CacheLayout, KVCache, PagedContext
from nanoinfer.model_runner import make_decoder
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.fp8_cache import Fp8Cache

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.sweep]
DENSE = ("llama-gqa-tied", "qwen2-untied-theta", "qwen3-untied-wide-head")
SWITCHED = ("mistral-window", "smollm3-window", "granite", "qwen3-yarn-window")
DTYPES = (torch.float32, torch.bfloat16)


def load(shape: str, folder: Path, dtype: torch.dtype) -> Transformer:
    save_reference(shape, folder)
    model = load_model(folder, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms of 1 and biases of 0 would hide that they are mixed up
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.repack()
    return model


@pytest.fixture(params=DENSE + SWITCHED)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


KINDS = [(dtype, is_int8) for dtype in DTYPES for is_int8 in (False, True)]


@pytest.fixture(params=KINDS, ids=("fp32", "fp32-int8", "bf16", "bf16-int8"))
def model(shape: str, request: pytest.FixtureRequest, tmp_path: Path) -> Transformer:
    dtype, is_int8 = request.param
    model = load(shape, tmp_path, dtype)
    if is_int8:
        quantize(model, "int8")
    return model


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def set_windows(model: Transformer, windows: tuple[int | None, ...]) -> None:
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        layer.window = windows[i % len(windows)]
        if windows != (None,):
            layer.scale = 0.3


def make_cache(model: Transformer, dtype: torch.dtype | None = None) -> KVCache:
    dtype = model.dtype if dtype is None else dtype
    return KVCache(model.config, CacheLayout(num_blocks=30, block_size=16, dtype=dtype))


def steps() -> Iterator[tuple[list[int], list[int], torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A prefill, then a chunk beside two decodes: starts, lengths, tables, slots, positions."""
    tables = torch.tensor([[7, 3, 11], [2, 29, 0], [5, 14, 21]])
    seen = [0, 0, 0]
    for counts in ([33, 17, 1], [1, 14, 1], [1, 1, 30]):
        starts, lens = [0], []
        slots, positions = [], []
        for i, count in enumerate(counts):
            for position in range(seen[i], seen[i] + count):
                positions.append(position)
                slots.append(int(tables[i, position // 16]) * 16 + position % 16)
            seen[i] += count
            starts.append(starts[-1] + count)
            lens.append(seen[i])
        yield starts, lens, tables, torch.tensor(slots), torch.tensor(positions)


@pytest.mark.parametrize("windows", [(None,), (5, None, 1), (17, 2, 33, 1000)], ids=str)
@torch.inference_mode()
def test_hidden_states_and_cache_have_the_bits_of_the_models_own_pass(
    model: Transformer, threads: int, windows: tuple[int | None, ...]
) -> None:
    """Each layer with a window of its own, and all with a scale, which make another model."""
    set_windows(model, windows)
    plain, fused = make_cache(model), make_cache(model)
    decoder = make_decoder(model, fused)
    assert decoder is not None
    generator = torch.Generator().manual_seed(0)
    for starts, lens, tables, slots, positions in steps():
        ids = torch.randint(3, 211, (starts[-1],), generator=generator)
        context = PagedContext(plain, slots, starts, lens, tables, max(lens), max(lens))
        expected = model(ids, positions, context)
        _, cache = fused.layers[0]
        plan = make_paged_plan(
            starts, lens, tables, cache=cache, num_heads=fused.num_heads, dtype=model.dtype
        )
        hidden = decoder.run(
            model.embed(ids),
            *model.rope_of(positions),
            cache_rows(slots, cache),
            plan.layout,  # type: ignore[arg-type]
        )
        assert torch.equal(hidden, expected)
        assert torch.equal(fused.data, plain.data)


def generate(engine: LLMEngine) -> list[Output]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in (3, 40, 70)]
    params = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True) for i in range(3)]
    return engine.generate(prompts, params)


def same(outputs: list[Output], expected: list[Output]) -> bool:
    pairs = zip(outputs, expected, strict=True)
    return all(a.ids == b.ids and a.logps == b.logps for a, b in pairs)


def test_new_weights_and_a_new_cache_count(shape: str, tmp_path: Path) -> None:
    model = load(shape, tmp_path / "a", torch.float32)
    other = load(shape, tmp_path / "b", torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1.25
    other.repack()
    config = InferConfig(num_blocks=40)
    expected = generate(LLMEngine(other, config))
    engine = LLMEngine(model, config)
    assert not same(generate(engine), expected)
    engine.update_weights(export_state(other), 1)
    assert same(generate(engine), expected)
    engine.sleep()
    engine.wake()
    assert same(generate(engine), expected)


def test_what_the_layers_in_cpp_lack_runs_op_by_op(tmp_path: Path) -> None:
    moe = load("qwen3-moe", tmp_path / "moe", torch.float32)
    assert make_decoder(moe, make_cache(moe)) is None
    dense = load(DENSE[0], tmp_path / "dense", torch.float32)
    layout = CacheLayout(num_blocks=30, block_size=16, dtype=dense.dtype)
    fp8 = Fp8Cache(dense.config, layout)
    assert make_decoder(dense, fp8) is None
    assert make_decoder(load(DENSE[0], tmp_path / "wide", torch.float64), make_cache(dense)) is None
    assert make_decoder(dense, make_cache(dense)) is not None
    for family in ("olmo2", "olmo3", "phi3-longrope", "gemma3", "glm4", "gpt-oss"):
        other = load(family, tmp_path / family, torch.float32)
        assert make_decoder(other, make_cache(other)) is None, family
    first = dense.layers[0]
    assert isinstance(first, DecoderLayer)
    first.scale *= 2  # the call has one scale for all layers
    assert make_decoder(dense, make_cache(dense)) is None


def test_a_populated_cache_reads_zero_and_gives_the_same_bits(tmp_path: Path) -> None:
    model = load(DENSE[0], tmp_path, torch.bfloat16)
    assert not make_cache(model).data.any()
    populated = InferConfig(num_blocks=40, populate_cache=True)
    engine = LLMEngine(model, populated)
    assert same(generate(engine), generate(LLMEngine(model, InferConfig(num_blocks=40))))
