"""Times TRL's GRPOTrainer on the GRPO step with pictures, the tower trained with the rest
(trl_step.py); prints one JSON line.

usage: trl_vision.py MODEL_FOLDER fp32|bf16 NUM_THREADS [STEPS]
"""

import json
import sys

from PIL import Image
from trl_step import quiet, timed_steps, torch, transformers  # which it keeps offline
from vision_workload import Workload

folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
quiet(threads)
load = Workload.of(folder)
rows = [
    {
        "prompt": [{"role": "user", "content": text}],
        "images": [Image.open(load.file(folder, number)).convert("RGB")],
    }
    for number, text in enumerate(load.prompts())
]
found = timed_steps(
    transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32),
    transformers.AutoProcessor.from_pretrained(folder, padding_side="left"),
    rows,
    members=load.members,
    completion=load.completion,
    dtype=dtype,
    steps=int(sys.argv[4]) if len(sys.argv) > 4 else 2,
)
print(json.dumps(found))
