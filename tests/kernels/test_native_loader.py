"""How the C++ kernels are found: compiled once, and whatever happens to the compiler or the cache,
the ops work and one warning says why they are slow. The compilers here are scripts: they copy a
library that is ready, or fail."""

import functools
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kernels import linear, logits_logprob, rms_norm, swiglu
from kernels.cpp import build as cpp_build
from kernels.cpp import ops as cpp_ops

ROOT = Path(__file__).parents[2]
OPEN = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("error")
from kernels.cpp import build as cpp_build
from kernels.cpp import ops as cpp_ops
cpp_build.CACHE = Path(sys.argv[1])
assert cpp_ops.library() is not None
"""


def script(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", '[ "$1" = --version ] && echo fake && exit', *lines]))
    path.chmod(0o755)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process, with an empty cache and no compiler but those in tmp_path/bin."""
    opened = cpp_ops.library.__wrapped__
    monkeypatch.setattr(cpp_ops, "library", functools.cache(opened))
    monkeypatch.setattr(cpp_build, "CACHE", tmp_path / "home" / "cache")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.fixture
def compiler(native, monkeypatch, tmp_path):
    """A g++ that copies the library and notes its calls."""
    real = next(path for name in cpp_build._COMPILERS if (path := shutil.which(name)))
    ready = cpp_build.CACHE.expanduser() / f"{cpp_build._fingerprint(real)}.so"
    if not ready.exists():
        pytest.skip("the cache holds no compiled kernels")
    (tmp_path / "ready.so").write_bytes(ready.read_bytes()[: -cpp_build._SEAL_BYTES])
    calls = tmp_path / "calls"
    calls.touch()
    loop = 'while [ "$1" != -o ]; do shift; done'
    copy = f'/bin/cat {tmp_path / "ready.so"} > "$2"'
    script(tmp_path / "bin/g++", f"echo x >> {calls}", "/bin/sleep 0.5", loop, copy)
    return lambda: len(calls.read_text().split())


def kept(folder):
    return sorted(path for path in (folder / "home" / "cache").iterdir())


def again():
    """Opens as another process would, and must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cpp_build._open()


def results():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64), torch.randn(40, 64)
    y = linear(swiglu(torch.cat([rms_norm(x, weight[0]), x], -1)), weight)
    return y, logits_logprob(y, torch.arange(5))


def assert_falls_back(expected, message):
    """Every op works, PyTorch computes it, and the first one warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = [*results(), *results()]
    assert [str(w.message) for w in caught if message in str(w.message)]
    assert len([w for w in caught if "C++ kernels are not available" in str(w.message)]) == 1
    assert cpp_ops.library() is None
    for a, b in zip(ours, (*expected, *expected), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_without_a_compiler_pytorch_computes_the_same_up_to_rounding(native, request):
    expected = results()
    request.getfixturevalue("fresh")
    assert_falls_back(expected, "no C++ compiler found")


def test_a_compiler_that_fails_is_named_with_its_first_error(native, request):
    expected = results()
    folder = request.getfixturevalue("fresh")
    complaint = "echo 'In file included from x.cpp:' >&2; echo 'x.cpp:3: error: no such' >&2"
    script(folder / "bin/g++", complaint, "exit 1")
    assert_falls_back(expected, f"({folder}/bin/g++: x.cpp:3: error: no such)")
    (folder / "bin/g++").write_bytes(b"\x7fELF no program")
    cpp_ops.library.cache_clear()
    assert_falls_back(expected, "not available")
    script(folder / "bin/g++", "/bin/kill -9 $$")
    cpp_ops.library.cache_clear()
    assert_falls_back(expected, "not available")


def test_a_library_is_compiled_once_and_kept(compiler, fresh):
    assert cpp_ops.library() is not None and compiler() == 1
    assert again() and compiler() == 1
    assert [path.suffix for path in kept(fresh)] == [".so"]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "unsealed"])
def test_a_damaged_library_is_compiled_again(compiler, fresh, damage):
    assert cpp_ops.library() is not None
    (path,) = kept(fresh)
    data = whole = path.read_bytes()
    if damage == "flipped":
        data = bytes([*data[:5000], data[5000] ^ 1, *data[5001:]])
    path.unlink()  # this process has it open
    path.write_bytes({"empty": b"", "cut": data[:70000], "unsealed": data[:-32]}.get(damage, data))
    assert again() and compiler() == 2
    assert path.read_bytes() == whole
    assert again() and compiler() == 2


def test_a_cache_that_cannot_be_written_does_not_cost_the_kernels(compiler, fresh):
    (fresh / "home").write_text("a file, where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot keep the C\+\+ kernels .*every process"):
        assert cpp_ops.library() is not None
    assert torch.isfinite(results()[0]).all()
    assert compiler() == 1


def test_a_full_disk_leaves_nothing_behind(compiler, fresh, monkeypatch):
    def is_full(self, data):
        with self.open("wb") as file:
            file.write(data[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", is_full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert cpp_ops.library() is not None
    assert kept(fresh) == []


def test_a_user_without_a_home_compiles_anew(compiler, fresh, monkeypatch):
    monkeypatch.setattr(cpp_build, "CACHE", Path("~no_such_user_here/cache"))
    assert again() and again() and compiler() == 2


def test_a_library_that_does_not_load_falls_back(native, request):
    expected = results()
    folder = request.getfixturevalue("fresh")
    loop = 'while [ "$1" != -o ]; do shift; done'
    script(folder / "bin/g++", loop, 'echo "no library" > "$2"')
    assert_falls_back(expected, "not available")


def test_processes_may_compile_at_the_same_time(compiler, fresh):
    command = [sys.executable, "-c", OPEN, str(fresh / "home" / "cache")]
    env = {"PATH": str(fresh / "bin"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    (path,) = kept(fresh)
    assert path.suffix == ".so"
    calls = compiler()
    assert again() and compiler() == calls


def test_the_name_follows_the_sources_the_flags_and_the_compiler(fresh, monkeypatch):
    script(fresh / "bin/g++")
    gcc = str(fresh / "bin/g++")
    sources = fresh / "native"
    shutil.copytree(cpp_build.SOURCES, sources)
    names = {cpp_build._fingerprint(gcc)}
    monkeypatch.setattr(cpp_build, "SOURCES", sources)
    names.add(cpp_build._fingerprint(gcc))
    assert len(names) == 1
    for name in ("vector.h", "kernels.cpp"):
        (sources / name).write_text((sources / name).read_text() + "\n")
        names.add(cpp_build._fingerprint(gcc))
    monkeypatch.setattr(cpp_build, "_FLAGS", ("-O2", *cpp_build._FLAGS[1:]))
    names.add(cpp_build._fingerprint(gcc))
    script(fresh / "bin/clang++", "")
    (fresh / "bin/clang++").write_text("#!/bin/sh\necho other\n")
    names.add(cpp_build._fingerprint(str(fresh / "bin/clang++")))
    monkeypatch.setattr(cpp_build, "_processor", lambda: "another")
    names.add(cpp_build._fingerprint(gcc))
    assert len(names) == 6
