"""Runs the tower, or the rollouts of W-vision, through transformers; one JSON line.

usage: transformers_vision.py tower|rollouts MODEL_FOLDER fp32|bf16 NUM_THREADS

tower: pictures that are pixel values already, one a pass and all in one, whichever is faster.
rollouts: all members in one batch of `generate`, which has a KV cache within a turn. Each turn sees
the whole conversation anew, its pictures included, since `generate` is given ids and pixel values.
Every turn of every member has the same length, so nothing is padded; a picture is decoded and
normalised once, and kept as pixel values, where a processor is often called for all of them again.
"""

import json
import os
import resource
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
work, folder, dtype, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from vision_workload import Workload  # noqa: E402

torch.set_num_threads(threads)
torch.manual_seed(0)
transformers.logging.set_verbosity_error()
kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=kind).eval()
model.generation_config.eos_token_id = None
model.config.text_config.eos_token_id = None
processor = transformers.AutoImageProcessor.from_pretrained(folder)
load = Workload.of(folder)


def pixel_values(number):
    """[1, 3, side, side] of a picture's file."""
    with Image.open(load.file(folder, number)) as picture:
        return processor(images=picture, return_tensors="pt")["pixel_values"][0].to(kind)


def look(pixels):
    return torch.cat(model.model.get_image_features(pixels).pooler_output)


def time_tower():
    pixels = torch.stack([pixel_values(number) for number in range(load.seen)])
    took = {}
    with torch.inference_mode():
        found = look(pixels[:2])  # warm-up
        for size in (1, load.seen):
            start, cpu = time.perf_counter(), time.process_time()
            for part in pixels.split(size):
                look(part)
            took[size] = (time.perf_counter() - start, time.process_time() - cpu)
    seconds, cpu_s = min(took.values())
    return {
        "seconds": seconds,
        "pictures_per_s": load.seen / seconds,
        "cpu_util": cpu_s / seconds / threads,
        "passes": {f"{size} pictures": seconds for size, (seconds, _) in took.items()},
        "features": found[0].float().tolist(),
    }


def generate(contexts, pixels, tokens):
    ids = torch.tensor(contexts)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=2,
            suppress_tokens=[load.placeholder_id],  # one that is sampled would raise
        )
    return out[:, ids.shape[1] :].tolist()


def time_rollouts():
    contexts = [[] for _ in range(load.rollouts)]
    pixels = [[] for _ in contexts]
    texts = load.texts()
    warm = pixel_values(0)
    generate([load.picture_ids()] * 2, warm.expand(2, *warm.shape), 8)
    start, cpu = time.perf_counter(), time.process_time()
    for turn in range(load.turns):
        for i, context in enumerate(contexts):
            context += texts[turn][i] + load.picture_ids()
            pixels[i].append(pixel_values(turn * load.rollouts + i))
        seen = torch.stack([torch.cat(one) for one in pixels])
        for i, ids in enumerate(generate(contexts, seen, load.turn)):
            contexts[i] += ids
    seconds = time.perf_counter() - start
    cpu_util = (time.process_time() - cpu) / seconds / threads
    return {
        "seconds": seconds,
        "tokens_per_s": load.num_sampled / seconds,
        "cpu_util": cpu_util,
    }


found = {"tower": time_tower, "rollouts": time_rollouts}[work]()
print(
    json.dumps(
        {
            **found,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "version": transformers.__version__,
        }
    )
)
