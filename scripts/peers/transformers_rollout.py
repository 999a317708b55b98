"""Plays the agent rollouts through transformers.generate, all members in one batch; one JSON line.

usage: transformers_rollout.py MODEL_FOLDER fp32|bf16 NUM_THREADS

Every turn of every member has the same length, so the peer needs no padding and wastes nothing.
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
from workload import AGENT_TOKENS, TURN, TURNS, agent_observations, agent_prompts  # noqa: E402

torch.set_num_threads(threads)
torch.manual_seed(0)
transformers.logging.set_verbosity_error()
kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval()
model.generation_config.eos_token_id = None
model.config.eos_token_id = None


def generate(contexts, tokens):
    ids = torch.tensor(contexts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=2,
        )
    return out[:, ids.shape[1] :].tolist()


contexts, observations = agent_prompts(), agent_observations()
generate([contexts[0][:32]] * 2, 8)  # warm-up
start = time.perf_counter()
for turn in range(TURNS):
    for i, ids in enumerate(generate(contexts, TURN)):
        contexts[i] += ids + (observations[turn][i] if turn < TURNS - 1 else [])
seconds = time.perf_counter() - start
print(
    json.dumps(
        {
            "seconds": seconds,
            "tokens_per_s": AGENT_TOKENS / seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": transformers.__version__,
        }
    )
)
