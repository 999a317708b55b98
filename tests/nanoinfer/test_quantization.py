"""Matrices in fp8 while sampling: near the exact model, renewed with the weights, never trained."""

import pytest
import torch
from tiny_text import make_model

from nanoengine.config import EngineConfig
from nanoengine.engine import Engine
from nanoengine.model.hf import export_state
from nanoengine.model.linear import PackedLinear
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams

PROMPTS = [[5, 6, 7, 8], [40, 3, 9], list(range(20, 60))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logps=True)


def make_engine(dtype: torch.dtype = torch.float32, **options: object) -> LLMEngine:
    model = make_model(dtype=dtype)
    model.init_weights(0, std=0.05)  # log-probs spread by 0.27: a model that rounding may not turn
    return LLMEngine(model, InferConfig(num_blocks=32, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_log_probs_are_near_the_exact_ones_and_not_equal(dtype: torch.dtype) -> None:
    exact = make_engine(dtype).generate(PROMPTS, GREEDY)
    rounded = make_engine(dtype, quantization="fp8").generate(PROMPTS, GREEDY)
    gaps = [
        abs(a - b)
        for one, other in zip(exact, rounded, strict=True)
        for a, b in zip(one.prompt_logps, other.prompt_logps, strict=True)
    ]
    assert 0 < sum(gaps) / len(gaps) < 0.015
    pairs = [pair for one, other in zip(exact, rounded, strict=True)
             for pair in zip(one.ids, other.ids, strict=True)]  # fmt: skip
    assert sum(a == b for a, b in pairs) > 0.8 * len(pairs)


def test_new_weights_are_quantised_again_in_place() -> None:
    engine, other = make_engine(quantization="fp8"), make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.repack()
    layer = engine.model.layers[0].qkv
    assert isinstance(layer, PackedLinear) and layer.fp8 is not None
    before, place = layer.fp8[1].clone(), layer.fp8[1].data_ptr()
    engine.sleep()
    engine.update_weights(export_state(other), 1)
    engine.wake()
    assert layer.fp8[1].data_ptr() == place and (layer.fp8[1] > before).all()
    found = engine.generate(PROMPTS, GREEDY)
    fresh = LLMEngine(other, InferConfig(num_blocks=32, quantization="fp8"))
    expected = fresh.generate(PROMPTS, GREEDY)
    assert [x.ids for x in found] == [x.ids for x in expected]
    assert [x.logps for x in found] == [x.logps for x in expected]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="quantization='int4': must be 'none', 'fp8' or 'int8'"):
        make_engine(quantization="int4")
    with pytest.raises(ValueError, match="quantization='fp8' with deterministic=True"):
        make_engine(quantization="fp8", deterministic=True)
    engine = make_engine(quantization="fp8")
    with pytest.raises(ValueError, match="quantised, and those have no gradient"):
        Engine(engine.model, EngineConfig())
    state = dict(export_state(make_model()))
    name = next(name for name in state if name.endswith("q_proj.weight"))
    state[name] = state[name][:-1]
    with pytest.raises(ValueError, match=name):
        engine.update_weights(state.items(), 1)
