"""A plain PyTorch training step of a transformers model, in a process of its own.

    python transformers_train.py even|ragged MODEL DTYPE THREADS     prints one JSON line

Causal language modelling on every token: pad to the longest, forward with labels, backward, clip,
fused AdamW. The batch goes through in pieces of 8 or of 4 sequences, sorted by length and padded,
whichever is faster; 16 sequences of up to 512 tokens in one piece take more than 22 GB.
"""

import json
import resource
import sys
import time

import torch
import train_workload as workload
from transformers import AutoModelForCausalLM


def main() -> None:
    name, folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    best = min((measure(name, folder, kind, size) for size in (8, 4)), key=lambda r: r["seconds"])
    best["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(best))


def measure(name: str, folder: str, kind: torch.dtype, size: int) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
    times, losses = [], []
    for step in range(workload.STEPS):
        sequences = sorted(workload.batch(name, step), key=len, reverse=True)
        begin = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for lo in range(0, len(sequences), size):
            total += part(model, sequences[lo : lo + size], workload.num_tokens(name))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin)
        losses.append(total)
    return {"seconds": min(times[1:]), "loss": losses[0], "sequences_a_pass": size}


def part(model: torch.nn.Module, sequences: list[list[int]], weight: int) -> float:
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    labels = ids.masked_fill(mask == 0, -100)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    (loss / weight).backward()
    return float(loss.detach()) / weight


if __name__ == "__main__":
    main()
