"""Times TRL's GRPOTrainer on the GRPO-step workload; prints one JSON line.

usage: trl_grpo.py MODEL_FOLDER fp32|bf16 NUM_THREADS [STEPS]

One optimizer step a rollout batch, the whole batch as one micro-batch, no KL term, completions of
exactly 64 tokens. bf16 is autocast over fp32 weights, TRL's own way. The first step warms up.
"""

import json
import os
import resource
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
steps = int(sys.argv[4]) if len(sys.argv) > 4 else 2

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from workload import STEP_COMPLETION, STEP_GROUP, STEP_TOKENS, reward, step_prompts  # noqa: E402

torch.set_num_threads(threads)
transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()


def rewards(completion_ids=None, **_):
    return [reward(ids) for ids in completion_ids]


class Clock(transformers.TrainerCallback):
    """Wall time of every optimizer step; generation lies inside it."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)


prompts = step_prompts()
batch = len(prompts) * STEP_GROUP
config = trl.GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    bf16=dtype == "bf16",
    per_device_train_batch_size=batch,
    num_generations=STEP_GROUP,
    max_completion_length=STEP_COMPLETION,
    generation_kwargs={"min_new_tokens": STEP_COMPLETION},
    beta=0.0,
    temperature=1.0,
    learning_rate=1e-6,
    lr_scheduler_type="constant",
    max_steps=steps,
    gradient_checkpointing=False,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    seed=0,
)
clock = Clock()
trainer = trl.GRPOTrainer(
    model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    reward_funcs=rewards,
    args=config,
    train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in prompts]),
    processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
    callbacks=[clock],
)
trainer.train()
measured = sorted(clock.seconds[1:])
print(
    json.dumps(
        {
            "seconds": measured[len(measured) // 2],
            "all": clock.seconds,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "tokens": STEP_TOKENS,
            "version": trl.__version__,
        }
    )
)
