"""The filter, run in an interpreter of classic BPF of our own, for both machines."""

from __future__ import annotations

import errno
import fcntl
import platform
import re
import struct
from pathlib import Path

import pytest

from nanorl.sandbox import seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = 0x7FFF0000, 0x80000000


def decide(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """What the kernel would: the seccomp_data laid out, the instructions followed one by one."""
    data = struct.pack("<iIQ6Q", number, arch or ARCH[machine], 0, *(*args, 0, 0, 0, 0, 0, 0)[:6])
    code = seccomp.filter_bytes(machine)
    at, accumulator = 0, 0
    while True:
        op, jump_true, jump_false, k = struct.unpack_from("<HBBI", code, at * 8)
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif op == 0x06:
            return k
        else:
            is_true = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: accumulator & k}[op]
            at += jump_true if is_true else jump_false


def numbers_of(machine: str) -> dict[str, int]:
    tables = (seccomp.ALLOWED, seccomp.CHECKED)
    return {k: n for table in tables for k, n in seccomp.syscall_numbers(table, machine).items()}


def denied(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize("machine", ARCH)
def test_every_call_outside_of_the_table_is_denied(machine: str) -> None:
    numbers = numbers_of(machine)
    assert len(set(numbers.values())) == len(numbers)
    by_argument = "socket socketpair prlimit64 setsockopt getsockopt ioctl prctl fcntl"
    checked = {"clone3", "flock", *by_argument.split()}
    plain = {n for name, n in numbers.items() if name not in checked}
    for number in set(range(700)) - {numbers[name] for name in checked}:
        expected = ALLOW if number in plain else denied(errno.EPERM)
        assert decide(machine, number) == expected, number


@pytest.mark.parametrize("machine", ARCH)
def test_arguments_decide(machine: str) -> None:
    n = numbers_of(machine)
    assert decide(machine, n["clone"], 0x01200011) == ALLOW  # fork
    assert decide(machine, n["clone"], 0x003D0F00) == ALLOW  # a thread
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert decide(machine, n["clone"], 1 << bit | 17) == denied(errno.EPERM)
    assert decide(machine, n["clone3"]) == denied(errno.ENOSYS)
    for family in range(50):
        expected = ALLOW if family == 1 else denied(errno.EAFNOSUPPORT)
        assert decide(machine, n["socket"], family) == expected
        assert decide(machine, n["socketpair"], family) == expected
    assert decide(machine, n["prlimit64"], 0) == ALLOW
    assert decide(machine, n["prlimit64"], 1) == denied(errno.EPERM)
    assert decide(machine, n["setsockopt"], 3, 1, 7) == denied(0)  # SO_SNDBUF: pretended
    assert decide(machine, n["setsockopt"], 3, 1, 2) == ALLOW  # SO_REUSEADDR
    assert decide(machine, n["setsockopt"], 3, 1, 26) == denied(errno.EPERM)  # SO_ATTACH_FILTER
    assert decide(machine, n["setsockopt"], 3, 6, 2) == denied(errno.EPERM)
    assert decide(machine, n["getsockopt"], 3, 1, 4) == ALLOW  # SO_ERROR
    for option in (26, 57, 71):  # GET_FILTER, COOKIE, NETNS_COOKIE
        assert decide(machine, n["getsockopt"], 3, 1, option) == denied(errno.ENOPROTOOPT)
    assert decide(machine, n["getsockopt"], 3, 6, 4) == denied(errno.EPERM)
    assert decide(machine, n["flock"], 3, 2) == denied(0)
    for command in (fcntl.F_SETLK, fcntl.F_SETLKW, 37, 38):
        assert decide(machine, n["fcntl"], 3, command) == denied(0)
    for command in (fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETLK):
        assert decide(machine, n["fcntl"], 3, command) == ALLOW
    for command in (fcntl.F_SETLEASE, fcntl.F_NOTIFY, 1033, 1036):  # ADD_SEALS, SET_RW_HINT
        assert decide(machine, n["fcntl"], 3, command) == denied(errno.EINVAL)
    assert decide(machine, n["ioctl"], 0, 0x5401) == ALLOW  # TCGETS
    assert decide(machine, n["ioctl"], 0, 0x5412) == denied(errno.ENOTTY)  # TIOCSTI
    assert decide(machine, n["prctl"], 15) == ALLOW  # PR_SET_NAME
    assert decide(machine, n["prctl"], 22) == denied(errno.EPERM)  # PR_SET_SECCOMP
    assert decide(machine, n["prctl"], 4) == denied(errno.EPERM)  # PR_SET_DUMPABLE


@pytest.mark.parametrize("machine", ARCH)
def test_another_architecture_is_killed(machine: str) -> None:
    for arch in (0x40000003, 0x40000028, *(set(ARCH.values()) - {ARCH[machine]})):
        assert decide(machine, 0, arch=arch) == KILL


def test_x32_calls_do_not_exist() -> None:
    assert decide("x86_64", 0x40000000 | 39) == denied(errno.ENOSYS)


def test_dangerous_calls_are_in_no_table() -> None:
    words = """ptrace process_vm_readv process_vm_writev pidfd_getfd memfd_create shmget msgget
    semget mq_open keyctl add_key request_key bpf perf_event_open io_uring_setup userfaultfd mount
    umount2 pivot_root chroot setns unshare open_tree move_mount fsopen setuid capset seccomp
    personality kexec_load init_module reboot clock_settime"""
    for machine in ARCH:
        assert not set(words.split()) & set(numbers_of(machine))


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_equal_the_kernel_headers(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    text = Path(header).read_text()
    theirs = {name: int(n) for name, n in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    theirs["newfstatat"] = theirs.get("newfstatat", theirs.get("fstatat", -1))
    ours = numbers_of(machine)
    common = set(ours) & set(theirs)
    assert len(common) >= len(ours) - 3  # calls younger than the header
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}


def test_an_unknown_machine_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.assemble("riscv64")
    assert platform.machine() in ARCH
