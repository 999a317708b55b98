"""Times TRL's GRPOTrainer on the GRPO-step workload (trl_step.py); prints one JSON line.

usage: trl_grpo.py MODEL_FOLDER fp32|bf16 NUM_THREADS [STEPS]
"""

import json
import sys

from trl_step import quiet, timed_steps, torch, transformers  # which it keeps offline
from workload import STEP_COMPLETION, STEP_GROUP, STEP_TOKENS, step_prompts

folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
quiet(threads)
found = timed_steps(
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
    [{"prompt": text} for text in step_prompts()],
    members=STEP_GROUP,
    completion=STEP_COMPLETION,
    dtype=dtype,
    steps=int(sys.argv[4]) if len(sys.argv) > 4 else 2,
)
print(json.dumps({**found, "tokens": STEP_TOKENS}))
