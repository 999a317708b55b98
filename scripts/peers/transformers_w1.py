"""Runs W1 through transformers.generate as one left-padded batch; one JSON line.

usage: transformers_w1.py MODEL_FOLDER fp32|bf16 NUM_THREADS

The batch runs as long as its longest request: that is what a static batch costs.
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


prompts, sizes = w1_requests()
generate([prompts[0][:32]] * 2, [8, 8])  # warm-up
start = time.perf_counter()
outputs = generate(prompts, sizes)
seconds = time.perf_counter() - start
print(
    json.dumps(
        {
            "seconds": seconds,
            "tokens_per_s": sum(sizes) / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": transformers.__version__,
            "outputs": outputs,
        }
    )
)
