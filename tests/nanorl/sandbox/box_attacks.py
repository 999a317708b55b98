"""Programs that attack the guard of their box or take more memory than they may; who runs them.

Used by test_agent_box.py in its own process, and as a script under another user:
`python box_attacks.py` prints one line for each that got through, and ends with their number.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from nanorl.agents.agent_program import ProgramResult, ProgramStart, run_program
from nanorl.sandbox.agent_box import AgentBox

MEMORY_BYTES = 256 << 20
_SYSCALLS = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PTRACE, READV, WRITEV, GETFD, OPENFD = {
    "x86_64": (101, 310, 311, 438, 434), "aarch64": (117, 270, 271, 438, 434)}[os.uname().machine]
guard = os.getppid()
assert guard == 1, guard
def got(what):
    print("ESCAPED", what, flush=True)
"""
_VECTOR = """
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
own = ctypes.create_string_buffer(8)
ours, theirs = Vector(ctypes.addressof(own), 8), Vector(id(libc) & ~7, 8)
arguments = (guard, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
"""
ATTACKS: Mapping[str, str] = {
    "ptrace": _SYSCALLS + "if libc.syscall(PTRACE, 16, guard, 0, 0) == 0: got('attached')\n",
    "process_vm_readv": _SYSCALLS
    + _VECTOR
    + "if libc.syscall(READV, *arguments) > 0: got('read')\n",
    "process_vm_writev": _SYSCALLS
    + _VECTOR
    + "if libc.syscall(WRITEV, *arguments) > 0: got('written')\n",
    "pidfd_getfd": _SYSCALLS + "fd = libc.syscall(OPENFD, guard, 0)\n"
    "for n in range(8):\n    if libc.syscall(GETFD, fd, n, 0) >= 0: got(f'descriptor {n}')\n",
    "its memory": _SYSCALLS
    + """
for mode in "rb", "r+b":
    try:
        with open(f"/proc/{guard}/mem", mode, buffering=0): got(f"opened {mode}")
    except OSError: pass
for name in "environ", "maps", "auxv", "stack", "syscall":
    try:
        if open(f"/proc/{guard}/{name}", "rb").read(64): got(name)
    except OSError: pass
""",
    "its descriptors": _SYSCALLS
    + """
for place in f"/proc/{guard}/fd", f"/proc/{guard}/map_files", f"/proc/{guard}/fdinfo":
    try: got(os.listdir(place))
    except OSError: pass
for name in "root", "cwd", "exe":
    try: got(os.readlink(f"/proc/{guard}/{name}"))
    except OSError: pass
""",
    "its limits": _SYSCALLS
    + """
import resource
for number in resource.RLIMIT_AS, resource.RLIMIT_NOFILE:
    try: resource.prlimit(guard, number, (1 << 20, 1 << 20)); got("limited")
    except OSError: pass
""",
    "its signals": _SYSCALLS
    + """
import signal
for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTSTP, signal.SIGINT, signal.SIGSEGV):
    try: os.kill(guard, number)
    except OSError: pass
time.sleep(0.3)
state = open(f"/proc/{guard}/stat").read().rpartition(")")[2].split()[0]
if state in "TtZX": got("state " + state)
""",
}
"""Each prints ESCAPED where it got something of its guard, or did something to it."""

# Overwrites the guard's memory with its own text: a limit that reads 256 MB reads more then.
_REWRITE = """
import os, re
guard = os.getppid()
try:
    lines = open(f"/proc/{guard}/maps").read().splitlines()
    with open(f"/proc/{guard}/mem", "r+b", buffering=0) as memory:
        for line in lines:
            if " rw" in line:
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                memory.seek(start)
                memory.write(bytes(end - start))
except OSError as error:
    pass
"""
_TAKE = """
import mmap, sys
held = []
for n in range(700):
    held.append(bytearray(b"x" * (1 << 20)))
print("ESCAPED took", len(held), "MB", flush=True)
"""
_SHARED = """
import os, select, time
told, tell = os.pipe()
for n in range(7):
    if os.fork(): continue
    os.close(told)
    held = [bytearray(b"x" * (1 << 20)) for _ in range(100)]
    os.write(tell, b"x")
    time.sleep(30)
    os._exit(0)
os.close(tell)
count = 0
while select.select([told], [], [], 10)[0] and os.read(told, 1): count += 1
if count == 7: print("ESCAPED took 700 MB", flush=True)
"""
GREEDY: Mapping[str, str] = {
    "takes it": _TAKE,
    "rewrites its guard and takes it": _REWRITE + _TAKE,
    "takes it in children": _SHARED,
    "takes it in orphans": _SHARED.replace(
        "    os.close(told)", "    os.setsid()\n    if os.fork(): os._exit(0)\n    os.close(told)"
    ),
    "takes it in files": """
for folder in "/box", "/tmp":
    with open(folder + "/large", "wb") as file:
        for n in range(200): file.write(bytes(1 << 20))
import time
time.sleep(20)
print("ESCAPED took 400 MB", flush=True)
""",
}
"""Each of them wants more than MEMORY_BYTES."""


def run(code: str, has_cgroup: bool = True) -> ProgramResult:
    """A program's life in a box."""
    box = AgentBox(memory_bytes=MEMORY_BYTES)
    if not has_cgroup and box._cgroup is not None:
        box._cgroup.remove()
        box._cgroup = None
    start = ProgramStart(
        argv=[sys.executable, "-c", code],
        environment={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        endpoints=[("127.0.0.1", 9009)],  # nobody calls it
        box=box,
    )
    return asyncio.run(run_program(start, timeout_s=60))


def breaches(has_cgroup: bool = True) -> list[str]:
    """What got through, by name."""
    found = []
    for name, code in ATTACKS.items():
        result = run(code, has_cgroup)
        if "ESCAPED" in result.stdout or result.exit_code != 0:
            found.append(f"{name}: {result}")
    for name, code in GREEDY.items():
        result = run(code, has_cgroup)
        if "ESCAPED" in result.stdout or result.reason != "memory":
            found.append(f"{name}: {result}")
    return found


def main() -> int:
    found = breaches()
    print("\n".join(found))
    print(f"uid {os.geteuid()} breaches {len(found)} of {len(ATTACKS) + len(GREEDY)}")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
