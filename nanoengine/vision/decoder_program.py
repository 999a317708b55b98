"""The program that decodes one picture of another format than PNG, in a process of its own.

    python -I decoder_program.py KIND MAX_BYTES < file > pixels

Out come height and width and the rows in RGB, or 0, 0 and a text that says what is wrong. Before
the file is looked at, the process gives up what a decoder does not need: memory beyond a limit, and
by a seccomp filter all system calls but those that write what is open, and ask for memory, on
Linux (x86_64 and aarch64); elsewhere the limits alone hold. A file that takes the decoder over can
then say what pixels it likes, which it could say anyway.
It runs alone: nothing of this project is imported here. Left out: who asks (decoder_process.py).
Formats: linux/filter.h, linux/seccomp.h; numbers: asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import io
import platform
import resource
import struct
import sys

MEMORY_BYTES = 3 << 30  # 64 million pixels in RGB are 192 MB; Pillow holds several copies of them
MISSING = 3  # the exit status of one that finds no Pillow
SIDES = struct.Struct("<II")

# write mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap madvise futex exit
# exit_group clock_gettime getrandom sched_yield restart_syscall close
_CALLS = {
    "x86_64": (
        0xC000003E,
        (1, 9, 10, 11, 12, 13, 14, 15, 25, 28, 202, 60, 231, 228, 318, 24, 219, 3),
    ),
    "aarch64": (
        0xC00000B7,
        (64, 222, 226, 215, 214, 134, 135, 139, 216, 233, 98, 93, 94, 113, 278, 124, 128, 57),
    ),
}
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refused with EPERM
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def limit(max_bytes: int) -> None:
    """Bound the process: memory, what it writes, files, and core dumps."""
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def seal() -> bool:
    """Give up all system calls but the listed ones, for good; False where the kernel cannot."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return False
    architecture, calls = _CALLS[platform.machine()]
    steps = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, 0)]
    for left, number in enumerate(reversed(calls)):
        steps.insert(4, (_JUMP_EQUAL, left + 1, 0, number))
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("<HBBI", *step) for step in steps)
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    if prctl(_SET_NO_NEW_PRIVS, 1, None, 0, 0):
        return False
    program = _Program(len(steps), code)
    return not prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program), 0, 0)


def decoded(data: bytes, kind: str) -> bytes:
    """The rows of a picture as transformers has them of a file: upright, without alpha."""
    from PIL import Image, ImageOps  # here: loaded while files may still be read

    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=[kind]))
    rows = picture.convert("RGB")
    return SIDES.pack(rows.height, rows.width) + rows.tobytes()


def warm_up(kind: str) -> None:
    """Decode a picture of that kind: what that loads cannot be loaded later."""
    import PIL.MpoImagePlugin  # noqa: F401 (opens JPEGs with a second picture, as phones make them)
    from PIL import Image

    sample = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (9, 9)).save(sample, kind, **({} if kind == "GIF" else {"exif": exif}))
    decoded(sample.getvalue(), kind)


def main(kind: str, max_bytes: int) -> None:
    try:
        warm_up(kind)
    except ImportError:
        raise SystemExit(MISSING) from None
    data = sys.stdin.buffer.read()
    limit(max_bytes)
    seal()
    try:
        said = decoded(data, kind)
    except Exception as error:  # decoders raise whatever a damaged file makes them stumble over
        said = SIDES.pack(0, 0) + str(error).encode(errors="replace")[:500]
    sys.stdout.buffer.write(said)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
