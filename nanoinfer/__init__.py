"""The inference engine: prompts in, tokens with log-probs and policy versions out.

Requests of any number and length are decoded together (continuous batching) over a KV cache that is
cut into blocks and shared wherever prompts start alike. A token depends on its own request alone,
and its log-prob is taken by the trainer's own function, so what is sampled here can be trained on.
Weights change in place between two steps, while requests are in flight.

    llm = LLM("path/to/huggingface-folder")
    params = SamplingParams(max_tokens=32, temperature=0.7, seed=1, n=2)
    for output in llm.generate(["The capital of France is"], params):
        print(output.finish_reason, sum(output.logps), output.text)
    print(llm.chat([[{"role": "user", "content": "Hello"}]], params)[0].text)

`LLM` is for scripts. A program with a model and token ids of its own makes an `LLMEngine`, one with
coroutines an `AsyncEngine` around it; `python -m nanoinfer.server` speaks OpenAI's protocol.
One step, in reading order: engine_core.py, sequence.py, block_manager.py, scheduler.py, batch.py,
model_runner.py, kv_cache.py, sampler.py; docs/inference.md follows one request through them. They
are a dense model, whole, on a CPU, and import none of the rooms, which come in by their names:
options/        what single requests ask: truncation, penalties, grammars, texts, scores, streams
variants/       engines of other kinds: drafts, LoRA, fp8 and int8, ranks, weights that are copied
gpu/            CUDA graphs, draws on the device, sizes of its memory
chat/ dialects/ server/    tool calls and templates, protocols of other APIs, the server
http/           what all servers of the stack are put together from, and their client
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import nanoengine.model  # noqa: F401 (before torch: nanoengine tells OpenMP how long to spin)

if TYPE_CHECKING:
    from nanoinfer.async_engine import AsyncEngine
    from nanoinfer.config import InferConfig
    from nanoinfer.engine import LLMEngine
    from nanoinfer.llm import LLM
    from nanoinfer.params import Grammar, Output, SamplingParams

# What `nanoinfer.NAME` is. Imported when it is asked for: options need no PyTorch.
_HOMES = {
    "AsyncEngine": "async_engine",
    "Grammar": "params",
    "InferConfig": "config",
    "LLM": "llm",
    "LLMEngine": "engine",
    "Output": "params",
    "SamplingParams": "params",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Grammar",
    "InferConfig",
    "LLMEngine",
    "Output",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
    return getattr(import_module(f"nanoinfer.{_HOMES[name]}"), name)
