"""Runs W1 through transformers.generate in left-padded batches; one JSON line.

usage: transformers_w1.py MODEL_FOLDER fp32|bf16 NUM_THREADS

A static batch runs as long as its longest request, so requests are sorted by output length. One
batch of all and batches of 8 are both timed, and the faster counts.
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
from workload import w1_requests  # noqa: E402

torch.set_num_threads(threads)
transformers.logging.set_verbosity_error()
kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
model.generation_config.eos_token_id = None
model.config.eos_token_id = None


def generate(prompts, sizes):
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), 2)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=max(sizes), do_sample=False, pad_token_id=2
        )
    return [out[row, width : width + size].tolist() for row, size in enumerate(sizes)]


def in_batches(prompts, sizes, batch_size):
    """(outputs in the order of the prompts, seconds)."""
    order = sorted(range(len(prompts)), key=lambda i: -sizes[i])
    outputs = [[]] * len(prompts)
    start = time.perf_counter()
    for lo in range(0, len(order), batch_size):
        rows = order[lo : lo + batch_size]
        done = generate([prompts[i] for i in rows], [sizes[i] for i in rows])
        for i, ids in zip(rows, done, strict=True):
            outputs[i] = ids
    return outputs, time.perf_counter() - start


prompts, sizes = w1_requests()
generate([prompts[0][:32]] * 2, [8, 8])  # warm-up
runs = {batch_size: in_batches(prompts, sizes, batch_size) for batch_size in (len(prompts), 8)}
outputs, seconds = min(runs.values(), key=lambda run: run[1])
print(
    json.dumps(
        {
            "seconds": seconds,
            "seconds_by_batch_size": {size: run[1] for size, run in runs.items()},
            "tokens_per_s": sum(sizes) / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": transformers.__version__,
            "outputs": outputs,
        }
    )
)
