"""Runs W1 or the agent rollouts through vLLM on a CPU (compiled); one JSON line.

usage: vllm_infer.py W1|W1-agent MODEL_FOLDER fp32|bf16 NUM_THREADS

Chunked prefill, 512 tokens a step and 64 sequences, as the engine it is compared with. The prefix
cache is on for the rollouts and off for W1, whose prompts share nothing. Intel's OpenMP and
tcmalloc are preloaded where they are found, as vLLM's documentation asks for.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

work, folder, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
PRELOADS = [
    *Path(sys.prefix).glob("lib/libiomp5.so"),
    *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
]
if PRELOADS and "LD_PRELOAD" not in os.environ:  # it counts from the start of a process only
    os.environ["LD_PRELOAD"] = ":".join(map(str, PRELOADS))
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ)
os.environ.update(SETTINGS)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm import __version__ as version  # noqa: E402
from workload import (  # noqa: E402
    AGENT_TOKENS,
    TURN,
    TURNS,
    agent_observations,
    agent_prompts,
    w1_requests,
)

llm = LLM(
    model=folder,
    dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
    max_model_len=512,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    enable_prefix_caching=work == "W1-agent",
    disable_log_stats=True,
    seed=0,
)


def generate(prompts, sizes, temperature, **kinds):
    params = [
        SamplingParams(
            temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False, **kinds
        )
        for n in sizes
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def play_agents():
    contexts, observations = agent_prompts(), agent_observations()
    for turn in range(TURNS):
        each = [TURN] * len(contexts)
        for i, ids in enumerate(generate(contexts, each, 1.0, logprobs=0)):
            contexts[i] += ids + (observations[turn][i] if turn < TURNS - 1 else [])


generate([w1_requests()[0][0][:32]] * 2, [8, 8], 0.0)  # warm-up
found = {}
start = time.perf_counter()
if work == "W1":
    prompts, sizes = w1_requests()
    found["outputs"] = generate(prompts, sizes, 0.0)
else:
    play_agents()
seconds = time.perf_counter() - start
num_tokens = sum(w1_requests()[1]) if work == "W1" else AGENT_TOKENS
print(
    json.dumps(
        {
            "seconds": seconds,
            "tokens_per_s": num_tokens / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": version,
            **found,
        }
    )
)
