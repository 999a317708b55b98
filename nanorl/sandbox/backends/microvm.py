"""`microvm`: a virtual machine for every program, restored from a snapshot.

QEMU, without a network, a disk or any device but one port: a kernel of its own is between the
program and this machine's, and QEMU itself runs under an unused user id, with its own filter and in
a memory cgroup. The guest is the machine's first process; it is booted once when the sandbox opens,
told its limits, and written to a file from which every box is started, with fresh randomness and
the right time.
KVM is used where a machine really comes up with it; elsewhere the processor is emulated, ten times
slower. The kernel and the files come from scripts/make_sandbox_image.sh.
Left out: QEMU's machine `microvm` (Debian's kernel hangs in it), other processors than x86-64.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanorl.sandbox import memory_limits as memory
from nanorl.sandbox import protocol, seccomp
from nanorl.sandbox import stream_frames as frames
from nanorl.sandbox.backends import worker_frames
from nanorl.sandbox.backends.box import BoxBrokenError, Launch, SandboxBox, guest_config
from nanorl.sandbox.base import MIB, SandboxFailure, SandboxSpec, SandboxUnavailable
from nanorl.sandbox.bwrap import rlimits, unused_uid
from nanorl.sandbox.canary import CODE, walls_without

_REMEDY = (
    "as root: apt install qemu-system-x86 mmdebstrap busybox-static cpio; "
    "bash scripts/make_sandbox_image.sh microvm FOLDER; then --sandbox-image FOLDER"
)
_MACHINE = """
-M pc -smp 1 -nodefaults -no-user-config -display none -no-reboot
-chardev stdio,id=port,signal=off -device virtio-serial-pci -device virtserialport,chardev=port
-sandbox on,obsolete=deny,elevateprivileges=deny,resourcecontrol=deny
"""
_USER = 1000
_KERNELS_BYTES = 96 * MIB
_EMULATORS_BYTES = 256 * MIB  # QEMU's own, its translated code included
_KVM_LIMIT_S, _BOOT_LIMIT_S = 20.0, 240.0
_FIRST_INDEX = 90  # of the machine that is booted: no box has this number


class MicrovmBackend:
    """Starts guests in virtual machines."""

    tier = "microvm"
    runs_per_box = 1
    start_limit_s = 60.0
    question = CODE
    refused_jobs: Mapping[int, str] = {}

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.qemu, self.image = self._parts(spec)
        self._folder = Path(tempfile.mkdtemp(prefix="nanorl-microvm-"))
        self._folder.chmod(0o755)
        for name in ("kernel", "initrd"):
            shutil.copy(self.image / name, self._folder)
            (self._folder / name).chmod(0o644)
        self._ram_bytes = self._sized()
        try:
            self.accelerator = self._boot()
        except BaseException:  # Ctrl-C too: the folder and the machine are there
            self.close()
            raise
        self.memory = f"the machine's {self._ram_bytes // MIB} MiB"
        self.details = {"qemu": self.qemu, "accelerator": self.accelerator}

    def _parts(self, spec: SandboxSpec) -> tuple[str, Path]:
        if platform.machine() != "x86_64":
            raise self.explain(f"there is no image for {platform.machine()}")
        qemu = shutil.which("qemu-system-x86_64", path="/usr/bin:/usr/local/bin:/bin")
        if qemu is None:
            raise self.explain("qemu-system-x86_64 is not installed")
        image = Path(spec.image or "~/.cache/nanorl/microvm").expanduser()
        for name in ("kernel", "initrd"):
            if not (image / name).is_file():
                raise self.explain(f"there is no {name} in {image}")
        return qemu, image

    def _sized(self) -> int:
        """The machine's memory, in bytes: what programs may have, and what the files in it take."""
        whole = self.spec.memory_bytes + _KERNELS_BYTES + 5 * (self.image / "initrd").stat().st_size
        return -(-whole // MIB) * MIB

    @property
    def promises(self) -> Mapping[str, Any]:
        """Bubblewrap's, but that a program may only not write where it is not mounted read-only."""
        refused = (13, 30)  # EACCES, EROFS
        return {
            **walls_without("processes", "capabilities", "host's folders", "strangers"),
            "held capabilities": 0,
            "host's file": False,
            "files in /tmp": [protocol.PROGRAM_NAME],
            "core dumps": 0,
            "write to /": refused,
            "write to /usr": refused,
        }

    def launch(self, index: int) -> Launch:
        incoming = f'exec "$@" 3<{self._folder}/snapshot'
        words = ["/bin/sh", "-c", incoming, "sh", *self._machine(self.accelerator)]
        launch = self._launch(index, [*words, "-incoming", "fd:3"])
        waking = worker_frames.WAKING.pack(time.time(), os.urandom(worker_frames.ENTROPY_BYTES))
        return replace(launch, first=frames.frame(worker_frames.WAKE, waking))

    def _launch(self, index: int, words: list[str]) -> Launch:
        uid = unused_uid(index)
        group = memory.create(self._ram_bytes + _EMULATORS_BYTES, 64)
        procs = ":".join(group.procs) if group else "-"
        launcher = str(Path(memory.__file__).with_name("launcher.py"))
        return Launch(
            argv=["/usr/bin/python3", "-I", "-S", launcher, str(uid), procs, "--", *words],
            environment={"PATH": "/usr/bin:/bin"},
            config=self._guest_config(),
            end=partial(_end, group),
            num_oom_kills=group.num_oom_kills if group else lambda: 0,
            leave_s=0.0,
        )

    def _guest_config(self) -> dict[str, Any]:
        limits = rlimits(self.spec, has_cgroup=True)
        return guest_config(
            self.spec,
            user=_USER,
            rlimits=limits,
            watch_bytes=0,  # the machine has no more; reading /proc is dear where it is emulated
            filter=base64.b64encode(seccomp.filter_bytes("x86_64")).decode(),
            oom_files=["/proc/vmstat"],
        )

    def _machine(self, accelerator: str) -> list[str]:
        options = f"sandbox.bytes={self.spec.tmp_bytes} sandbox.inodes={self.spec.tmp_inodes}"
        return [
            *(self.qemu, *_MACHINE.split(), "-accel", accelerator),
            *("-cpu", "host" if accelerator == "kvm" else "qemu64,+rdrand"),
            *("-m", f"{self._ram_bytes // MIB}M"),
            *("-kernel", f"{self._folder}/kernel", "-initrd", f"{self._folder}/initrd"),
            *("-append", f"quiet panic=-1 console=ttyS0 {options}", "-serial", "file:/dev/stderr"),
        ]

    def _boot(self) -> str:
        """Writes the snapshot; the accelerator with which a machine came up."""
        problem = ""
        can_try = os.access("/dev/kvm", os.R_OK | os.W_OK) and os.geteuid() != 0
        for accelerator in ["kvm"] * can_try + ["tcg"]:
            try:
                self._take_snapshot(accelerator)
                return accelerator
            except (BoxBrokenError, OSError, SandboxFailure) as error:
                problem = str(error)
        raise self.explain(f"no machine comes up: {problem}")

    def _take_snapshot(self, accelerator: str) -> None:
        folder = self._folder / "boot"
        folder.mkdir(exist_ok=True)
        uid = unused_uid(_FIRST_INDEX)
        if uid >= 0:
            os.chown(folder, uid, uid)
        control = f"unix:{folder}/control,server=on,wait=off"
        words = [*self._machine(accelerator), "-qmp", control]
        box = SandboxBox(self._launch(_FIRST_INDEX, words))
        try:
            box.wait_until_ready(_KVM_LIMIT_S if accelerator == "kvm" else _BOOT_LIMIT_S)
            _migrate(folder / "control", folder / "snapshot")
        finally:
            box.close()
        (folder / "snapshot").rename(self._folder / "snapshot")
        (self._folder / "snapshot").chmod(0o644)

    def explain(self, messages: str) -> SandboxUnavailable:
        return SandboxUnavailable(f"--sandbox microvm: {messages}", _REMEDY)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _end(group: memory.WorkerCgroup | None, is_gone: bool) -> None:
    if group is not None:
        group.kill()
        group.remove()


def _migrate(control: Path, snapshot: Path) -> None:
    """Has QEMU write the machine to a file (docs/interop/qmp-spec.txt of QEMU)."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_BOOT_LIMIT_S)
        sock.connect(str(control))
        lines = sock.makefile("rw")
        json.loads(lines.readline())  # its greeting

        def ask(command: str, **arguments: Any) -> Any:
            lines.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
            lines.flush()
            while True:
                said = json.loads(lines.readline())
                if "error" in said:
                    raise OSError(f"QEMU: {said['error']['desc']}")
                if "return" in said:
                    return said["return"]

        ask("qmp_capabilities")
        ask("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        ask("migrate", uri=f"exec:cat >{snapshot}")
        while (state := ask("query-migrate").get("status")) != "completed":
            if state in ("failed", "cancelled"):
                raise OSError(f"QEMU's snapshot {state}")
            time.sleep(0.02)
