"""The compiled module in the cache: native code, so who may put it there matters more than speed.

Compiling is played by a few bytes: what is tried here is what happens to the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorl.sandbox.backends import wasm_module
from nanorl.sandbox.backends.wasm_module import (
    cache_folders,
    compile_module,
    ensure_module,
    has_module,
    module_name,
    open_module,
)

CODE = b"native code" * 100
# Another process that compiles: it says so in a file, takes a while, and gives the same bytes.
RIVAL = """
import sys, time
from pathlib import Path
from nanorl.sandbox.backends import wasm_module
def compiled():
    with open(sys.argv[2], "a") as file: file.write("compiled\\n")
    time.sleep(0.5)
    return b"native code" * 100
wasm_module._compiled = compiled
wasm_module.metadata.version = lambda name: "1"
wasm_module.compile_module(Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages may be missing here, and compiling takes a minute."""
    monkeypatch.setattr(wasm_module.metadata, "version", lambda name: "1")
    monkeypatch.setattr(wasm_module, "_compiled", lambda: CODE)
    monkeypatch.setattr(wasm_module, "_compile_beside", compile_module)
    yield


def content(folder: Path) -> bytes | None:
    with open_module(folder) as path:
        return None if path is None else Path(path).read_bytes()


def kept(folder: Path) -> Path:
    (file,) = folder.glob("*.cwasm")
    return file


def test_it_is_compiled_once_and_belongs_to_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    assert ensure_module(str(folder)) == folder and content(folder) == CODE
    assert folder.stat().st_mode & 0o777 == 0o700 and kept(folder).stat().st_mode & 0o777 == 0o600

    def must_not() -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(wasm_module, "_compiled", must_not)
    assert ensure_module(str(folder)) == folder


def test_a_file_that_was_cut_off_is_compiled_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    compile_module(folder)
    file = kept(folder)
    file.write_bytes(CODE[:-1])
    (folder / "x.part").write_bytes(b"what a killed compiler left")
    assert not has_module(folder)
    ensure_module(str(folder))
    assert content(folder) == CODE
    assert sorted(one.name for one in folder.iterdir()) == ["lock", file.name]


def test_a_module_of_other_packages_or_processors_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = module_name()
    compile_module(tmp_path / "cache")
    monkeypatch.setattr(wasm_module, "_processor_flags", lambda: "flags: none of ours")
    assert module_name() != before and not has_module(tmp_path / "cache")
    monkeypatch.setattr(wasm_module.metadata, "version", lambda name: "2")
    compile_module(tmp_path / "cache")
    assert before not in kept(tmp_path / "cache").name  # the old one takes no room any more


@pytest.mark.parametrize("damage", ["folder's mode", "file's mode", "link", "folder is a link"])
def test_what_others_could_have_written_is_never_loaded(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "cache"
    compile_module(folder)
    if damage == "folder's mode":
        folder.chmod(0o770)
    elif damage == "file's mode":
        kept(folder).chmod(0o620)
    elif damage == "link":
        file = kept(folder)
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        content(folder)
    with pytest.raises(OSError, match="no place for the compiled module"):
        ensure_module(str(folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_folder_is_never_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    compile_module(folder)
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="must belong to this user alone"):
        content(folder)


def test_without_a_home_it_is_kept_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be made below it
    monkeypatch.setattr(wasm_module.tempfile, "gettempdir", lambda: str(tmp_path))
    found = ensure_module(None)
    assert found == tmp_path / f"nanorl-wasm-{os.getuid()}" == cache_folders(None)[1]
    assert content(found) == CODE


def test_a_user_who_has_no_home_at_all_keeps_it_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~no_such_user_here")  # for pathlib the same as none
    [found] = cache_folders(None)
    assert found.name == f"nanorl-wasm-{os.getuid()}"


def test_a_full_disk_says_where_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wasm_module.os, "fsync", full)
    folder = tmp_path / "cache"
    with pytest.raises(OSError, match=r"no place .* No space left on device"):
        ensure_module(str(folder))
    assert [one.name for one in folder.iterdir()] == ["lock"]


def test_of_two_that_come_at_once_one_compiles(tmp_path: Path) -> None:
    folder, said = tmp_path / "cache", tmp_path / "said"
    command = [sys.executable, "-c", RIVAL, str(folder), str(said)]
    rivals = [subprocess.Popen(command) for _ in range(3)]
    assert [one.wait(60) for one in rivals] == [0, 0, 0]
    assert said.read_text() == "compiled\n"
    assert content(folder) == CODE


def test_a_killed_compiler_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder, said = tmp_path / "cache", tmp_path / "said"
    rival = subprocess.Popen([sys.executable, "-c", RIVAL, str(folder), str(said)])
    while not said.exists():
        assert rival.poll() is None, "it ended before it compiled"
    rival.kill()
    rival.wait()
    compile_module(folder)
    assert content(folder) == CODE
