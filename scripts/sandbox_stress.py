"""1,500 mixed programs through one pool: no wrong status, and nothing that grows.

Programs that succeed, fail, crash, exit, fork, fork too much, fill the disk, flood their output,
run too long and take too much memory, in an order that is shuffled with a fixed seed. What is
compared, after a warm-up and at the end: processes, descriptors of the host and of the server,
resident memory of both, mounts of the server, memory groups of this process.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

from nanorl.sandbox import SandboxPool, SandboxSpec

MIB = 1 << 20
SPEC = SandboxSpec(timeout_s=5.0, memory_bytes=128 * MIB, tmp_bytes=8 * MIB, tmp_inodes=256)
FORK_BOMB = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
except OSError:
    print("no more")
"""
FILL_DISK = """
try:
    with open("fill", "wb") as file:
        while True: file.write(b"x" * 65536)
except OSError as error:
    print(error.errno)
"""
Kind = tuple[str, str, int, float, tuple[str, ...], bytes | None]
# Name, text, times in a hundred, wall limit, statuses that are right, output (None: any).
KINDS: list[Kind] = [
    ("answer", "print(6 * 7)", 30, 5.0, ("ok",), b"42\n"),
    ("error", "print(1, flush=True)\n1 / 0", 12, 5.0, ("error",), b"1\n"),
    ("exit", "import sys; sys.exit(7)", 10, 5.0, ("error",), b""),
    ("crash", "import ctypes; ctypes.string_at(0)", 10, 5.0, ("signal",), b""),
    ("kill", "import os; os.kill(os.getpid(), 9)", 8, 5.0, ("signal",), b""),
    ("fork", "import os\nif os.fork(): print(os.wait()[1])", 10, 5.0, ("ok",), b"0\n"),
    ("daemon", "import os, time\nif os.fork() == 0: time.sleep(60)", 6, 5.0, ("ok",), b""),
    ("fork bomb", FORK_BOMB, 2, 5.0, ("ok",), b"no more\n"),
    ("disk", FILL_DISK, 6, 5.0, ("ok", "error", "signal"), None),
    ("flood", "while True: print('x' * 4096)", 3, 5.0, ("output_limit",), None),
    ("timeout", "while True: pass", 1, 0.3, ("timeout",), b""),
    ("memory", "x = [bytes([1]) * (1 << 20) for _ in range(400)]", 2, 5.0, ("oom", "error"), b""),
]


def stress(num_programs: int = 1500, num_workers: int = 2) -> int:
    """The number of things that were wrong; they are printed."""
    draw = random.Random(0)
    chosen = draw.choices(KINDS, weights=[kind[2] for kind in KINDS], k=num_programs)
    with SandboxPool(SPEC, num_workers) as pool:
        asyncio.run(run_all(pool, KINDS * 3))  # every kind once on each worker, or nearly so
        before, start = settled_census(), time.monotonic()
        found = asyncio.run(run_all(pool, chosen))
        wall_s = time.monotonic() - start
        after = settled_census()
    wrong = [line for _, line in found if line] + growth(before, after)
    print(f"{num_programs} programs in {wall_s:.1f} s: {dict(Counter(s for s, _ in found))}")
    print(f"before {before}\nafter  {after}")
    print("\n".join(wrong) or "no wrong status, no growth")
    return len(wrong)


async def run_all(pool: SandboxPool, kinds: list[Kind]) -> list[tuple[str, str]]:
    """(status, what is wrong with it) of all of them, a few waiting at a time."""
    few = asyncio.Semaphore(8)

    async def run(kind: Kind) -> tuple[str, str]:
        name, code, _, timeout_s, statuses, stdout = kind
        async with few:
            result = await pool.run(code, timeout_s=timeout_s)
        is_right = result.status in statuses and stdout in (None, result.stdout)
        return result.status.value, "" if is_right else f"{name}: {result}"

    return await asyncio.gather(*map(run, kinds))


def settled_census() -> dict[str, int]:
    """Once the next programs' processes are made: two looks in a row see the same."""
    last: dict[str, int] = {}
    for _ in range(50):
        time.sleep(0.3)
        seen = census()
        if all(seen[name] == last.get(name) for name in seen if not name.endswith("KiB")):
            break
        last = seen
    return seen


def census() -> dict[str, int]:
    """What must not grow; as root also of the inside, which others may not look at."""
    pids = descendants(os.getpid())
    own_groups = f"**/nanorl-sandbox-{os.getpid()}-*"
    counted = {
        "processes": len(pids),
        "host descriptors": len(os.listdir("/proc/self/fd")),
        "host KiB": rss_kib(os.getpid()),
        "memory groups": len(list(Path("/sys/fs/cgroup").glob(own_groups))),
    }
    if os.geteuid() == 0:
        counted["worker descriptors"] = sum(len(os.listdir(f"/proc/{p}/fd")) for p in pids)
        mounts = [Path(f"/proc/{p}/mountinfo").read_text().count("\n") for p in pids]
        counted["worker mounts"] = sum(mounts)
        counted["worker KiB"] = sum(map(rss_kib, pids))
    return counted


def growth(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Counts must be equal; memory may settle within 4 MiB."""
    allowed = {name: 4096 if name.endswith("KiB") else 0 for name in before}
    return [
        f"{name} grew from {before[name]} to {after[name]}"
        for name in before
        if after[name] > before[name] + allowed[name]
    ]


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
