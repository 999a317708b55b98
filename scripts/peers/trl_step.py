"""GRPO steps of TRL's GRPOTrainer, timed; trl_grpo.py and trl_vision.py say of what.

One optimizer step a rollout batch, the whole batch as one micro-batch, no KL term, completions of
one length. bf16 is autocast over fp32 weights, TRL's own way. The first step warms up.
"""

import os
import resource
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import torch
import transformers
import trl
from workload import reward


class Clock(transformers.TrainerCallback):
    """Wall and processor time of every optimizer step; generation lies inside it."""

    def __init__(self):
        self.seconds, self.cpu_s = [], []

    def on_step_begin(self, *_, **__):
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)
        self.cpu_s.append(time.process_time() - self.cpu)


def rewards(completion_ids=None, **_):
    return [reward(ids) for ids in completion_ids]


def quiet(threads):
    """Before a model is loaded."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def timed_steps(model, processing, rows, *, members, completion, dtype, steps):
    """The median step of all but the first, as a row's JSON has it."""
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=dtype == "bf16",
        per_device_train_batch_size=len(rows) * members,
        num_generations=members,
        max_completion_length=completion,
        generation_kwargs={"min_new_tokens": completion},
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
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processing,
        callbacks=[clock],
    )
    trainer.train()
    measured = sorted(zip(clock.seconds[1:], clock.cpu_s[1:], strict=True))
    seconds, cpu_s = measured[len(measured) // 2]
    return {
        "seconds": seconds,
        "cpu_util": cpu_s / seconds / torch.get_num_threads(),
        "all": clock.seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "version": trl.__version__,
    }
