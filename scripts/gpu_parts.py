"""Parts of `gpu_check.py` that are programs of their own: they need no test runner, and CUDA may
start in the processes they make.

    python scripts/gpu_parts.py nccl|mfu|server --json FILE [--device cuda]

nccl    all-reduce and all-gather between as many GPUs as there are, at most two
mfu     the optimizer step of a model of Qwen3-0.6B's shape: tokens/s, and its share of the peak
        (`nanoengine/plan/footprint.py`: 6N + 6·L·Q·length FLOPs a token)
server  a server of the tiny model answers a completion over HTTP, and again after its first

Each writes one JSON object and ends with status 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

Result = dict[str, Any]
PEAKS = {
    "H200": 989.5e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.5e12,
    "GH200": 989.5e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
}
"""Dense bf16 FLOP/s by a part of the card's name, the first that fits; NVIDIA's data sheets (half
of a figure "with sparsity")."""
MFU_TOKENS, MFU_LENGTH, MFU_STEPS = 16_384, 2048, 5


def peak_flops(card: str) -> float | None:
    return next((peak for name, peak in PEAKS.items() if name in card), None)


def train_steps(device: str) -> Result:
    """Median seconds of a step, and what they are of the card's peak."""
    import torch
    from bench_infer_gpu import QWEN3, TINY, make_model

    from nanoengine.config import EngineConfig
    from nanoengine.engine import Engine
    from nanoengine.packing import Sample
    from nanoengine.plan.footprint import mfu
    from nanoengine.sft import num_loss_tokens, sft_loss

    is_gpu = device == "cuda"
    shape = QWEN3.model if is_gpu else TINY.model
    tokens, length = (MFU_TOKENS, MFU_LENGTH) if is_gpu else (64, 32)
    config = EngineConfig(dtype="bf16", micro_batch_tokens=tokens // 2)
    engine = Engine(make_model(shape, device), config)
    ids = torch.randint(3, shape.vocab_size, (tokens // length, length)).tolist()
    samples = [Sample(tokens=row, loss_mask=[0] + [1] * (length - 1)) for row in ids]
    seconds, losses = [], []
    for _ in range(MFU_STEPS + 1):  # the first compiles the kernels
        start = time.perf_counter()
        losses.append(engine.train_step(samples, sft_loss, num_loss_tokens)["loss"])
        seconds.append(time.perf_counter() - start)
    rate = tokens / median(seconds[1:])
    card = torch.cuda.get_device_name() if is_gpu else "cpu"
    peak = peak_flops(card)
    return {
        "card": card, "peak_flops": peak, "tokens_per_s": rate, "length": length,
        "mfu": None if peak is None else mfu(shape, rate, length, peak),
        "losses": losses, "step_s": seconds,
        "is_right": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
    }  # fmt: skip


def check_collectives(device: str) -> Result:
    """Each rank in a process of its own; what they find must be what the numbers say."""
    import torch
    import torch.multiprocessing as mp

    from nanoengine.parallel.rendezvous import open_store

    size = min(2, torch.cuda.device_count()) if device == "cuda" else 2
    if size == 0:
        raise ValueError("--device cuda: PyTorch sees no GPU here")
    with tempfile.TemporaryDirectory() as folder:
        store, meeting = open_store()
        mp.spawn(_collectives, (size, device, folder, meeting), nprocs=size)
        store.close()
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    total = size * (size + 1) / 2
    wanted = {"sum": total, "gathered": [float(i + 1) for i in range(size)]}
    skipped = [] if size == 2 else ["two ranks: there is one GPU"]
    is_right = found == [wanted] * size
    return {"num_ranks": size, "found": found, "skipped": skipped, "is_right": is_right}


def _collectives(rank: int, size: int, device: str, folder: str, meeting: Any) -> None:
    """Over the store that our meshes have, which NCCL's own threads ask, too."""
    import torch
    import torch.distributed as dist

    from nanoengine.parallel.meeting_store import MeetingStore

    is_gpu = device == "cuda"
    store = MeetingStore(meeting)
    options: Result = {"rank": rank, "world_size": size, "store": store}
    if is_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if is_gpu else "gloo", **options)
    mine = torch.full((1 << 16,), rank + 1.0, device=device)
    total = mine.clone()
    dist.all_reduce(total)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    equal = all(bool((x == x[0]).all()) for x in (total, *parts))
    found = {"sum": float(total[0]) if equal else None, "gathered": [float(x[0]) for x in parts]}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ask_server(device: str) -> Result:
    from nanorl.envs.tasks.tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model")
        command = [sys.executable, "-m", "nanoinfer.server", "--model", str(model), "--port", "0"]
        command += ["--device", device, "--model-name", "tiny"]
        log = Path(folder) / "log"
        with log.open("w") as out:
            server = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            answers = [_complete(_address(server, log)) for _ in range(2)]
        finally:
            server.terminate()
            server.wait()
        texts = [answer["choices"][0]["text"] for answer in answers]
        counts = [answer["usage"]["completion_tokens"] for answer in answers]
    return {"texts": texts, "is_right": counts == [8, 8] and texts[0] == texts[1]}


def _address(server: subprocess.Popen, log: Path) -> str:
    """What the server prints once it listens; the part's time limit ends a wait that is in vain."""
    while server.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                return word.rstrip("/")
        time.sleep(0.2)
    raise RuntimeError(f"the server ended with status {server.returncode}:\n{log.read_text()}")


def _complete(address: str) -> Result:
    body = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 8, "temperature": 0}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: Result = json.load(answer)
    return found


PARTS = {"nccl": check_collectives, "mfu": train_steps, "server": ask_server}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    found = PARTS[args.part](args.device)
    args.json.write_text(json.dumps(found))
    return 0 if found["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
