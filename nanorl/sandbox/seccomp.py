"""The system-call filter: which calls a program may make, assembled to classic BPF.

Default deny (EPERM). A handful of calls are decided by one argument: `clone` without namespace
flags, sockets of the unix family only, `prlimit64` on oneself, listed `ioctl`s, `prctl`s, `fcntl`s
and socket options. File locks succeed without being taken: a program's processes do not exclude one
another by them, and the host's never wait for a program. What is absent is absent on purpose:
ptrace, process_vm_*, memfd_create, SysV and POSIX message queues, shared memory and semaphores,
keyctl, bpf, perf, io_uring, userfaultfd, the mount calls, setns, unshare, everything that changes
credentials or the clock.

A pure-Python assembler (no libseccomp): the allowlist becomes a binary search over call numbers,
so the kernel caches the answer for every call that needs no argument.
Left out: 32-bit programs (another audit architecture is killed, x32 gets ENOSYS).
Format: linux/filter.h, linux/seccomp.h; numbers: asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Calls as name:x86_64/aarch64; an empty side does not exist there. Those of CHECKED pass for some
# arguments only.
ALLOWED = """
read:0/63 write:1/64 open:2/ close:3/57 stat:4/ fstat:5/80 lstat:6/ poll:7/ lseek:8/62 mmap:9/222
mprotect:10/226 munmap:11/215 brk:12/214 rt_sigaction:13/134 rt_sigprocmask:14/135
rt_sigreturn:15/139 pread64:17/67 pwrite64:18/68 readv:19/65 writev:20/66 access:21/ pipe:22/
select:23/ sched_yield:24/124 mremap:25/216 msync:26/227 madvise:28/233 dup:32/23 dup2:33/
pause:34/ nanosleep:35/101 getitimer:36/102 alarm:37/ setitimer:38/103 getpid:39/172
sendfile:40/71 connect:42/203 accept:43/202 sendto:44/206 recvfrom:45/207 sendmsg:46/211
recvmsg:47/212 shutdown:48/210 bind:49/200 listen:50/201 getsockname:51/204 getpeername:52/205
fork:57/ vfork:58/ execve:59/221 exit:60/93 wait4:61/260 kill:62/129
uname:63/160 fsync:74/82 fdatasync:75/83 truncate:76/45 ftruncate:77/46
getdents:78/ getcwd:79/17 chdir:80/49 fchdir:81/50 rename:82/ mkdir:83/ rmdir:84/ creat:85/
link:86/ unlink:87/ symlink:88/ readlink:89/ chmod:90/ fchmod:91/52 chown:92/ fchown:93/55
lchown:94/ umask:95/166 gettimeofday:96/169 getrlimit:97/163 getrusage:98/165 sysinfo:99/179
times:100/153 getuid:102/174 getgid:104/176 geteuid:107/175 getegid:108/177 setpgid:109/154
getppid:110/173 getpgrp:111/ setsid:112/157 getgroups:115/158 getresuid:118/148 getresgid:120/150
getpgid:121/155 getsid:124/156 capget:125/90 rt_sigpending:127/136 rt_sigtimedwait:128/137
rt_sigqueueinfo:129/138 rt_sigsuspend:130/133 sigaltstack:131/132 utime:132/ mknod:133/
statfs:137/43 fstatfs:138/44 getpriority:140/141 setpriority:141/140 sched_getparam:143/121
sched_getscheduler:145/120 sched_get_priority_max:146/125 sched_get_priority_min:147/126
sched_rr_get_interval:148/127 mlock:149/228 munlock:150/229 mlock2:325/284 arch_prctl:158/
setrlimit:160/164 gettid:186/178 readahead:187/213 getxattr:191/8 lgetxattr:192/9 fgetxattr:193/10
listxattr:194/11 llistxattr:195/12 flistxattr:196/13 tkill:200/130 time:201/ futex:202/98
sched_setaffinity:203/122 sched_getaffinity:204/123 epoll_create:213/ getdents64:217/61
set_tid_address:218/96 restart_syscall:219/128 fadvise64:221/223 timer_create:222/107
timer_settime:223/110 timer_gettime:224/108 timer_getoverrun:225/109 timer_delete:226/111
clock_gettime:228/113 clock_getres:229/114 clock_nanosleep:230/115 exit_group:231/94
epoll_wait:232/ epoll_ctl:233/21 tgkill:234/131 utimes:235/ waitid:247/95 openat:257/56
mkdirat:258/34 mknodat:259/33 fchownat:260/54 futimesat:261/ newfstatat:262/79 unlinkat:263/35
renameat:264/38 linkat:265/37 symlinkat:266/36 readlinkat:267/78 fchmodat:268/53 faccessat:269/48
pselect6:270/72 ppoll:271/73 set_robust_list:273/99 get_robust_list:274/100 splice:275/76
tee:276/77 sync_file_range:277/84 utimensat:280/88 epoll_pwait:281/22 signalfd:282/
timerfd_create:283/85 eventfd:284/ fallocate:285/47 timerfd_settime:286/86 timerfd_gettime:287/87
accept4:288/242 signalfd4:289/74 eventfd2:290/19 epoll_create1:291/20 dup3:292/24 pipe2:293/59
preadv:295/69 pwritev:296/70 rt_tgsigqueueinfo:297/240 recvmmsg:299/243 sendmmsg:307/269
getcpu:309/168 renameat2:316/276 getrandom:318/278 membarrier:324/283 copy_file_range:326/285
preadv2:327/286 pwritev2:328/287 statx:332/291 rseq:334/293 pidfd_send_signal:424/424
pidfd_open:434/434 close_range:436/436 openat2:437/437 faccessat2:439/439 epoll_pwait2:441/441
futex_waitv:449/449 fchmodat2:452/452
"""
CHECKED = """
clone:56/220 clone3:435/435 socket:41/198 socketpair:53/199 prlimit64:302/261 setsockopt:54/208
getsockopt:55/209 ioctl:16/29 prctl:157/167 fcntl:72/25 flock:73/32
"""

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOL_SOCKET, _IPPROTO_TCP = 1, 6
_TCP_OPTIONS = (1, 4, 5, 6, 12, 18)  # NODELAY KEEP{IDLE,INTVL,CNT} QUICKACK USER_TIMEOUT
_BUFFER_OPTIONS = (7, 8, 32, 33)  # SO_{SND,RCV}BUF and their FORCE forms: pretended, not done
_SOCKET_OPTIONS = (2, 9, 13, 16, 20, 21)  # REUSEADDR KEEPALIVE LINGER PASSCRED RCVTIMEO SNDTIMEO
# TYPE ERROR SNDBUF RCVBUF PEERCRED ACCEPTCONN PROTOCOL DOMAIN: not the cookies, which are numbered
# through all executions.
_READ_OPTIONS = (*_SOCKET_OPTIONS, 3, 4, 7, 8, 17, 30, 38, 39)
# A lock on a file of the host would block the host, and the kernel counts no lock's memory.
_LOCKS = (6, 7, 37, 38)  # SETLK(W) and their OFD forms: pretended, not done
# DUPFD, {GET,SET}{FD,FL}, GETLK, {SET,GET}{OWN,SIG,OWN_EX}, OFD_GETLK, DUPFD_CLOEXEC,
# {SET,GET}PIPE_SZ: not leases, notification, or the write hints that stay with a file.
_FCNTLS = (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 15, 16, 36, 1030, 1031, 1032)
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS GWINSZ FIONREAD NBIO (N)CLEX
# PDEATHSIG, GET_DUMPABLE, NAME, GET_SECCOMP, CAPBSET_READ, TIMERSLACK, GET_NO_NEW_PRIVS
_PRCTLS = (1, 2, 3, 15, 16, 21, 23, 29, 30, 39)
_PR_SET_DUMPABLE = 4

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06


@dataclass(frozen=True)
class Instruction:
    """One `struct sock_filter`; jump offsets count from the next instruction."""

    code: int
    k: int
    jump_true: int = 0
    jump_false: int = 0

    def pack(self) -> bytes:
        return struct.pack("<HBBI", self.code, self.jump_true, self.jump_false, self.k)


def assemble(machine: str, has_loopback: bool = False) -> list[Instruction]:
    """The filter for `machine` (`platform.machine()`), as instructions. `has_loopback`: sockets of
    the internet families too, for a program in a network namespace where there is nothing else."""
    if machine not in _AUDIT_ARCH:
        raise ValueError(
            f"no system-call table for {machine!r}: the sandbox knows {sorted(_AUDIT_ARCH)}; "
            "run on one of these"
        )
    program = [
        Instruction(_LOAD, 4),
        Instruction(_JEQ, _AUDIT_ARCH[machine], 1, 0),
        Instruction(_RET, KILL_PROCESS),
        Instruction(_LOAD, 0),
    ]
    if machine == "x86_64":
        program += [Instruction(_JGE, _X32_BIT, 0, 1), _deny(errno.ENOSYS)]
    for name, number in syscall_numbers(CHECKED, machine).items():
        body = _check_loopback(name) if has_loopback else []
        body = body or _check(name)
        program += [Instruction(_JEQ, number, 0, len(body)), *body]
    program += _search(*_ranges(syscall_numbers(ALLOWED, machine).values()))
    return program


def filter_bytes(machine: str, has_loopback: bool = False) -> bytes:
    """The filter as the array that `struct sock_fprog` points to."""
    return b"".join(instruction.pack() for instruction in assemble(machine, has_loopback))


def syscall_numbers(table: str, machine: str) -> dict[str, int]:
    """Name to number of every call in `table` that this kind of machine has."""
    side = list(_AUDIT_ARCH).index(machine)
    entries = (entry.split(":") for entry in table.split())
    return {name: int(n) for name, both in entries if (n := both.split("/")[side])}


def _deny(number: int) -> Instruction:
    return Instruction(_RET, _ERRNO | number)


def _argument(index: int) -> Instruction:
    """Load the low half of an argument; all the checked ones are 32-bit in the kernel."""
    return Instruction(_LOAD, 16 + 8 * index)


def _one_of(values: Sequence[int], otherwise: Instruction) -> list[Instruction]:
    """One comparison for each value; all lead to the same return at the end."""
    tests = [Instruction(_JEQ, value, len(values) - i) for i, value in enumerate(values)]
    return [*tests, otherwise, Instruction(_RET, ALLOW)]


def _pretend(values: Iterable[int]) -> list[Instruction]:
    """Instructions that report success without doing anything, for these values."""
    return [each for value in values for each in (Instruction(_JEQ, value, 0, 1), _deny(0))]


def _check(name: str) -> list[Instruction]:
    """Instructions that decide the call by its arguments; every path returns."""
    if name == "clone":
        allow = Instruction(_RET, ALLOW)
        return [
            _argument(0),
            Instruction(_JSET, _NAMESPACE_FLAGS, 0, 1),
            _deny(errno.EPERM),
            allow,
        ]
    if name == "clone3":  # its flags are in memory, out of a filter's sight; libc falls back
        return [_deny(errno.ENOSYS)]
    if name in ("socket", "socketpair"):
        return [_argument(0), *_one_of([_AF_UNIX], _deny(errno.EAFNOSUPPORT))]
    if name == "prlimit64":
        return [_argument(0), *_one_of([0], _deny(errno.EPERM))]
    if name == "setsockopt":
        return _check_setsockopt()
    if name == "getsockopt":
        wrong_level = [Instruction(_JEQ, _SOL_SOCKET, 1, 0), _deny(errno.EPERM)]
        options = _one_of(_READ_OPTIONS, _deny(errno.ENOPROTOOPT))
        return [_argument(1), *wrong_level, _argument(2), *options]
    if name == "flock":
        return [_deny(0)]
    if name == "fcntl":
        return [_argument(1), *_pretend(_LOCKS), *_one_of(_FCNTLS, _deny(errno.EINVAL))]
    if name == "ioctl":
        return [_argument(1), *_one_of(_IOCTLS, _deny(errno.ENOTTY))]
    assert name == "prctl", f"no rule for {name}"
    return [_argument(0), *_one_of(_PRCTLS, _deny(errno.EPERM))]


def _check_loopback(name: str) -> list[Instruction]:
    """The rules that differ where there is a loopback device; empty where none does."""
    if name == "socket":
        families = (_AF_UNIX, _AF_INET, _AF_INET6)
        return [_argument(0), *_one_of(families, _deny(errno.EAFNOSUPPORT))]
    if name == "prctl":  # for the guard, which hides from its program: who hides gains nothing else
        return [_argument(0), *_one_of((*_PRCTLS, _PR_SET_DUMPABLE), _deny(errno.EPERM))]
    if name == "setsockopt":
        others = _check_setsockopt()
        options = _one_of(_TCP_OPTIONS, _deny(errno.ENOPROTOOPT))
        is_tcp = Instruction(_JEQ, _IPPROTO_TCP, 0, 1 + len(options))
        return [_argument(1), is_tcp, _argument(2), *options, *others]
    return []


def _check_setsockopt() -> list[Instruction]:
    body = [
        _argument(1),
        Instruction(_JEQ, _SOL_SOCKET, 1, 0),
        _deny(errno.EPERM),
        _argument(2),
    ]
    allowed = _one_of(_SOCKET_OPTIONS, _deny(errno.EPERM))
    return [*body, *_pretend(_BUFFER_OPTIONS), *allowed]


def _ranges(numbers: Iterable[int]) -> tuple[list[int], list[int]]:
    """The call numbers at which the answer changes, and the answers between them."""
    allowed = set(numbers)
    bounds = [n for n in range(max(allowed) + 2) if (n in allowed) != (n - 1 in allowed)]
    actions = [_deny(errno.EPERM).k] + [
        ALLOW if n in allowed else _deny(errno.EPERM).k for n in bounds
    ]
    return bounds, actions


def _search(bounds: list[int], actions: list[int]) -> list[Instruction]:
    """A binary search tree: fewer comparisons than a list. Its leaves are two shared returns, since
    the kernel translates every instruction for every execution."""
    answers = sorted(set(actions))
    ends = {action: len(bounds) + i for i, action in enumerate(answers)}
    assert len(bounds) + len(answers) <= 256, "a jump is longer than a byte can say"

    def tree(low: int, high: int, at: int) -> list[Instruction]:
        if low == high:
            return []
        middle = (low + high) // 2
        left = tree(low, middle, at + 1)
        right = tree(middle + 1, high, at + 1 + len(left))
        if_below = 0 if left else ends[actions[middle]] - at - 1
        if_not = len(left) if right else ends[actions[middle + 1]] - at - 1
        return [Instruction(_JGE, bounds[middle], if_not, if_below), *left, *right]

    return [*tree(0, len(bounds), 0), *(Instruction(_RET, action) for action in answers)]
