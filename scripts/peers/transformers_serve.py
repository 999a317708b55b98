"""Serves the 32 requests through transformers.generate, greedy; one JSON line.

usage: transformers_serve.py MODEL_FOLDER fp32|bf16 NUM_THREADS

A batch runs until its longest request ends, so requests are sorted by output length. Both one
batch of all and batches of 8 are timed, and the faster counts. Tokens beyond a request's own
number are not counted.
"""

import json
import os
import resource
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])

import torch  # noqa: E402
import transformers  # noqa: E402
from workload import serve_requests  # noqa: E402

torch.set_num_threads(threads)
transformers.logging.set_verbosity_error()
kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
model.generation_config.eos_token_id = None
model.config.eos_token_id = None


def generate(requests):
    """Left-padded, as batched generation needs."""
    width = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in requests])
    is_real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.tensor(is_real),
            max_new_tokens=max(tokens for _, tokens in requests),
            do_sample=False,
            pad_token_id=0,
        )


def timed(requests, size):
    start = time.perf_counter()
    for lo in range(0, len(requests), size):
        generate(requests[lo : lo + size])
    return time.perf_counter() - start


requests = sorted(serve_requests(), key=lambda request: -request[1])
generate([(prompt[:32], 8) for prompt, _ in requests[:2]])  # warm-up
by_size = {size: timed(requests, size) for size in (len(requests), 8)}
seconds = min(by_size.values())
print(
    json.dumps(
        {
            "seconds": seconds,
            "seconds_by_batch_size": by_size,
            "tokens_per_s": sum(tokens for _, tokens in requests) / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": transformers.__version__,
        }
    )
)
