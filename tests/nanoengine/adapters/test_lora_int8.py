"""Adapters over an int8 base: gradients against `peft` over what the base stands for, rollouts with
the trainer's bits, resuming, and what a base takes of memory."""

from pathlib import Path

import peft
import pytest
import torch
from test_lora_training import IDS, OTHER, SAMPLES, SHAPE, gradients, make_adapter, our_logits
from test_lora_training import folder as folder
from tiny_models import optimizer_state, save_reference
from transformers import AutoModelForCausalLM

from nanoengine.adapters.lora import merge_lora
from nanoengine.adapters.lora_adapter import LoraBase
from nanoengine.adapters.lora_engine import LoraEngine
from nanoengine.architectures.quantized import Int8Linear
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import export_state, held_state, load_model, save_model
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams


def make_engine(folder: Path, dtype: str = "fp32", **options: object) -> LoraEngine:
    base = LoraBase(load_model(folder, DTYPES[dtype], is_int8=True))
    return LoraEngine(make_adapter(base), EngineConfig(dtype=dtype, **options))


def dequantised(model: Transformer, folder: Path) -> Path:
    """What the model computes with, as a folder of `transformers`."""
    save_model(model, folder)
    return folder


@pytest.mark.parametrize("shape", [SHAPE, "qwen3-tied-narrow-head", "phi3", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True},
                                     {"micro_batch_tokens": 10}])  # fmt: skip
def test_gradients_are_pefts_over_the_dequantised_base(
    tmp_path: Path, shape: str, options: dict[str, object]
) -> None:
    save_reference(shape, tmp_path / "model")
    base = load_model(tmp_path / "model", is_int8=True)
    plain = AutoModelForCausalLM.from_pretrained(dequantised(base, tmp_path / "base"))
    adapter = make_adapter(LoraBase(base))
    ours = gradients(LoraEngine(adapter, EngineConfig(**options)))
    adapter.save(tmp_path / "adapter")
    reference = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    loss = sum(
        torch.nn.functional.cross_entropy(
            reference(torch.tensor(ids)[None]).logits[0, :-1],
            torch.tensor(ids[1:]),
            reduction="sum",
        )
        for ids in (IDS, OTHER)
    )
    (loss / (len(IDS) + len(OTHER) - 2)).backward()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for name, p in reference.named_parameters()
        if p.requires_grad
    }
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-5)
    assert min(float(g.abs().max()) for g in ours.values()) > 1e-4


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rollouts_have_the_bits_of_training(folder: Path, dtype: str) -> None:
    engine = make_engine(folder, dtype, lr=1e-2)
    rollouts = LLMEngine(engine.model, InferConfig(num_blocks=60, max_batch_tokens=24))
    params = [SamplingParams(max_tokens=9, seed=i, ignore_eos=True) for i in range(3)]
    prompts, seen = [IDS, OTHER, IDS[:3]], []
    for step in range(3):
        outputs = rollouts.generate(prompts, params)
        pairs = list(zip(prompts, outputs, strict=True))
        samples = [
            Sample(tokens=p + o.ids, loss_mask=[0] * len(p) + [1] * len(o.ids), group=str(i))
            for i, (p, o) in enumerate(pairs)
        ]
        scored = engine.forward_logprobs(samples)
        engine.train_step(samples, sft_loss, num_loss_tokens)
        for theirs in (scored, engine.last_logps):
            for (prompt, output), logps in zip(pairs, theirs, strict=True):
                assert output.logps == logps[len(prompt) :].tolist()
        with pytest.raises(RuntimeError, match="has changed its weights"):
            rollouts.generate([IDS], params[0])
        for handle in list(rollouts._sequences):
            rollouts.abort(handle)
        rollouts.adopt_weights(step + 1)
        seen.append(outputs[0].logps)
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_adapter_goes_on_to_the_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    whole = make_engine(folder, dtype, lr=1e-2)
    whole.train_step(SAMPLES, sft_loss, num_loss_tokens)
    whole.save(tmp_path / "checkpoints", {"at": 1})
    whole.train_step(SAMPLES, sft_loss, num_loss_tokens)
    resumed = make_engine(folder, dtype, lr=1e-2)
    assert resumed.load(tmp_path / "checkpoints") == {"at": 1}
    resumed.train_step(SAMPLES, sft_loss, num_loss_tokens)
    ours, theirs = optimizer_state(whole), optimizer_state(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(map(torch.equal, whole.forward_logprobs(SAMPLES), resumed.forward_logprobs(SAMPLES)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_supervised_training_learns_as_over_the_plain_base(folder: Path, dtype: str) -> None:
    config = EngineConfig(dtype=dtype, lr=3e-3)
    plain = LoraEngine(make_adapter(LoraBase(load_model(folder), DTYPES[dtype])), config)
    losses = {}
    for name, engine in (("int8", make_engine(folder, dtype, lr=3e-3)), ("plain", plain)):
        losses[name] = [
            engine.train_step(SAMPLES, sft_loss, num_loss_tokens)["loss"] for _ in range(25)
        ]
    start, end = losses["plain"][0], losses["plain"][-1]
    assert end < start / 2
    assert losses["int8"] == pytest.approx(losses["plain"], abs=0.05 * (start - end))


def test_adapters_on_one_base_do_not_touch_each_other(folder: Path) -> None:
    base = LoraBase(load_model(folder, is_int8=True))
    plain = our_logits(base.model)
    one, other = (make_adapter(base, seed, targets=("q_proj", "down_proj")) for seed in (1, 2))
    found = []
    for adapter in (one, other, one, None):
        base.activate(adapter)
        found.append(our_logits(base.model))
    assert torch.equal(found[0], found[2]) and torch.equal(found[3], plain)
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[0], plain)


def test_what_is_exported_is_the_base_with_the_adapter_merged(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, lr=1e-2)
    engine.train_step(SAMPLES, sft_loss, num_loss_tokens)
    again = Engine(load_model(dequantised(engine.model, tmp_path / "merged")), EngineConfig())
    for ours, theirs in zip(
        engine.forward_logprobs(SAMPLES), again.forward_logprobs(SAMPLES), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    engine.adapter.save(tmp_path / "adapter")
    base = dequantised(load_model(folder, is_int8=True), tmp_path / "base")
    merged = load_model(base)
    merge_lora(merged, tmp_path / "adapter")
    for (name, ours), (_, theirs) in zip(engine.export_state(), export_state(merged), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=name)


def held_bytes(model: Transformer) -> int:
    """Of the matrices of layers, with every copy."""
    matrices = [module for module in model.modules() if isinstance(module, PackedLinear)]
    tensors = [x for m in matrices for x in (m.weight, m.packed) if x is not None and not x.is_meta]
    return sum(
        x.nbytes for x in (*tensors, *(m.int8 for m in matrices if isinstance(m, Int8Linear)))
    )


def test_a_base_takes_a_quarter_of_the_memory_and_nothing_more_while_it_trains(
    native: None, tmp_path: Path
) -> None:
    shape = ModelConfig(vocab_size=256, hidden_size=192, intermediate_size=384, num_layers=2,
                        num_heads=4, num_kv_heads=2, head_dim=48)  # fmt: skip
    model = Transformer(shape, torch.bfloat16)
    model.init_weights(0)
    save_model(model, tmp_path)
    plain = LoraEngine(make_adapter(LoraBase(model)), EngineConfig(dtype="bf16"))
    ours = make_engine(tmp_path, "bf16")
    before = held_bytes(ours.model)
    assert before <= 0.26 * held_bytes(plain.model)
    ours.train_step(SAMPLES, sft_loss, num_loss_tokens)
    assert held_bytes(ours.model) == before and not ours.adapter.base._frozen
    held = {name: x for name, x in held_state(ours.model)}
    assert not any(x.is_meta for x in held.values()) and "model.norm.weight" in held


def test_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, is_int8=True)
    with pytest.raises(ValueError, match="quantised, and those have no gradient"):
        Engine(model, EngineConfig())
    with pytest.raises(ValueError, match=r"int8 matrices are packed for torch\.float32"):
        LoraBase(model, torch.bfloat16)
    make_adapter(LoraBase(load_model(folder))).save(tmp_path / "adapter")
    with pytest.raises(ValueError, match="and these are int8; merge it, then quantise"):
        merge_lora(model, tmp_path / "adapter")
