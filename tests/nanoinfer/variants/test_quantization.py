"""Matrices in 8 bits while sampling: near the exact model, renewed with the weights, untrained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_text import make_model
from torch import Tensor

from kernels import Int8Weight
from nanoengine.adapters.lora import LowRank
from nanoengine.architectures.quantized import Fp8Linear, Int8Linear, quantize, quantize_head
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import export_state, load_model, save_model
from nanoengine.model.attention import PackedContext
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.state.whole_engine import Engine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams

PROMPTS = [[5, 6, 7, 8], [40, 3, 9], list(range(20, 60))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logps=True)


def make_engine(dtype: torch.dtype = torch.float32, **options: object) -> LLMEngine:
    model = make_model(dtype=dtype)
    model.init_weights(0, std=0.05)  # log-probs spread by 0.27: a model that rounding may not turn
    return LLMEngine(model, InferConfig(num_blocks=32, **options))  # type: ignore[arg-type]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))


@DTYPES
@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.015), ("int8", 0.003)])
def test_log_probs_are_near_the_exact_ones_and_not_equal(
    dtype: torch.dtype, kind: str, bound: float
) -> None:
    exact = make_engine(dtype).generate(PROMPTS, GREEDY)
    rounded = make_engine(dtype, quantization=kind).generate(PROMPTS, GREEDY)
    gaps = [
        abs(a - b)
        for one, other in zip(exact, rounded, strict=True)
        for a, b in zip(one.prompt_logps, other.prompt_logps, strict=True)
    ]
    assert 0 < sum(gaps) / len(gaps) < bound
    pairs = [pair for one, other in zip(exact, rounded, strict=True)
             for pair in zip(one.ids, other.ids, strict=True)]  # fmt: skip
    assert sum(a == b for a, b in pairs) > 0.8 * len(pairs)


def scales(engine: LLMEngine, kind: str) -> torch.Tensor:
    layer = engine.model.layers[0].qkv
    if kind == "int8":
        assert isinstance(layer, Int8Linear) and layer.packed is None and layer.weight.is_meta
        return layer.int8.scale_O
    assert isinstance(layer, Fp8Linear)
    return layer.fp8[1]


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_new_weights_are_quantised_again_in_place(kind: str) -> None:
    engine, other = make_engine(quantization=kind), make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.repack()
    before, place = scales(engine, kind).clone(), scales(engine, kind).data_ptr()
    engine.sleep()
    engine.update_weights(export_state(other), 1)
    engine.wake()
    assert scales(engine, kind).data_ptr() == place and (scales(engine, kind) > before).all()
    found = engine.generate(PROMPTS, GREEDY)
    fresh = LLMEngine(other, InferConfig(num_blocks=32, quantization=kind))  # type: ignore[arg-type]
    expected = fresh.generate(PROMPTS, GREEDY)
    assert [x.ids for x in found] == [x.ids for x in expected]
    assert [x.logps for x in found] == [x.logps for x in expected]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 0.03), (torch.bfloat16, 0.05)])
def test_logits_of_int8_are_off_by_hundredths_of_their_spread(
    dtype: torch.dtype, bound: float
) -> None:
    """A weight is off by at most 1/254 of its output's largest; bf16 rounds other sums besides."""
    exact, rounded = make_model(dtype=dtype), make_model(dtype=dtype)
    quantize(rounded, "int8")
    quantize_head(rounded)
    ids = torch.tensor(PROMPTS[2])
    logits = []
    for model in (exact, rounded):
        with torch.no_grad():
            context = PackedContext.from_lengths([len(ids)])
            logits.append(model.logits(model(ids, torch.arange(len(ids)), context)).float())
    error = (logits[1] - logits[0]).std() / logits[0].std()
    assert 0.001 < error < bound


@pytest.mark.usefixtures("cpu_path")
@DTYPES
def test_requests_over_int8_have_the_same_bits_in_any_batch_and_when_scored(
    dtype: torch.dtype,
) -> None:
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    alone = [make_engine(dtype, quantization="int8").generate([p], params)[0] for p in PROMPTS]
    engine = make_engine(dtype, quantization="int8", max_batch_tokens=16)
    together = engine.generate(PROMPTS, params)
    assert [(x.ids, x.logps) for x in together] == [(x.ids, x.logps) for x in alone]
    read = [p + x.ids for p, x in zip(PROMPTS, alone, strict=True)]
    scored = engine.generate(read, SamplingParams(max_tokens=1, prompt_logps=True))
    for prompt, one, other in zip(PROMPTS, alone, scored, strict=True):
        assert other.prompt_logps[-len(one.ids) :] == one.logps, len(prompt)


def test_the_decoder_in_one_call_has_the_bits_of_the_layers_over_int8(native: None) -> None:
    engine = make_engine(torch.bfloat16, quantization="int8")
    assert engine._runner.decoder is not None
    expected = engine.generate(PROMPTS, GREEDY)
    engine = make_engine(torch.bfloat16, quantization="int8")
    engine._runner.decoder = None
    found = engine.generate(PROMPTS, GREEDY)
    assert [(x.ids, x.logps) for x in found] == [(x.ids, x.logps) for x in expected]


def test_loading_into_int8_is_loading_and_quantising(tmp_path: Path) -> None:
    save_model(make_model(), tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16, is_int8=True)
    quantised = load_model(tmp_path, torch.bfloat16)
    quantize(quantised, "int8")
    for (name, ours), (_, theirs) in zip(
        export_state(loaded), export_state(quantised), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert loaded.quantization == "int8" and all(
        p.is_meta == (p.dim() == 2 and "layers" in name) for name, p in loaded.named_parameters()
    )


def test_an_engine_of_int8_takes_at_most_half_of_bf16s_memory(native: None) -> None:
    sizes = {"vocab_size": 480, "hidden_size": 192, "intermediate_size": 480, "num_layers": 4}
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 48}
    shape = ModelConfig(**sizes, **heads, tie_word_embeddings=True)

    def held_bytes(kind: str) -> int:
        model = Transformer(shape, torch.bfloat16)
        model.init_weights(0)
        engine = LLMEngine(model, InferConfig(num_blocks=8, quantization=kind))  # type: ignore[arg-type]
        held = [x for x in engine.model.parameters() if not x.is_meta]
        held += [x for m in engine.model.modules() for x in vars(m).values()
                 if isinstance(x, Tensor | Int8Weight)]  # fmt: skip
        return sum(x.nbytes for x in held)

    assert held_bytes("int8") < 0.35 * held_bytes("none")


def test_adapters_of_requests_and_merged_ones_go_with_int8(tmp_path: Path) -> None:
    model = make_model()
    rank, width = 2, model.config.hidden_size
    change = LowRank(torch.randn(rank, width), torch.randn(width, rank) / 4, 1.0)
    adapter = {"model.layers.0.self_attn.o_proj": change}
    params = replace(GREEDY, adapter="poet")
    outputs = []
    for kind in ("none", "int8"):
        engine = LLMEngine(make_model(), InferConfig(num_blocks=32, quantization=kind))  # type: ignore[arg-type]
        engine.load_adapter("poet", adapter)
        plain, adapted = (engine.generate(PROMPTS, one) for one in (GREEDY, params))
        assert plain[2].prompt_logps != adapted[2].prompt_logps
        outputs.append(torch.tensor(adapted[2].prompt_logps))
    assert 0 < float((outputs[0] - outputs[1]).abs().mean()) < 0.2 * float(outputs[0].std())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="quantization='int4': must be 'none', 'fp8' or 'int8'"):
        make_engine(quantization="int4")
    with pytest.raises(ValueError, match="quantization='fp8' with deterministic=True"):
        make_engine(quantization="fp8", deterministic=True)
    with pytest.raises(ValueError, match="quantization='int8' with deterministic=True"):
        make_engine(quantization="int8", deterministic=True)
    elsewhere = Transformer(make_model().config, device="meta")
    with pytest.raises(ValueError, match="quantization='int8': the model is on meta"):
        quantize(elsewhere, "int8")
    engine = make_engine(quantization="fp8")
    with pytest.raises(ValueError, match="quantised, and those have no gradient"):
        Engine(engine.model, EngineConfig())
    state = dict(export_state(make_model()))
    name = next(name for name in state if name.endswith("q_proj.weight"))
    state[name] = state[name][:-1]
    with pytest.raises(ValueError, match=name):
        engine.update_weights(state.items(), 1)
