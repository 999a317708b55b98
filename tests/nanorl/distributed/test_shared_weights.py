"""Both engines of one process on one set of weights: the bytes that there are, and that no token is
sampled by weights which are old, half written or nobody's."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nanoengine.config import EngineConfig
from nanoengine.flat import lay_out
from nanoengine.model.config import ModelConfig
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.model_runner import make_decoder
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles import inline_roles as inline
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.distributed.weights import in_process
from nanorl.distributed.weights.in_process import can_share_weights, make_publisher
from nanorl.options import agent_kit as kit
from nanorl.options.engine_config import LoraOptions
from nanorl.options.parts import Parts
from nanorl.options.presets import get_preset

SHAPE = ModelConfig(
    model_type="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
PROMPT = [3, 5, 7, 11, 13]
SAMPLES = [Sample(tokens=[*PROMPT, 17, 19, 23], loss_mask=[0] * 5 + [1] * 3)] * 2
CPU = torch.device("cpu")


def make_trainer(dtype: str, **options: Any) -> Engine:
    model = Transformer(SHAPE)
    model.init_weights(0, std=0.3)
    return Engine(model, EngineConfig(dtype=dtype, lr=3e-2, **options))


def train(trainer: Engine) -> None:
    trainer.train_step(SAMPLES, sft_loss, num_loss_tokens)


def apart(trainer: Engine) -> LLMEngine:
    """An engine with copies of the trainer's weights, each of which it packs itself."""
    model = Transformer(SHAPE, trainer.model.dtype, head_dtype=trainer.model.head_dtype)
    engine = LLMEngine(model, InferConfig(num_blocks=64))
    engine.update_weights(trainer.export_state(), 1)
    return engine


def sampled(engine: LLMEngine) -> list[Output]:
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True, prompt_logps=True)
    return engine.generate([PROMPT, PROMPT[:3]], params)


# -- one set of weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lm_head_fp32": True}], ids=["head", "fp32-head"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_shared_model_says_what_a_copy_says_after_a_step(
    dtype: str, options: dict[str, Any]
) -> None:
    trainer = make_trainer(dtype, **options)
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64, **options))
    before = sampled(engine)
    train(trainer)
    engine.adopt_weights(1)
    after = sampled(engine)
    assert after == sampled(apart(trainer))
    assert before != after and {v for one in after for v in one.versions} == {1}


def test_a_step_without_a_repack_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the matrices' prepacked copies, which both engines read, stay the old ones."""
    trainer = make_trainer("bf16")
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64))
    with monkeypatch.context() as patch:
        patch.setattr(PackedLinear, "repack", lambda self: None)
        patch.setattr(Transformer, "lend_packed", lambda self: None)  # else there were none
        train(trainer)
    engine.adopt_weights(1)
    assert sampled(engine) != sampled(apart(trainer))


def test_no_decoder_is_made_over_copies_that_are_lent() -> None:
    """It would read what has been freed; products lay their weights out instead, for the same
    tokens and log-probs."""
    trainer = make_trainer("bf16")
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64))
    before, cache = sampled(engine), engine._runner.cache
    assert make_decoder(trainer.model, cache) is not None
    trainer.model.lend_packed()
    assert make_decoder(trainer.model, cache) is None
    engine.adopt_weights(0)
    assert sampled(engine) == before
    trainer.model.restore_packed()
    assert make_decoder(trainer.model, cache) is not None


def test_weights_that_nobody_published_are_not_served() -> None:
    trainer = make_trainer("bf16")
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64))
    engine.add(PROMPT, SamplingParams(max_tokens=3))
    engine.step()
    train(trainer)
    with pytest.raises(RuntimeError, match=r"version 0.*adopt_weights"):
        engine.step()
    engine.adopt_weights(1)
    engine.step()


def test_weights_that_are_not_finite_are_not_served() -> None:
    trainer = make_trainer("bf16")
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64))
    with torch.no_grad():
        trainer.model.norm[3] = torch.nan
    trainer.model.repack()
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' holds NaN"):
        engine.adopt_weights(1)
    engine.add(PROMPT, SamplingParams(max_tokens=3))
    with pytest.raises(RuntimeError, match="adopt_weights"):
        engine.step()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_request_in_flight_has_each_token_of_one_version(dtype: str) -> None:
    """It sleeps from before the update until the new weights are published, and each token's
    log-prob is, to the bit, that of the whole weights of the version it names."""
    trainer = make_trainer(dtype)
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64))
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)

    async def scenario(thread: ThreadPoolExecutor) -> tuple[Output, list[Tensor]]:
        loop = asyncio.get_running_loop()
        async with AsyncEngine(engine, executor=thread) as generator:
            publisher = make_publisher(trainer, generator)
            request = asyncio.create_task(generator.generate(PROMPT, params))
            while engine.metrics()["sampled_tokens"] < 5:
                await asyncio.sleep(0)
            exact = [make_copy(trainer)]
            async with publisher.lent():
                assert engine.is_asleep
                await loop.run_in_executor(thread, train, trainer)
            assert engine.is_asleep, "its weights are not those of its version"
            await asyncio.sleep(0.02)
            await publisher.publish(1)
            assert not engine.is_asleep
            exact.append(make_copy(trainer))
            output = await request
            return output, [score(one, output) for one in exact]

    with ThreadPoolExecutor(1) as thread:
        output, by_version = asyncio.run(asyncio.wait_for(scenario(thread), 120))
    assert set(output.versions) == {0, 1} and output.versions == sorted(output.versions)
    wanted = [
        float(by_version[version][len(PROMPT) + i]) for i, version in enumerate(output.versions)
    ]
    assert output.logps == wanted


def make_copy(trainer: Engine) -> Engine:
    model = Transformer(SHAPE)
    engine = Engine(model, EngineConfig(dtype=trainer.config.dtype))
    engine.load_weights([(name, x.clone().float()) for name, x in trainer.export_state()])
    return engine


def score(engine: Engine, output: Output) -> Tensor:
    mask = [0] * len(PROMPT) + [1] * len(output.ids)
    (logps,) = engine.forward_logprobs([Sample(tokens=PROMPT + output.ids, loss_mask=mask)])
    return logps


def test_a_step_that_changes_nothing_wakes_the_rollouts_at_once() -> None:
    trainer = make_trainer("bf16")
    engine = LLMEngine(trainer.model, InferConfig(num_blocks=64))

    async def scenario() -> None:
        async with AsyncEngine(engine) as generator:
            async with make_publisher(trainer, generator).lent():
                assert engine.is_asleep
            assert not engine.is_asleep

    asyncio.run(scenario())


# -- the bytes of a run's parts --------------------------------------------------------------------


@contextmanager
def tiny_roles(**options: Any) -> Iterator[InlineRoles]:
    config = get_preset("tiny").config()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kit, "run_sandbox"):
        rl = replace(config.rl, **options)
        config = replace(config, rl=rl, out=Path(folder), device="cpu", threads=1)
        roles = InlineRoles(Parts(config))
        try:
            yield roles
        finally:
            roles.close()


def storages() -> dict[int, int]:
    """The bytes of all memory that tensors have, by address."""
    gc.collect()
    kinds = (Tensor, nn.Parameter)
    tensors = [x for x in gc.get_objects() if type(x) in kinds and x.device.type == "cpu"]
    found = [x.untyped_storage() for x in tensors if x.layout == torch.strided]
    return {one.data_ptr(): one.nbytes() for one in found}


def bytes_of(**options: Any) -> tuple[int, int, int]:
    """(what the tensors of a run's parts take, what they should by their sizes where nothing is
    kept twice, one set of weights)."""
    before = storages()
    with tiny_roles(**options) as roles:
        total = sum(size for address, size in storages().items() if address not in before)
        model = roles.engine.model
        flat = lay_out(list(model.named_parameters()))[2]  # elements of a buffer, with its gaps
        packed = [module.packed for module in model.modules() if isinstance(module, PackedLinear)]
        copies = sum(x.nbytes for x in (*packed, model.lm_head_packed) if x is not None)
        weights = 2 * flat + copies
        masters_moments_gradients = (2 + 3 * 4) * flat  # masters: remainders of bf16 weights
        rope = sum(x.nbytes for x in model.buffers())
        cache = roles.rollout_engine._runner.cache.data.nbytes
    return total, masters_moments_gradients + weights + rope + cache, weights


def test_a_runs_parts_keep_nothing_twice() -> None:
    with tiny_roles() as roles:
        assert roles.rollout_engine.model is roles.engine.model
        assert roles.optimizer_thread is roles.compute, "one thread: nobody reads what is written"
    total, wanted, weights = bytes_of()
    assert 0 <= total - wanted < 0.05 * weights


def test_copies_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts beside the optimizer need weights of their own; so has the planted bug."""
    total, wanted, weights = bytes_of(max_staleness=1)
    assert total - wanted > 0.95 * weights
    for module in (in_process, inline):
        monkeypatch.setattr(module, "can_share_weights", lambda *_: False)
    total, wanted, weights = bytes_of()
    assert total - wanted > 0.95 * weights


def test_who_may_share() -> None:
    config = get_preset("smollm2").config()
    assert can_share_weights(replace(config, lora=LoraOptions(rank=4, base_dtype="int8")), CPU)
    assert can_share_weights(config, CPU)
    assert not can_share_weights(config, torch.device("cuda:0"))
    for other in (
        replace(config, rl=replace(config.rl, max_staleness=1)),
        replace(config, lora=LoraOptions(rank=4)),
        replace(config, engine=replace(config.engine, in_flight="wait")),
        mock.Mock(wraps=config, engine=mock.Mock(quantization="fp8", in_flight="recompute")),
    ):
        if isinstance(other, mock.Mock):
            other.rl, other.lora = config.rl, config.lora
        assert not can_share_weights(other, CPU)


def test_a_trainer_keeps_none_of_what_it_was_loaded_from() -> None:
    model = Transformer(SHAPE)
    given = [x.data.untyped_storage().data_ptr() for x in model.parameters()]
    engine = Engine(model, EngineConfig(dtype="bf16"))
    now = {x.data.untyped_storage().data_ptr() for x in engine.model.parameters()}
    assert len(now) == 1 and not now & set(given)
