"""Sandboxes of other strengths behind one protocol, chosen by name (`--sandbox`).

    with open_sandbox("oci", SandboxSpec(timeout_s=1.0)) as sandbox:
        result = await sandbox.run("print(6 * 7)")

    auto       the default: bwrap where it runs, else wasm (choice.py, one folder up)
    bwrap      `SandboxPool`, unchanged (pool.py, one folder up)
    oci        a container of podman or docker for every program
    gvisor     runsc: the kernel's calls are answered by another kernel, in user space
    microvm    a virtual machine, restored from a snapshot for every program
    wasm       Python compiled to WebAssembly, under wasmtime
    landlock   file rules and the system-call filter, no namespaces; unsafe
    rlimits    limits alone; unsafe

What each of them was seen to stop is in docs/sandbox.md. A back end is used only if a canary that
really ran in it saw what it promises; otherwise `SandboxUnavailable` says why, and what to do. One
that isolates too little needs `allow_unsafe`. Nothing is imported of those that are not asked for.

    box.py        one started box, seen from the host; worker_frames.py: what goes in and out
    supply.py     boxes started ahead; backend_pool.py: `BoxPool`
    guest.py      the server inside; rights.py: what its programs give up
    oci.py, gvisor.py, microvm.py, wasm.py, landlock.py, rlimits.py
    wasm_module.py, wasm_guest.py, wasi_calls.py, wasi_files.py, wasm_start.py: of wasm alone
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping

from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable, WorkspaceSandbox, check_safety

BACKENDS: Mapping[str, str] = {
    "oci": "nanorl.sandbox.backends.oci:OciBackend",
    "gvisor": "nanorl.sandbox.backends.gvisor:GvisorBackend",
    "microvm": "nanorl.sandbox.backends.microvm:MicrovmBackend",
    "wasm": "nanorl.sandbox.backends.wasm:WasmBackend",
    "landlock": "nanorl.sandbox.backends.landlock:LandlockBackend",
    "rlimits": "nanorl.sandbox.backends.rlimits:RlimitsBackend",
}
"""Back ends beside bwrap, and their classes, in the file of that name."""

_WATCHED = (
    "no memory cgroup can be created: the sandbox watches memory itself, at least every 50 ms, "
    "with at most 128 descriptors and 32 processes a program"
)


def open_sandbox(
    name: str,
    spec: SandboxSpec,
    *,
    num_workers: int = 1,
    max_workers: int | None = None,
    allow_unsafe: bool = False,
) -> WorkspaceSandbox:
    """The sandbox called `name`, `num_workers` programs at a time, or `max_workers` while programs
    wait; close it.

    Raises SandboxUnavailable, with the reason and the remedy, where it does not run here or does
    not keep what it promises; ValueError for an unknown name, impossible settings, and a back end
    that isolates too little without `allow_unsafe`.
    """
    if name in ("auto", "bwrap"):
        from nanorl.sandbox.pool import SandboxPool  # here: other back ends need none of it

        try:
            pool = SandboxPool(spec, num_workers, max_workers=max_workers)
        except SandboxUnavailable as refusal:
            name = _instead_of_bwrap(name, spec, refusal)
        else:
            if pool.capabilities.memory == "watcher":
                logging.getLogger(__name__).warning(_WATCHED)
            return pool
    if name not in BACKENDS:
        raise ValueError(f"--sandbox {name}: must be one of auto, bwrap, {', '.join(BACKENDS)}")
    check_safety(name, allow_unsafe)
    # Here: it imports from this package, and bwrap needs none.
    from nanorl.sandbox.backends.backend_pool import BoxPool

    file, _, found = BACKENDS[name].partition(":")
    backend = getattr(importlib.import_module(file), found)
    return BoxPool(backend(spec), spec, max_workers or num_workers)


def _instead_of_bwrap(name: str, spec: SandboxSpec, refusal: SandboxUnavailable) -> str:
    """The back end for `auto` where bubblewrap refused; whoever named bubblewrap is refused."""
    from nanorl.sandbox.choice import second_choice  # here: only a refusal needs it

    if name == "bwrap":
        remedy = f"{refusal.remedy}; or --sandbox auto, which takes wasm where bwrap does not run"
        raise SandboxUnavailable(refusal.reason, remedy) from refusal
    choice = second_choice(spec, refusal)
    logging.getLogger(__name__).warning("sandbox: %s", choice)
    return choice.name
