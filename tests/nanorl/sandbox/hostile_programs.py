"""Programs that try to get out, stay behind, or fake a result, and what the host may see of them.

Data only. `attack.py` (ATTACK_MODULE) is laid beside each of them; a program prints ESCAPED where
something succeeded that must not. That is one witness of several: sandbox_driver.py also looks at
the host's process table, its listening sockets, its secret, and at the next execution.
@TCP@, @UDP@, @UNIX@, @ABSTRACT@, @SECRET_FILE@ and @HOST_PID@ are filled in by the driver.
"""

# ruff: noqa: E501 - programs keep their own line lengths

from __future__ import annotations

from dataclasses import dataclass

ATTACK_MODULE = r"""
import errno, os, signal, socket, struct, sys, time
try:
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
except (ImportError, AttributeError, OSError):  # WebAssembly has no system calls to make
    ctypes = libc = None
def syscall(number, *args):
    result = libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
def must_fail(what, function, *args):
    try:
        result = function(*args)
    except Exception as error:
        return error
    print("ESCAPED", what, repr(result)[:200], flush=True)
def read(path):
    with open(path, "rb") as file:
        return file.read(4096)
def write(path, data=b"x"):
    with open(path, "wb", buffering=0) as file:
        return file.write(data)
"""


@dataclass(frozen=True)
class Program:
    """`statuses`: those the host may report. `stdout`: exact output, if it must be this one."""

    name: str
    code: str
    statuses: tuple[str, ...] = ("ok",)
    stdout: bytes | None = None
    stderr_part: bytes = b""
    exit_code: int | None = None
    machine: str = ""
    kind: str = ""


_KIND: list[str] = []  # of the programs that come next
_LIST: list[Program] = []


def _add(
    name: str,
    code: str,
    *statuses: str,
    stdout: bytes | None = None,
    stderr_part: bytes = b"",
    exit_code: int | None = None,
    machine: str = "",
) -> None:
    text = "from attack import *\n" + code.strip() + "\n"
    kind = _KIND[-1]
    expected = (statuses or ("ok",), stdout, stderr_part, exit_code, machine, kind)
    _LIST.append(Program(name, text, *expected))


_KIND.append("memory")
_add("memory_one_block", "x = bytearray(8 << 30)", "error", stderr_part=b"MemoryError")
_add(
    "memory_grow",
    """
kept = []
while True:
    kept.append(b"x" * (1 << 20))
""",
    "error",
    "oom",
)
_add(
    "memory_of_children_summed",
    """
for _ in range(5):
    if os.fork() == 0:
        kept = b"x" * (64 << 20)
        time.sleep(60)
time.sleep(60)
""",
    "oom",
)
_add(
    "memory_of_orphans_summed",
    """
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            kept = b"x" * (64 << 20)
            time.sleep(60)
        os._exit(0)
time.sleep(60)
""",
    "oom",
)
_add(
    "memory_shared_map",
    """
import mmap
for _ in range(4):
    region = mmap.mmap(-1, 80 << 20)
    if os.fork() == 0:
        for _ in range(80): region.write(bytes(1 << 20))
        time.sleep(60)
time.sleep(60)
""",
    "oom",
)
_add(
    "dev_shm_fill",
    """
total = 0
try:
    with open("/dev/shm/fill", "wb", buffering=0) as file:
        while total < 200 << 20:
            total += file.write(b"x" * (1 << 20))
except OSError:
    pass
if total > 20 << 20: print("ESCAPED", total)
""",
)
_add(
    "socket_buffers",
    """
total, kept = 0, []
try:
    while total < 1 << 30:
        pair = socket.socketpair()
        kept.append(pair)
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        pair[0].setblocking(False)
        try:
            while True: total += pair[0].send(b"x" * 65536)
        except BlockingIOError:
            pass
except OSError:
    pass
if total > 128 << 20: print("ESCAPED", total)
""",
)
_add(
    "memory_of_a_listeners_backlog",
    """
total = 0
for n in range(99):
    listener = socket.socket(1, 1); listener.bind(f"\\0{n}"); listener.listen(4096)
    try:
        while True:
            client = socket.socket(1, 1); client.setblocking(False); client.connect(f"\\0{n}")
            try:
                while True: total += client.send(b"x" * 65536)
            except BlockingIOError:
                client.close()
            if total > 300 << 20: print("ESCAPED", total, flush=True)
    except BlockingIOError:
        os.dup(listener.fileno())
""",
    "oom",
)
_add(
    "memory_of_mappings",
    """
libc.mmap.restype = ctypes.c_void_p
start = libc.mmap(None, ctypes.c_size_t(4096 * 40000), 3, 0x22, -1, ctypes.c_long(0))
for page in range(0, 40000, 2): libc.mprotect(ctypes.c_void_p(start + 4096 * page), ctypes.c_size_t(4096), 1)
for _ in range(25):
    if os.fork() == 0: time.sleep(60)
print("ESCAPED", flush=True)
time.sleep(60)
""",
    "oom",
)
_add(
    "memory_of_pages_copied_late",
    """
import mmap
shared, size = mmap.mmap(-1, 4096), 90 << 20
copies = bytearray(size)
for child in range(20):
    if os.fork() == 0:
        time.sleep(0.3)
        for mebibyte in range(90):
            for page in range(256): copies[(mebibyte << 20) + (page << 12)] = 1
            shared[child] = mebibyte + 1
            if sum(shared[:20]) > 400: print("ESCAPED", flush=True)
        time.sleep(60)
time.sleep(60)
""",
    "oom",
)
_add("mlock", "if libc.mlockall(3) == 0: print('ESCAPED')\n")
_add("memfd", "must_fail('memfd', os.memfd_create, 'x')")
_add(
    "stdin_grown_in_place",
    """
def grow():
    fd = os.open("/proc/self/fd/0", os.O_RDWR)
    os.ftruncate(fd, 1 << 20)
    return os.pwrite(fd, b"x", 0)
must_fail("stdin", grow)
""",
)

_KIND.append("cpu")
_add("cpu_spin", "while True: pass", "timeout")
_add(
    "cpu_spin_ignoring_signals",
    """
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "timeout",
)
_add("huge_int", "x = 3 ** (10 ** 9)", "timeout", "error", "oom")
_add("regex_backtracking", "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')", "timeout")
_add("huge_range_list", "list(range(10 ** 12))", "error", "oom", "timeout")
_add("sleep", "time.sleep(1000)", "timeout")
_add("sigstop_oneself", "os.kill(os.getpid(), signal.SIGSTOP)", "timeout")
_add(
    "spinning_children_left",
    """
for _ in range(6):
    if os.fork() == 0:
        while True: pass
""",
)
_add("deadlock", "import threading; l = threading.Lock(); l.acquire(); l.acquire()", "timeout")
_add(
    "thread_never_ends",
    "import threading; threading.Thread(target=time.sleep, args=(99,)).start()",
    "timeout",
)

_KIND.append("processes")
_add(
    "fork_bomb",
    """
while True:
    try: os.fork()
    except OSError: pass
""",
    "timeout",
    "oom",
)
_add(
    "fork_count",
    """
count = 0
try:
    for count in range(2000):
        if os.fork() == 0: time.sleep(60)
except OSError:
    pass
if count > 130: print("ESCAPED", count)
""",
)
_add(
    "thread_bomb",
    """
import threading
count = 0
threading.stack_size(65536)
try:
    for count in range(2000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except (RuntimeError, MemoryError):
    pass
if count > 130: print("ESCAPED", count)
sys.stdout.flush()
os._exit(0)
""",
)
_add(
    "daemon_double_fork",
    """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(0.01)
    os._exit(0)
os.wait()
""",
)
_add("shell_background", "os.system('sleep 1000 & sleep 1001 & setsid sleep 1002 &')")
_add(
    "child_keeps_stdout_open",
    """
if os.fork() == 0: time.sleep(1000)
print("parent", flush=True)
os._exit(0)
""",
    stdout=b"parent\n",
)
_add(
    "kill_pid_1",
    "os.kill(1, 9); os.kill(1, signal.SIGSTOP); os.kill(1, 15); print('done')",
    stdout=b"done\n",
)
# The parent is outside of the namespace: its number is 0, which would mean the program's own group.
_add(
    "kill_parent",
    "os.kill(os.getppid() or 1, 9); time.sleep(0.05); print('done')",
    stdout=b"done\n",
)
_add(
    "pid_1_is_out_of_reach",
    """
for name in ("mem", "maps", "smaps_rollup", "environ", "auxv", "syscall", "stack", "pagemap"):
    must_fail(name, read, f"/proc/1/{name}")
    must_fail(name, write, f"/proc/1/{name}")
must_fail("descriptors", os.listdir, "/proc/1/fd")
must_fail("links", os.readlink, "/proc/1/cwd")
must_fail("its files", os.listdir, "/proc/1/root")
for number in [*range(1, 32), 34, 64]:
    os.kill(1, number)
time.sleep(0.05)
print("done")
""",
    stdout=b"done\n",
)
_add(
    "kill_everyone",
    "if os.fork() == 0: time.sleep(99)\nos.kill(-1, 9); print(os.wait()[1])",
    stdout=b"9\n",
)
_add("kill_group", "os.killpg(0, 9)", "signal", exit_code=-9)
_add(
    "kill_host_pids",
    """
for pid in range(3, 5000):
    must_fail(f"kill {pid}", os.kill, pid, 9)
must_fail("kill host", os.kill, @HOST_PID@, 9)
""",
)
_add("kill_oneself", "os.kill(os.getpid(), 9)", "signal", exit_code=-9)
_add("terminate_oneself", "os.kill(os.getpid(), 15)", "signal", exit_code=-15)
_add("segfault", "ctypes.string_at(0)", "signal", exit_code=-11)
_add("abort", "os.abort()", "signal", exit_code=-6)
_add(
    "alarm", "signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(5)", "signal"
)
_add(
    "many_timers",
    """
count = 0
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_long), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("pad", ctypes.c_char * 64)]
event, timer = Event(notify=1), ctypes.c_void_p()
while count < 20000 and libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0: count += 1
if count == 20000: print("ESCAPED")
""",
)

_KIND.append("files")
_add(
    "tmp_fill",
    """
total = 0
try:
    for n in range(64):
        with open(f"fill{n}", "wb", buffering=0) as file:
            for _ in range(16): total += file.write(b"x" * (1 << 20))
except OSError:
    pass
if total > 70 << 20: print("ESCAPED", total)
""",
    "ok",
    "oom",
)
_add(
    "inode_fill",
    """
count = 0
try:
    for count in range(20000): os.close(os.open(f"f{count}", os.O_CREAT | os.O_WRONLY))
except OSError:
    pass
if count > 5000: print("ESCAPED", count)
""",
)
_add(
    "sparse_file",
    "must_fail('truncate', os.truncate, os.open('s', os.O_CREAT | os.O_RDWR), 1 << 40)",
)
_add(
    "deep_folders",
    """
try:
    for _ in range(3000):
        os.mkdir("d"); os.chdir("d")
except OSError:
    pass
""",
)
_add("open_files", "must_fail('files', lambda: [os.open('/dev/null', 0) for _ in range(5000)])")
_add(
    "read_host_files",
    """
must_fail("secret", read, "@SECRET_FILE@")
for path in ("/etc/shadow", "/etc/hostname", "/root", "/home", "/var/lib", "/sys/kernel", "/boot",
             "/proc/1/root/etc/shadow", "/proc/kcore", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda"):
    must_fail(path, read if not os.path.isdir(path) else os.listdir, path)
print(open("/etc/passwd").read())
""",
    stdout=b"sandbox:x:1000:1000::/tmp:/bin/sh\n\n",
)
_add(
    "path_tricks",
    "for p in ('/proc/self/root', '/proc/self/cwd/..', '/tmp/..', '/..'): must_fail(p, read, p + '@SECRET_FILE@')",
)
_add(
    "write_outside",
    """
for folder in ("/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/dev", "/run", "/sbx", "/var", "/proc", os.path.dirname(os.__file__)):
    must_fail(folder, write, folder + "/planted")
for path in ("/sbx/worker.py", "/sbx/filter.bpf", "/etc/passwd", sys.executable, os.__file__):
    must_fail(path, write, path)
    must_fail(path, lambda: (os.chmod(path, 0o777), os.stat(path).st_mode & 0o2 or 1 / 0))
""",
)
_add(
    "proc_sys",
    """
for root, _, names in os.walk("/proc/sys"):
    for name in names:
        path = os.path.join(root, name)
        # Open to everyone, but the write wants CAP_CHECKPOINT_RESTORE; it counts this namespace.
        if name == "ns_last_pid": must_fail(path, write, path, b"77"); continue
        try: fd = os.open(path, os.O_WRONLY)
        except OSError: continue
        print("ESCAPED", path)
for path in ("/proc/sysrq-trigger", "/proc/1/oom_score_adj", "/proc/1/mem", "/proc/acpi", "/proc/timer_stats"):
    must_fail(path, os.open, path, os.O_WRONLY)
""",
)
_add(
    "other_processes",
    """
pids = [p for p in os.listdir("/proc") if p.isdigit()]
if sorted(pids) != sorted(["1", str(os.getpid())]): print("ESCAPED", pids)
for name in ("environ", "mem", "maps", "auxv", "stack", "fd", "fdinfo", "root", "cwd", "exe", "ns"):
    path = "/proc/1/" + name
    if name in ("fd", "fdinfo"): must_fail(path, os.listdir, path)
    elif name == "ns": must_fail(path, os.readlink, path + "/pid")
    elif name in ("root", "cwd", "exe"): must_fail(path, os.readlink, path)
    else: must_fail(path, lambda: read(path) or 1 / 0)
""",
)
_add("environment", "print(dict(os.environ)); print(read('/proc/self/environ'))")
_add("zip_environment", "import zlib; print(zlib.compress(repr(dict(os.environ)).encode()).hex())")
_add(
    "devices",
    """
extra = set(os.listdir("/dev")) - {"null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx",
                                   "shm", "fd", "core", "stdin", "stdout", "stderr", "console"}
if extra: print("ESCAPED", extra)
must_fail("mknod", os.mknod, "/tmp/mem", 0o20666, os.makedev(1, 1))
must_fail("block", os.mknod, "/tmp/disk", 0o60666, os.makedev(254, 0))
""",
)
_add(
    "remove_everything",
    "import shutil; shutil.rmtree('/', ignore_errors=True); os.system('rm -rf /tmp/* /usr/* 2>/dev/null')",
    "ok",
    "timeout",
)
_add(
    "chmod_tmp",
    "os.chmod('/tmp', 0); os.chmod('/tmp/program.py', 0)",
    "ok",
    "error",
)
_add(
    "hard_link_out",
    "must_fail('link', os.link, '/usr/bin/python3', '/tmp/p'); os.symlink('@SECRET_FILE@', 'l'); must_fail('l', read, 'l')",
)

_KIND.append("network")
_add("tcp", "must_fail('tcp', socket.create_connection, ('127.0.0.1', @TCP@), 1)")
_add("tcp6", "must_fail('tcp6', socket.socket, socket.AF_INET6, socket.SOCK_STREAM)")
_add("udp", "must_fail('udp', lambda: socket.socket(2, 2).sendto(b'x', ('127.0.0.1', @UDP@)))")
_add("listen", "must_fail('listen', lambda: socket.create_server(('0.0.0.0', 0)))")
_add("unix_path", "must_fail('unix', lambda: socket.socket(1, 1).connect('@UNIX@'))")
_add("unix_abstract", "must_fail('abstract', lambda: socket.socket(1, 1).connect('\\0@ABSTRACT@'))")
_add("vsock", "must_fail('vsock', socket.socket, 40, 1)")
_add(
    "raw",
    "for f, t, p in ((2, 3, 1), (10, 3, 58), (17, 3, 768), (17, 2, 768)): must_fail(f, socket.socket, f, t, p)",
)
_add("netlink", "for p in range(22): must_fail(p, socket.socket, 16, 3, p)")
_add(
    "odd_families",
    "for f in [*range(2, 46)]: must_fail(f, socket.socket, f, 1); must_fail(f, socket.socket, f, 2)",
)
_add("dns", "must_fail('dns', socket.getaddrinfo, 'example.org', 80)")
_add(
    "http",
    "import urllib.request; must_fail('http', urllib.request.urlopen, 'http://127.0.0.1:@TCP@/', None, 1)",
)
_add(
    "shell_network",
    "os.system(\"bash -c 'echo x > /dev/tcp/127.0.0.1/@TCP@ && echo ESCAPED' 2>/dev/null\")",
)

_KIND.append("results")
_add(
    "write_to_every_descriptor",
    """
message = b"R" + bytes(63)
for fd in range(3, 4096):
    for data in (message, struct.pack("<i", 0), b"x" * 64):
        must_fail(fd, os.write, fd, data)
        must_fail(fd, os.pwrite, fd, data, 0)
    must_fail(fd, lambda: socket.socket(fileno=os.dup(fd)).send(message))
""",
)
_add(
    "write_through_leftover_objects",
    """
import gc
for item in gc.get_objects():
    if isinstance(item, socket.socket):
        must_fail("socket", item.send, bytes(64))
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        if isinstance(value, socket.socket): must_fail("frame", value.send, bytes(64))
    frame = frame.f_back
""",
)
_add(
    "printed_struct",
    "sys.stdout.buffer.write(struct.pack('<16sIi4dQ', b'x' * 16, 0, 0, 0, 0, 0, 0, 0)); sys.exit(3)",
    "error",
    exit_code=3,
)
_add(
    "status_on_stdout",
    'print(\'{"status": "ok", "exit_code": 0}\'); sys.exit(9)',
    "error",
    exit_code=9,
)
_add(
    "exit_in_atexit",
    "import atexit; atexit.register(os._exit, 0); 1 / 0",
    stdout=b"",
)
_add("exit_without_flush", "print('lost'); os._exit(0)", stdout=b"")
_add("exit_code_beyond_a_byte", "sys.exit(256 + 7)", "error", exit_code=7)
_add("closed_stdout", "os.close(1); os.close(2); print('x')", "error", stdout=b"", exit_code=120)
_add(
    "close_everything",
    "os.closerange(0, 10000); time.sleep(0.01); os._exit(4)",
    "error",
    exit_code=4,
)
_add(
    "monkeypatched_exit",
    """
import builtins, threading, atexit
def nothing(*args, **kwargs): pass
os._exit = sys.exit = threading._shutdown = sys.excepthook = atexit._run_exitfuncs = nothing
builtins.print = builtins.exec = nothing
sys.stdout = sys.stderr = None
raise RuntimeError("lost")
""",
    "error",
)
_add(
    "server_code_called_again",
    """
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
names = frame.f_globals
try:
    names["main"]()
except BaseException as error:
    print(type(error).__name__)
""",
    "ok",
    "error",
)
_add(
    "stdout_made_huge_pipe",
    "import fcntl; fcntl.fcntl(1, 1031, 1 << 20); os.write(1, b'y' * 100)",
    stdout=b"y" * 100,
)
_add(
    "steal_stdout",
    "must_fail('pipe', lambda: os.read(os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK), 4))",
    stdout=b"",
)
_add("raise_in_hook", "sys.excepthook = lambda *a: 1 / 0\nraise ValueError", "error")
_add(
    "base_exception",
    "class E(BaseException): pass\nraise E('gone')",
    "error",
    stderr_part=b"E: gone",
)

_KIND.append("output")
_add("endless_stdout", "while True: os.write(1, b'x' * 65536)", "output_limit")
_add("endless_stderr", "while True: os.write(2, b'x' * 65536)", "output_limit")
_add(
    "endless_both",
    "while True: print('x' * 1000); print('y' * 1000, file=sys.stderr)",
    "output_limit",
)
_add(
    "endless_from_children",
    "[os.fork() for _ in range(3)]\nwhile True: os.write(1, b'z' * 4096)",
    "output_limit",
)
_add("output_then_exit", "sys.stdout.write('x' * 100000)", "output_limit")
_add(
    "output_then_sleep",
    "print('before', flush=True); time.sleep(1000)",
    "timeout",
    stdout=b"before\n",
)
_add("binary_output", "os.write(1, bytes(range(256)))", stdout=bytes(range(256)))
_add(
    "nonblocking_stdout",
    "os.set_blocking(1, False); os.set_blocking(0, False); print('fine')",
    stdout=b"fine\n",
)

_KIND.append("interpreter")
_add("endless_recursion", "def f(): return f()\nf()", "error", stderr_part=b"RecursionError")
_add(
    "recursion_in_c",
    "sys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)",
    "signal",
    "error",
    "timeout",
)
_add("stdin_is_empty", "print(repr(sys.stdin.read())); input()", "error", stderr_part=b"EOFError")
_add("broken_syntax", "def f(:", "error", stderr_part=b"SyntaxError")
_add("null_in_source", "x = 1\0", "error")
_add("lone_surrogate", "print('\\ud800')", "error", stderr_part=b"UnicodeEncodeError")
_add(
    "zip_bomb",
    "import zlib; d = zlib.compress(bytes(1 << 27)); kept = [zlib.decompress(d) for _ in range(50)]",
    "error",
    "oom",
    "timeout",
)
_add(
    "exec_self",
    "os.execv(sys.executable, [sys.executable, '-c', 'import os; print(os.getpid())'])",
    stdout=b"2\n",
)

_KIND.append("state")
_add(
    "planted_modules",
    """
for name in ("json.py", "os.py", "sitecustomize.py", "random.py", "attack.py"):
    write("/tmp/" + name, b"print('PLANTED')")
    try: write("/dev/shm/" + name, b"print('PLANTED')")
    except OSError: pass
import json, random
json.loads = random.random = lambda *a: "PLANTED"
import builtins; builtins.planted = "PLANTED"; sys.modules["math"] = json
os.environ["PYTHONPATH"] = "/tmp"; os.environ["PLANTED"] = "1"; os.umask(0o777)
""",
)
_add(
    "keyring",
    "must_fail('add_key', syscall, 248, b'user', b'k', b'PLANTED', 7, -3)",
    machine="x86_64",
)
_add(
    "sysv_ipc",
    "for n in (29, 64, 68): must_fail(n, syscall, n, 4242, 4096, 0o1666)",
    machine="x86_64",
)
_add(
    "posix_queue",
    "must_fail('mq_open', syscall, 240, b'planted', 0o102, 0o666, None)",
    machine="x86_64",
)

_KIND.append("kernel")
_SYSCALLS = {
    "ptrace": "101, 0, 0, 0, 0",
    "ptrace_attach": "101, 16, 1, 0, 0",
    "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
    "pidfd_getfd": "438, 0, 0, 0",
    "io_uring": "425, 8, bytes(120)",
    "userfaultfd": "323, 1",
    "bpf": "321, 0, bytes(64), 64",
    "perf_event_open": "298, bytes(128), 0, -1, -1, 0",
    "keyctl": "250, 0, -3, 1",
    "request_key": "249, b'user', b'x', None, -3",
    "unshare_user": "272, 0x10000000",
    "unshare_all": "272, 0x7E020000",
    "unshare_time": "272, 0x80",
    "setns": "308, 0, 0",
    "clone_user": "56, 0x10000011, 0, 0, 0, 0",
    "clone_mount": "56, 0x00020011, 0, 0, 0, 0",
    "clone3": "435, bytes(88), 88",
    "mount": "165, b'tmpfs', b'/tmp', b'tmpfs', 0, None",
    "remount": "165, None, b'/', None, 32 | 4096, None",
    "umount": "166, b'/tmp', 2",
    "pivot_root": "155, b'/tmp', b'/tmp'",
    "fsopen": "430, b'tmpfs', 0",
    "open_tree": "428, -100, b'/', 1",
    "move_mount": "429, -100, b'/', -100, b'/tmp', 0",
    "chroot": "161, b'/tmp'",
    "setuid": "105, 0",
    "setgid": "106, 0",
    "setresuid": "117, 0, 0, 0",
    "setgroups": "116, 0, None",
    "capset": "126, bytes(8), bytes(24)",
    "seccomp": "317, 0, 0, 0",
    "seccomp_listener": "317, 1, 8, bytes(16)",
    "personality": "135, 0x0040000",
    "open_by_handle_at": "304, 0, bytes(16), 0",
    "name_to_handle_at": "303, -100, b'/', bytes(128), bytes(8), 0",
    "reboot": "169, 0xfee1dead, 672274793, 0x1234567, 0",
    "kexec_load": "246, 0, 0, 0, 0",
    "init_module": "175, b'', 0, b''",
    "finit_module": "313, 0, b'', 0",
    "swapon": "167, b'/tmp/x', 0",
    "sethostname": "170, b'owned', 5",
    "settimeofday": "164, bytes(16), None",
    "clock_settime": "227, 0, bytes(16)",
    "adjtimex": "159, bytes(208)",
    "iopl": "172, 3",
    "ioperm": "173, 0x60, 1, 1",
    "modify_ldt": "154, 1, bytes(16), 16",
    "syslog": "103, 3, bytes(64), 64",
    "acct": "163, b'/tmp/x'",
    "quotactl": "179, 0, b'/', 0, None",
    "fanotify_init": "300, 0, 0",
    "memfd_secret": "447, 0",
    "landlock": "444, None, 0, 1",
    "migrate_pages": "256, 0, 0, None, None",
    "set_mempolicy": "238, 0, None, 0",
    "kcmp": "312, 1, 1, 0, 0, 0",
    "lookup_dcookie": "212, 0, bytes(64), 64",
    "vmsplice": "278, 1, bytes(16), 1, 0",
    "prlimit_of_init": "302, 1, 7, bytes(16), None",
    "vhangup": "153",
    "aio": "206, 1, bytes(8)",
    "setxattr": "188, b'/tmp/program.py', b'user.x', b'v', 1, 0",
    "prctl_dumpable": "157, 4, 0, 0, 0, 0",
    "prctl_subreaper": "157, 36, 1, 0, 0, 0",
    "prctl_mm": "157, 35, 1, 0, 0, 0",
    "sched_rt": "144, 0, 1, struct.pack('<i', 1)",
    "x32_getpid": "0x40000000 + 39",
}
for _name, _arguments in _SYSCALLS.items():
    _add(f"syscall_{_name}", f"must_fail('{_name}', syscall, {_arguments})", machine="x86_64")
_add(
    "int80",
    """
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""",
    "signal",
    stdout=b"",
    exit_code=-31,
    machine="x86_64",
)
_add(
    "terminal_injection",
    "import fcntl; must_fail('TIOCSTI', fcntl.ioctl, 0, 0x5412, b'x'); must_fail('tty', os.open, '/dev/tty', 2)",
)
_add(
    "raised_limits",
    """
import resource
for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CORE", "MEMLOCK", "MSGQUEUE", "CPU"):
    must_fail(name, resource.setrlimit, getattr(resource, "RLIMIT_" + name, 12), (resource.RLIM_INFINITY,) * 2)
must_fail("nice", os.nice, -10)
os.nice(5)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
""",
)
_add("core_dump", "os.kill(os.getpid(), signal.SIGQUIT)", "signal", exit_code=-3)
_add(
    "cpu_limit_signal", "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"
)
_add(
    "namespaces_by_shell",
    "os.system('unshare -Ur true 2>/dev/null && echo ESCAPED; unshare -n true 2>/dev/null && echo ESCAPED')",
)
_add(
    "setuid_binaries",
    "os.system('for f in su sudo mount newgrp pkexec; do $f -c id </dev/null 2>/dev/null | grep uid=0 && echo ESCAPED; done')",
)
_add(
    "oom_score",
    """
for value in (b"-1000", b"0", b"999"): must_fail("oom", write, "/proc/self/oom_score_adj", value)
for name in ("oom_adj", "comm", "coredump_filter", "clear_refs", "autogroup", "mem", "timerslack_ns"):
    must_fail(name, os.open, "/proc/self/" + name, os.O_WRONLY)
print(read("/proc/self/oom_score_adj"))
""",
    stdout=b"b'1000\\n'\n",
)
_add("kernel_command_line", "print(read('/proc/cmdline'))", stdout=b"b''\n")
for _to in (0, 1, -1):
    _add(
        f"every_signal_to_{_to}",
        f"""
kept = {{signal.SIGKILL, signal.SIGSTOP}} if {_to} != 1 else set()
for number in set(signal.valid_signals()) - kept:
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
    try: os.kill({_to}, number)
    except ProcessLookupError: pass
time.sleep(0.05)
print("done")
""",
        stdout=b"done\n",
    )
_add("interrupt_oneself", "os.kill(0, signal.SIGINT); time.sleep(1)", "error", exit_code=130)
_add(
    "leases_and_hints",
    """
import fcntl
fd = os.open("file", os.O_CREAT | os.O_RDWR)
for command in (1024, 1025, 1026, 1036, 1038, 1040): must_fail(command, fcntl.fcntl, fd, command, bytes(8))
os.close(fd)
for command, argument in ((1024, 0), (1026, 1)): must_fail(command, fcntl.fcntl, os.open("file", os.O_RDONLY), command, argument)
""",
)

_KIND.append("server")
_add(
    "server_through_proc",
    """
frame = struct.pack("<BI", 7, 58) + bytes(58)
for pid in [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]:
    for fd in range(64):
        must_fail((pid, fd), write, f"/proc/{pid}/fd/{fd}", frame)
    for name in ("mem", "environ", "maps"):
        must_fail((pid, name), lambda: read(f"/proc/{pid}/{name}") or 1 / 0)
    must_fail((pid, "cwd"), os.listdir, f"/proc/{pid}/cwd")
    must_fail((pid, "root"), os.listdir, f"/proc/{pid}/root")
    must_fail((pid, "oom"), lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000") and open(f"/proc/{pid}/oom_score_adj", "w").close())
""",
)
_add(
    "server_killed",
    """
for pid in (1, os.getppid() or 1, -1):
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
        try: os.kill(pid, number)
        except OSError: pass
print("alive")
""",
    stdout=b"alive\n",
)
_add(
    "server_traced",
    """
for pid in (1, os.getppid() or 1):
    must_fail("attach", syscall, 101, 16, pid, 0, 0)
    must_fail("seize", syscall, 101, 0x4206, pid, 0, 0)
    must_fail("limits", lambda: __import__("resource").prlimit(pid, 7, (0, 0)))
    must_fail("memory", syscall, 311, pid, ctypes.create_string_buffer(16), 1, 0, 0, 0)
""",
    machine="x86_64",
)
_add(
    "frames_on_stdout",
    """
for kind in range(8):
    os.write(1, struct.pack("<BI", kind, 58) + bytes(58))
    os.write(1, struct.pack("<BI", kind, 0xFFFFFFFF))
os._exit(5)
""",
    "error",
    stdout=b"".join(
        kind.to_bytes(1, "little")
        + b"\x3a\0\0\0"
        + bytes(58)
        + kind.to_bytes(1, "little")
        + b"\xff" * 4
        for kind in range(8)
    ),
    exit_code=5,
)
_add(
    "processes_left_at_the_limit",
    """
for _ in range(200):
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
    except OSError:
        break
os._exit(0)
""",
)
_add(
    "every_folder_filled",
    """
total = 0
for folder in ("/tmp", "/work", "/app", "/repo", "/tests", "/logs", "/dev/shm", "/run", "/var/tmp", "/"):
    try:
        with open(folder + "/fill", "wb", buffering=0) as file:
            for _ in range(300):
                total += file.write(bytes(1 << 20))
    except OSError:
        pass
if total > 400 << 20: print("ESCAPED", total)
""",
    "ok",
    "oom",
)
_add(
    "abstract_listener_left",
    """
if os.fork() == 0:
    os.setsid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\\0hostile-left-behind")
    listener.listen()
    os.closerange(0, 3)
    time.sleep(60)
time.sleep(0.1)
""",
)
_add(
    "enormous_arguments",
    """
import subprocess
for size in (1 << 17, 1 << 21, 1 << 24):
    try: subprocess.run(["/bin/true", "x" * size])
    except OSError: pass
try: os.execv("/bin/true", ["x" * 100000] * 1000)
except OSError: pass
print("held")
""",
    stdout=b"held\n",
)
_add("stops_itself", "os.kill(os.getpid(), signal.SIGSTOP)", "timeout")
_add(
    "server_starved",
    """
for pid in (1, os.getppid() or 1):
    try: os.setpriority(os.PRIO_PROCESS, pid, 19)
    except OSError: pass
    try: os.sched_setaffinity(pid, {0})
    except OSError: pass
for _ in range(30):
    try: pid = os.fork()
    except BlockingIOError: break  # the user's limit, of which programs before it may hold a part
    if pid == 0:
        while True: pass
while True: pass
""",
    "timeout",
)

HOSTILE: tuple[Program, ...] = tuple(_LIST)
_LIST.clear()

# Each reads a number where a program before it may have left one, prints it, and leaves another:
# run again and again, it must read the same.
_add(
    "carry_stdin_flags",
    "import fcntl; v = fcntl.fcntl(0, fcntl.F_GETFL); print(v); fcntl.fcntl(0, fcntl.F_SETFL, v ^ os.O_APPEND ^ os.O_NONBLOCK)",
)
_add("carry_stdin_offset", "print(os.lseek(0, 0, 1)); os.lseek(0, 7, 0)")
_add(
    "carry_stdin_signal",
    "import fcntl; v = fcntl.fcntl(0, 11); print(v); fcntl.fcntl(0, 10, v + 1)",
)
_add("carry_stdin_owner", "import fcntl; print(fcntl.fcntl(0, 9)); fcntl.fcntl(0, 8, os.getpid())")
_add(
    "carry_stdin_lock",
    """
import fcntl
try: fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB); print("free", flush=True)
except OSError: print("held", flush=True)
""",
)
_add(
    "carry_pipe_flags",
    """
import fcntl
for fd in (1, 2):
    v = fcntl.fcntl(fd, fcntl.F_GETFL)
    print(v, fcntl.fcntl(fd, 1032), os.stat(fd).st_mode)
    fcntl.fcntl(fd, fcntl.F_SETFL, v ^ os.O_APPEND); fcntl.fcntl(fd, 1031, 8192)
    try: os.fchmod(fd, 0o123)
    except OSError: pass
""",
)
_add(
    "carry_device_times",
    """
for path in ("/", "/dev", "/proc", "/run", "/usr", "/etc/passwd", "/dev/fd", sys.executable, os.__file__,
             *("/dev/" + name for name in os.listdir("/dev")), "/dev/pts/ptmx", 0):
    s = os.stat(path) if os.path.exists(path) else None
    if path not in ("/proc", "/dev/shm", "/dev/stdout", "/dev/stderr", "/dev/fd", "/dev/stdin"):
        print(path, s and (s.st_mtime_ns, s.st_atime_ns, s.st_mode, s.st_uid))
    for change in (lambda: os.utime(path), lambda: os.utime(path, ns=(1, 1)), lambda: os.chmod(path, s.st_mode ^ 0o111)):
        try: change()
        except (OSError, AttributeError): pass
""",
)
_add(
    "carry_priority",
    """
for kind, who in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)):
    try: print(os.getpriority(kind, who)); os.setpriority(kind, who, os.getpriority(kind, who) + 1)
    except OSError as error: print(error.errno)
""",
)
_add(
    "carry_affinity_and_limits",
    """
import resource
print(os.sched_getaffinity(0), os.sched_getaffinity(1))
for pid in (1, 0):
    try: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    except OSError: pass
limits = [resource.getrlimit(n) for n in range(16)]
print(limits)
for n, (soft, hard) in enumerate(limits):
    if n in (1, 4, 6, 10, 11, 12): resource.setrlimit(n, (0, 0))
""",
)
_add(
    "carry_process_attributes",
    """
print(os.umask(0o77), os.getcwd(), libc.prctl(30), signal.getsignal(signal.SIGUSR1), signal.pthread_sigmask(0, ()))
os.chdir("/"); libc.prctl(29, 77777); signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(0, signal.valid_signals()); signal.alarm(3); libc.prctl(15, b"named")
print(os.getpgid(0), os.getsid(0), read("/proc/self/comm"))
""",
)
_add(
    "carry_socket_cookie",
    """
for option in (57, 71):
    try: print(socket.socket(1, 1).getsockopt(1, option, 8))
    except OSError as error: print(error.errno)
""",
)
_add(
    "carry_unix_names",
    """
s = socket.socket(1, 1)
try: s.bind("\\0counter"); print("free")
except OSError: print("taken")
print(len(open("/proc/net/unix").readlines()))
s.listen(); held = [socket.socket(1, 1) for _ in range(20)]
for each in held: each.connect("\\0counter"); each.send(b"1")
socket.send_fds(held[0], [b"x"], [each.fileno() for each in held])
""",
)
_add(
    "carry_terminals",
    "fd = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); print(sorted(os.listdir('/dev/pts'))); os.write(fd, b'x')",
)
_add(
    "carry_files",
    """
for folder in ("/tmp", "/dev/shm", "/", "/dev", "/run", "/var", "/var/tmp", "/sbx", "/etc", "/dev/pts", "/proc"):
    print(folder, sorted(n for n in os.listdir(folder) if n != "thread-self"))
    try: write(folder + "/counter")
    except OSError: pass
""",
)
_add(
    "carry_write_hint",
    """
import fcntl
for path in (sys.executable, os.__file__, "/dev/null", "/etc/passwd"):
    fd = os.open(path, os.O_RDONLY)
    try: print(fcntl.fcntl(fd, 1035, bytes(8))); fcntl.fcntl(fd, 1036, bytes([2] + 7 * [0]))
    except OSError as error: print(error.errno)
""",
)
_add(
    "carry_proc_settings",
    """
for name in ("oom_score_adj", "coredump_filter", "comm", "timerslack_ns", "sched", "autogroup", "loginuid", "sessionid", "setgroups", "uid_map", "attr/keycreate"):
    for pid in ("self", "1"):
        try: value = read(f"/proc/{pid}/{name}") if name != "sched" else b""
        except OSError as error: value = error.errno
        print(pid, name, value if name != "autogroup" else "")
        try: write(f"/proc/{pid}/{name}", b"7")
        except OSError: pass
""",
)
_add(
    "carry_ipc",
    """
print(*[len(open("/proc/sysvipc/" + n).readlines()) for n in ("shm", "sem", "msg")], read("/proc/keys"))
for number, *args in ((29, 4242, 4096, 0o1666), (64, 4242, 1, 0o1666), (68, 4242, 0o1666), (248, b"user", b"k", b"1", 1, -3)):
    try: syscall(number, *args)
    except OSError as error: print(error.errno)
""",
    machine="x86_64",
)
_add(
    "carry_module_state",
    """
import builtins, encodings, random, threading, codecs
print(vars(builtins).get("counter"), sys.__dict__.get("counter"), os.environ.get("COUNTER"), random.random(), len(threading.enumerate()))
builtins.counter = sys.counter = 1; os.environ["COUNTER"] = "1"; os.putenv("COUNTER", "1")
random.seed(9); codecs.register(lambda name: None); sys.setrecursionlimit(5000)
""",
)

CARRIERS: tuple[Program, ...] = tuple(_LIST)
_LIST.clear()

# Programs that must run as they would outside.
_add("hello", "print('hello')", stdout=b"hello\n")
_add(
    "main_guard",
    "if __name__ == '__main__': print(__file__, sys.argv, sys.path[0])",
    stdout=b"program.py ['program.py'] /tmp\n",
)
_add("exit_zero", "sys.exit()", stdout=b"")
_add("exit_text", "sys.exit('bad')", "error", stderr_part=b"bad", exit_code=1)
_add("exit_builtin", "exit(5)", "error", exit_code=5)
_add(
    "traceback",
    "def f():\n    return 1 / 0\nf()",
    "error",
    stderr_part=b'File "program.py", line 3, in f\n    return 1 / 0\n',
)
_add("assertion", "assert 1 == 2, 'no'", "error", stderr_part=b"AssertionError: no")
_add("unflushed", "sys.stdout.write('no newline')", stdout=b"no newline")
_add("read_stdin", "print(sum(map(int, sys.stdin)))", stdout=b"0\n")
_add(
    "files_here",
    "print(sorted(os.listdir('.')), os.getcwd())",
    stdout=b"['attack.py', 'program.py'] /tmp\n",
)
_add(
    "write_and_read",
    "open('a', 'w').write('text'); print(open('a').read(), os.path.getsize('a'))",
    stdout=b"text 4\n",
)
_add(
    "temporary_files",
    "import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'x'); print(f.tell())",
    stdout=b"1\n",
)
_add(
    "copy_tree",
    "import shutil; os.mkdir('d'); shutil.copy2('attack.py', 'd'); shutil.copytree('d', 'e'); print(os.listdir('e'))",
    stdout=b"['attack.py']\n",
)
_add(
    "sqlite",
    "import sqlite3; c = sqlite3.connect('x.db'); c.execute('create table t(a)'); c.execute('insert into t values(3)'); c.commit(); print(*c.execute('select * from t'))",
    stdout=b"(3,)\n",
)
_add(
    "subprocess",
    "import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout, end='')",
    stdout=b"hi\n",
)
_add(
    "python_child",
    "import subprocess; print(subprocess.check_output([sys.executable, '-c', 'print(6 * 7)']))",
    stdout=b"b'42\\n'\n",
)
_add(
    "threads",
    "import threading\nt = [threading.Thread(target=print, args=(n,)) for n in range(4)]\nfor x in t: x.start(); x.join()",
    stdout=b"0\n1\n2\n3\n",
)
_add(
    "thread_that_outlives_main",
    "import threading; threading.Timer(0.1, print, ('late',)).start(); print('main')",
    stdout=b"main\nlate\n",
)
_add(
    "thread_pool",
    "from concurrent.futures import ThreadPoolExecutor\nprint(list(ThreadPoolExecutor(4).map(abs, range(4))))",
    stdout=b"[0, 1, 2, 3]\n",
)
_add(
    "multiprocessing",
    "import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))",
    stdout=b"[1, 2]\n",
)
_add(
    "process_spawn",
    "import multiprocessing as m\nif __name__ == '__main__':\n    p = m.get_context('spawn').Process(target=print, args=('child',)); p.start(); p.join()",
    stdout=b"child\n",
)
_add(
    "asyncio",
    "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 5\nprint(asyncio.run(f()))",
    stdout=b"5\n",
)
_add(
    "asyncio_subprocess",
    "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'a', stdout=-1); return (await p.communicate())[0]\nprint(asyncio.run(f()))",
    stdout=b"b'a\\n'\n",
)
_add(
    "signals",
    "signal.signal(signal.SIGALRM, lambda *a: print('tick')); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()",
    stdout=b"tick\n",
)
_add(
    "own_signal",
    "signal.signal(signal.SIGTERM, lambda *a: print('term')); os.kill(os.getpid(), 15)",
    stdout=b"term\n",
)
_add(
    "fork_and_wait",
    "p = os.fork()\nif p == 0: os._exit(7)\nprint(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))",
    stdout=b"7\n",
)
_add("unix_sockets", "a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))", stdout=b"b'x'\n")
_add(
    "fifo",
    "os.mkfifo('f'); r = os.open('f', os.O_RDONLY | os.O_NONBLOCK); os.write(os.open('f', os.O_WRONLY), b'q'); print(os.read(r, 1))",
    stdout=b"b'q'\n",
)
_add(
    "shared_memory",
    "from multiprocessing import shared_memory as s\nm = s.SharedMemory(create=True, size=64); m.buf[0] = 3; print(m.buf[0]); m.close(); m.unlink()",
    stdout=b"3\n",
)
_add(
    "manager",
    "import multiprocessing as m\nwith m.Manager() as s: x = s.list([1]); x.append(2); print(x)",
    stdout=b"[1, 2]\n",
)
_add(
    "file_locks",
    """
import fcntl
with open("file", "w") as f:
    fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX); f.write("x"); fcntl.flock(f, fcntl.LOCK_UN)
print(open("file").read())
""",
    stdout=b"x\n",
)
_add(
    "memory_shared_after_forks",
    """
big, children = bytearray(b"x") * (60 << 20), []
stopped = os.fork()
if stopped == 0: os.kill(os.getpid(), signal.SIGSTOP); os._exit(0)
os.waitpid(stopped, os.WUNTRACED)
for _ in range(4):
    if (child := os.fork()) == 0: time.sleep(0.3); os._exit(big[0] & 7)
    children.append(child)
print([os.waitpid(child, 0)[1] >> 8 for child in children], os.waitpid(stopped, os.WCONTINUED | os.WNOHANG))
""",
    stdout=b"[0, 0, 0, 0] (0, 0)\n",
)
_add("mmap", "import mmap; m = mmap.mmap(-1, 4096); m[:2] = b'ok'; print(m[:2])", stdout=b"b'ok'\n")
_add(
    "decimals",
    "from decimal import Decimal; from fractions import Fraction; print(Decimal(1) / 8, Fraction(1, 3) + 1)",
    stdout=b"0.125 4/3\n",
)
_add(
    "dates",
    "import datetime; print(datetime.date(2024, 2, 29).isoformat())",
    stdout=b"2024-02-29\n",
)
_add("import_neighbour", "import attack; print(attack.__file__)", stdout=b"/tmp/attack.py\n")
_add(
    "inspect_source",
    "import inspect\ndef f(): return 1\nprint(inspect.getsource(f), end='')",
    stdout=b"def f(): return 1\n",
)
_add(
    "pickle_of_main",
    "import pickle\nclass C: x = 3\nprint(pickle.loads(pickle.dumps(C())).x)",
    stdout=b"3\n",
)
_add(
    "dataclass",
    "from dataclasses import dataclass\n@dataclass\nclass P: x: int\nprint(P(3))",
    stdout=b"P(x=3)\n",
)
_add(
    "annotations_are_values",
    "def f(x: int): pass\nprint(f.__annotations__)",
    stdout=b"{'x': <class 'int'>}\n",
)
_add(
    "unittest",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\nunittest.main()",
    stderr_part=b"OK",
)
_add("hash_is_fixed", "print(hash('a') == hash('a'), len({'a', 'b'}))", stdout=b"True 2\n")
_add("atexit", "import atexit; atexit.register(print, 'bye'); print('hi')", stdout=b"hi\nbye\n")
_add(
    "warning",
    "import warnings; warnings.warn('careful'); print(1)",
    stdout=b"1\n",
    stderr_part=b"careful",
)
_add("logging", "import logging; logging.warning('w')", stderr_part=b"WARNING:root:w")
_add("unicode", "print('héllo ✓')", stdout="héllo ✓\n".encode())
_add("sixty_four_kib", "sys.stdout.write('x' * 65536)", stdout=b"x" * 65536)
_add("gc_is_on", "import gc; print(gc.isenabled())", stdout=b"True\n")
_add("a_hundred_mebibytes", "x = b'x' * (100 << 20); print(len(x) >> 20)", stdout=b"100\n")
_add("closing_stdin", "sys.stdin.close(); print('ok')", stdout=b"ok\n")

BENIGN: tuple[Program, ...] = tuple(_LIST)
