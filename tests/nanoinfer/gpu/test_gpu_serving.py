"""Serving on a GPU that is not there (fake_cuda.py): every tensor of a step lies on the GPU, a step
goes up in one copy that nobody waits for, and its result comes down in one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from fake_cuda import SHAPE, Copy, FakeCuda, WrongDevice, fake_gpu
from tiny_text import save_folder

from nanoengine.formats.hf import export_state
from nanoengine.model.transformer import Transformer
from nanoinfer.config import CacheKind, InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.gpu.cuda_graph import run_plainly
from nanoinfer.params import SamplingParams
from nanoinfer.variants import full_runner, parts

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [5, 6, 7, 8, 9, 14, 15]]
REQUESTS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.1,
        "logit_bias": {3: 2.0},
    },
    "allowed": {"allowed_token_ids": (1, 4, 95)},
    "reported": {"top_logps": 4, "prompt_logps": True},
    "several": {"n": 3, "temperature": 0.5},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(parts, "CudaCapture", lambda device: run_plainly)
    with fake_gpu() as gpu:
        yield gpu


def make_engine(**options: Any) -> LLMEngine:
    model = Transformer(SHAPE, torch.bfloat16, "cuda:0")
    model.init_weights(0)
    return LLMEngine(model, InferConfig(**options))


def run_watched(gpu: FakeCuda, engine: LLMEngine, each: list[SamplingParams]) -> None:
    """Run requests to their end; every step must be one copy up and one down."""
    for prompt, params in zip(PROMPTS, each, strict=False):
        for member in params.members():
            engine.add(prompt, member)
    gpu.take()
    num_steps = 0
    while engine.num_unfinished:
        engine.step()
        require_one_each_way(gpu.take())
        num_steps += 1
    assert num_steps > 5


def require_one_each_way(copies: list[Copy]) -> None:
    kinds = [copy.kind for copy in copies]
    assert kinds == ["upload", "download"], [f"{copy.kind} at {copy.where}" for copy in copies]
    assert copies[0].is_async, copies[0]


@pytest.mark.parametrize("has_graphs", [True, False], ids=["static", "eager"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_step_is_one_copy_up_and_one_down(gpu: FakeCuda, name: str, has_graphs: bool) -> None:
    engine = make_engine(cuda_graphs=has_graphs)
    params = SamplingParams(max_tokens=6, ignore_eos=True, **REQUESTS[name])  # type: ignore[arg-type]
    run_watched(gpu, engine, [params] * 3)
    assert gpu.launches["sample_kernel"] > 5
    assert ("penalties_kernel" in gpu.launches) == (name == "penalties")
    assert ("bitmask_kernel" in gpu.launches) == (name == "allowed")


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_unlike_requests_preemption_and_guesses_are_no_more_copies(
    gpu: FakeCuda, kind: CacheKind
) -> None:
    engine = make_engine(num_blocks=6, block_size=4, kv_cache_dtype=kind, speculate=3)
    each = [
        SamplingParams(max_tokens=9, ignore_eos=True, **options)  # type: ignore[arg-type]
        for options in ({"top_k": 3}, {"logit_bias": {4: 1.0}}, {"top_logps": 2})
    ]
    run_watched(gpu, engine, each)
    assert engine.metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("has_graphs", [True, False], ids=["static", "eager"])
@pytest.mark.parametrize("head", [True, False], ids=["fp32-head", "bf16-head"])
def test_a_deterministic_engine_multiplies_and_attends_by_batch_invariant_kernels_alone(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, has_graphs: bool, head: bool
) -> None:
    engine = make_engine(cuda_graphs=has_graphs, lm_head_fp32=head, deterministic=True)

    def by_cublas(*_: Any) -> torch.Tensor:
        raise AssertionError("a product whose algorithm depends on the number of rows")

    for module in (torch.nn.functional, torch.Tensor, torch):
        for name in {"linear", "mm", "matmul", "__matmul__"} & set(dir(module)):
            monkeypatch.setattr(module, name, by_cublas)
    params = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logps=True)
    run_watched(gpu, engine, [params] * 3)
    assert gpu.launches["_matmul_kernel"] > 5 * (4 * SHAPE.num_layers + 1)
    assert gpu.launches["_attention_kernel"] > 5 and not gpu.launches["_decode_kernel"]
    assert gpu.launches["_stats_kernel"] >= gpu.launches["sample_kernel"] > 5


def test_an_engine_in_fp8_quantises_and_multiplies_on_the_gpu(gpu: FakeCuda) -> None:
    engine, source = make_engine(quantization="fp8"), make_engine().model
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    run_watched(gpu, engine, [params] * 3)
    assert gpu.launches["_linear_kernel"] > 5 * 4 * SHAPE.num_layers
    engine.update_weights(export_state(source), 1)
    assert [copy.kind for copy in gpu.take()] == ["download"]
    run_watched(gpu, engine, [params] * 3)


def test_a_prefill_chunk_that_samples_nothing_is_not_waited_for(gpu: FakeCuda) -> None:
    engine = make_engine(max_batch_tokens=4, max_num_seqs=4)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=2))
    gpu.take()
    engine.step()
    assert [copy.kind for copy in gpu.take()] == ["upload"]


def test_new_weights_are_checked_in_one_copy_and_a_sleeper_wakes_on_the_gpu(gpu: FakeCuda) -> None:
    engine, source = make_engine(), make_engine().model
    engine.generate(PROMPTS, SamplingParams(max_tokens=3))
    engine.sleep()
    gpu.take()
    engine.update_weights(export_state(source), 1)
    assert [copy.kind for copy in gpu.take()] == ["download"]
    engine.wake()
    assert engine._runner.cache.data.is_cuda
    assert len(engine.generate(PROMPTS, SamplingParams(max_tokens=3))) == 3
    assert gpu.launches["_decode_kernel"] > 0


def test_copies_up_are_a_few_bytes_a_request_and_no_logits_come_down(gpu: FakeCuda) -> None:
    engine = make_engine()
    engine.add(PROMPTS[0], SamplingParams(max_tokens=3, repetition_penalty=1.5))
    engine.step()
    gpu.take()
    engine.step()
    up, down = gpu.take()
    assert up.num_bytes < 1024
    assert down.num_bytes == 3 * 8  # a token and two log-probs


def test_the_server_answers_from_a_gpu(
    gpu: FakeCuda, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: options, folder, engine in its own thread, route, text."""
    pytest.importorskip("starlette", reason="the extra serve")
    from starlette.testclient import TestClient

    from nanoinfer import async_engine
    from nanoinfer.server.app import make_app
    from nanoinfer.server.config import ServerConfig

    folder = tmp_path / "model"
    save_folder(folder)
    monkeypatch.setattr(
        async_engine,
        "worker_thread",
        lambda *_: ThreadPoolExecutor(1, initializer=gpu.__enter__),
    )
    app = make_app(ServerConfig(model=folder, device="cuda", dtype="bfloat16"))
    with TestClient(app.starlette(), base_url="http://127.0.0.1") as client:
        body = {"model": folder.name, "prompt": "ab", "max_tokens": 4, "logprobs": 2}
        answer = client.post("/v1/completions", content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0
    assert gpu.launches["sample_kernel"] > 0


# -- planted bugs ---------------------------------------------------------------------------------


def test_logits_that_travel_are_found(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = full_runner.sample_on_device

    def by_the_cpu(logits_SV: torch.Tensor, asked: Any) -> Any:
        logits_SV.cpu()
        return draw(logits_SV, asked)

    monkeypatch.setattr(full_runner, "sample_on_device", by_the_cpu)
    with pytest.raises(AssertionError, match="download"):
        run_watched(gpu, make_engine(), [SamplingParams(max_tokens=6)] * 3)


def test_a_host_that_reads_a_length_is_found(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = full_runner.FullRunner.hidden

    def reads(self: Any, step: Any) -> torch.Tensor:
        assert int(step.lens.max()) >= 0
        return hidden(self, step)

    monkeypatch.setattr(full_runner.FullRunner, "hidden", reads)
    with pytest.raises(AssertionError, match=r"upload at .*download at .*download at"):
        run_watched(gpu, make_engine(), [SamplingParams(max_tokens=6)] * 3)


def test_block_tables_left_on_the_cpu_are_found(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_runner, "to_device", lambda step, device: step)
    with pytest.raises((WrongDevice, ValueError), match="cpu"):
        run_watched(gpu, make_engine(), [SamplingParams(max_tokens=6)] * 3)
