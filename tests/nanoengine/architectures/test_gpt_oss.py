"""gpt-oss beside what the tests of all families say: what published checkpoints hold,
configurations that it cannot be, and that each of its peculiarities is felt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_reference, save_reference
from torch import Tensor

from nanoengine.architectures.rope import YarnRope
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import export_state, hf_views, load_model, save_model
from nanoengine.formats.mxfp4 import widen_mxfp4
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine
from nanoinfer import InferConfig, LLMEngine
from nanoinfer.params import SamplingParams

SHAPES = ["gpt-oss", "gpt-oss-full", "gpt-oss-windows"]
PUBLISHED: dict[str, Any] = {  # openai/gpt-oss-20b, what does not matter here left out
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def logits(model: Transformer, ids: Tensor) -> Tensor:
    lengths = [len(ids)]
    context = PackedContext.from_lengths(lengths)
    return model.logits(model(ids, packed_positions(lengths), context))


def some_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 211, (count,), generator=torch.Generator().manual_seed(seed))


# -- the computation -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_fp32_logits_are_those_of_transformers(shape: str, seed: int, tmp_path: Path) -> None:
    reference, ids = save_reference(shape, tmp_path, seed), some_ids(200, seed)
    theirs = reference(ids[None]).logits[0]
    error = (logits(load_model(tmp_path), ids) - theirs).abs().max()
    assert error <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_forty_greedy_tokens_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    reference, prompt = save_reference(shape, tmp_path), some_ids(30)
    theirs = reference.generate(
        prompt[None], max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = LLMEngine(load_model(tmp_path), InferConfig(num_blocks=40, max_batch_tokens=16))
    (ours,) = engine.generate([prompt.tolist()], [greedy])
    assert ours.ids == theirs[0, 30:].tolist()


def zeroed(*endings: str) -> Any:
    def change(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if name.endswith(endings)]:
            state[name] = torch.zeros_like(state[name])

    return change


@pytest.mark.parametrize(
    "change",
    [
        zeroed("router.bias"),
        zeroed("experts.gate_up_proj_bias"),
        zeroed("experts.down_proj_bias"),
        zeroed("o_proj.bias"),
        zeroed("self_attn.sinks"),
    ],
    ids=["router.bias", "gate_up.bias", "down.bias", "o.bias", "sinks"],
)
@torch.inference_mode()
def test_every_tensor_that_others_lack_moves_the_logits(change: Any, tmp_path: Path) -> None:
    """By more than the agreement with transformers allows: so that agreement means something."""
    save_reference("gpt-oss", tmp_path)
    model, ids = load_model(tmp_path), some_ids(60)
    before = logits(model, ids)
    state = {name: tensor.clone() for name, tensor in export_state(model)}
    change(state)
    for name, view in hf_views(model).items():
        view.copy_(state[name])
    model.repack()
    assert (logits(model, ids) - before).abs().max() > 1e-2 * before.abs().max()


def test_biases_and_sinks_are_spared_by_weight_decay(tmp_path: Path) -> None:
    """A step whose gradient is 0 moves decayed parameters alone."""
    save_reference("gpt-oss", tmp_path)
    model = load_model(tmp_path)
    engine = Engine(model, EngineConfig(lr=0.1, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sample = Sample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], fields={})

    def nothing(*given: Any) -> tuple[Tensor, dict[str, Any]]:
        loss, stats = sft_loss(*given)
        return loss * 0.0, stats

    engine.train_step([sample], nothing, num_loss_tokens)
    for name, parameter in model.named_parameters():
        is_spared = name.endswith(("bias", "sinks", "norm"))
        assert torch.equal(parameter, before[name]) == is_spared, name


# -- configurations ------------------------------------------------------------------------------


def test_the_published_configuration_is_read() -> None:
    config = ModelConfig.from_hf_dict(PUBLISHED)
    assert (config.num_experts, config.num_experts_per_token) == (32, 4)
    assert config.attention_bias and config.attention_output_bias
    assert config.window_layers == tuple(range(0, 24, 2)) and config.sliding_window == 128
    assert isinstance(config.rope_scaling, YarnRope) and config.rope_scaling.truncate is False
    assert ModelConfig.from_hf_dict(config.to_hf_dict()) == config
    assert "quantization_config" not in config.to_hf_dict()


def test_defaults_are_those_of_transformers() -> None:
    from transformers import GptOssConfig

    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    needed += ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
    needed += ("num_local_experts", "model_type")
    theirs = GptOssConfig().to_dict()
    least = {name: theirs[name] for name in needed}
    assert ModelConfig.from_hf_dict(least) == ModelConfig.from_hf_dict(theirs)
    # an object without fields is a rope without a scaling, null is the published one
    plain = GptOssConfig(rope_parameters={}).to_dict()
    assert plain["rope_parameters"]["rope_type"] == "default"
    found = ModelConfig.from_hf_dict({**least, "rope_parameters": {}})
    assert found == ModelConfig.from_hf_dict(plain) and found.rope_scaling is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0: not supported; supported is 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0: not supported; supported is 1.702"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 3}, "num_experts_per_token=4: must be from 1 to num_experts=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_local_experts": None}, "num_local_experts=None"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict({**PUBLISHED, **change})


# -- MXFP4 ---------------------------------------------------------------------------------------


def decode_by_hand(blocks: Tensor, scales: Tensor) -> Tensor:
    """The format's definition, number by number: [experts, in, out] in fp64."""
    experts, rows, groups, _ = blocks.shape
    out = torch.zeros(experts, groups * 32, rows, dtype=torch.float64)
    for x in range(experts):
        for r in range(rows):
            for g in range(groups):
                power = 2.0 ** (int(scales[x, r, g]) - 127)
                for i, byte in enumerate(blocks[x, r, g].tolist()):
                    for half, bits in enumerate((byte & 15, byte >> 4)):
                        exponent, mantissa = bits >> 1 & 3, bits & 1
                        size = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (
                            1 + mantissa / 2
                        )  # fmt: skip
                        sign = -1.0 if bits >> 3 else 1.0
                        out[x, g * 32 + 2 * i + half, r] = sign * size * power
    return out


def random_mxfp4(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shape = (experts, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(117, 128, shape, generator=generator).to(torch.uint8)


def test_mxfp4_is_decoded_as_its_definition_and_transformers_say() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_mxfp4(3, 10, 64)
    scales[0, 0, 0], scales[0, 1, 0] = 1, 250
    found = widen_mxfp4(blocks, scales)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.double(), decode_by_hand(blocks, scales))
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales))


def as_published(folder: Path) -> dict[str, Tensor]:
    """Rewrite the experts of a folder in MXFP4; the tensors that it then holds, widened by hand."""
    state = load_file(folder / "model.safetensors")
    wide: dict[str, Tensor] = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        blocks, scales = random_mxfp4(experts, rows, columns)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = decode_by_hand(blocks, scales).float()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(fields))
    return wide


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    from transformers import GptOssForCausalLM

    config = make_reference("gpt-oss").config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 32, 2
    config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path, as_published(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_folder_is_loaded_and_saved_without_mxfp4(
    dtype: torch.dtype, published: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, wide = published
    model = load_model(folder, dtype)
    views = hf_views(model)
    for name, tensor in wide.items():
        assert torch.equal(views[name].float(), tensor), name
    save_model(model, tmp_path / "out")
    again = hf_views(load_model(tmp_path / "out", dtype))
    assert all(torch.equal(again[name], view) for name, view in views.items())


def test_half_an_mxfp4_matrix_is_refused(published: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = published
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="down_proj_blocks alone, MXFP4 needs both"):
        load_model(folder)
    with pytest.raises(ValueError, match="must be uint8"):
        widen_mxfp4(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match=r"scales: shape \(1, 2\) must be blocks' \(1, 2, 1, 16\)"):
        widen_mxfp4(*(torch.zeros(s, dtype=torch.uint8) for s in ((1, 2, 1, 16), (1, 2))))
