"""Pictures of other formats are decoded where nothing is to be had: limits, a filter, one error."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.vision import decoder_process, decoder_program
from nanoengine.vision.decoder_process import decode
from nanoengine.vision.picture_header import picture_header

image: Any = pytest.importorskip("PIL.Image")
KINDS = ["JPEG", "WEBP", "GIF"]


def saved(kind: str, width: int = 31, height: int = 17, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    image.fromarray(noise).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_headers_say_the_sides_that_pillow_reads(kind: str) -> None:
    variants: dict[str, list[dict[str, Any]]] = {
        "JPEG": [{}, {"progressive": True}, {"exif": b"Exif\0\0" + bytes(5000)}],
        "WEBP": [{"lossless": True}, {"quality": 50}, {"exif": b"Exif\0\0II*\0"}],
    }
    for options in variants.get(kind, [{}]):
        for width, height in ((1, 1), (31, 17), (300, 1000)):
            data = saved(kind, width, height, **options)
            assert picture_header(data) == (kind, *image.open(io.BytesIO(data)).size)


@pytest.mark.parametrize("kind", KINDS)
def test_every_beginning_of_a_file_is_one_error_or_its_header(kind: str) -> None:
    data = saved(kind)
    for end in range(len(data) // 2):
        try:
            assert picture_header(data[:end]) == (kind, 31, 17)
        except ValueError:
            continue


def test_the_helper_gives_what_pillow_gives_here() -> None:
    data = saved("JPEG")
    assert np.array_equal(decode("JPEG", data), np.array(image.open(io.BytesIO(data))))


def test_a_jpeg_with_a_second_picture_is_its_first() -> None:
    """As phones make them: with a smaller copy, or a map of brightness, behind."""
    second = image.new("RGB", (20, 10))
    data = saved("MPO", save_all=True, append_images=[second])
    assert picture_header(data) == ("JPEG", 31, 17)
    with image.open(io.BytesIO(data)) as read:
        assert read.format == "MPO"
        assert np.array_equal(decode("JPEG", data), np.array(read))


SEALED = """
import socket, subprocess, sys, os
sys.path.insert(0, {folder!r})
import decoder_program as program
program.limit(1000)
print(program.seal(), flush=True)
for name, tried in dict(
    open=lambda: open("/etc/passwd"), write=lambda: open("/tmp/x-sealed", "w"),
    socket=lambda: socket.socket(), fork=os.fork, execute=lambda: os.execv("/bin/true", ["true"]),
    kill=lambda: os.kill(os.getppid(), 0), read=lambda: os.read(0, 1),
).items():
    try:
        tried()
        print(name, "done", flush=True)
    except OSError as error:
        print(name, error.errno, flush=True)
try:
    bytearray(4 << 30)
except MemoryError:
    print("memory", flush=True)
"""


@pytest.mark.skipif(platform.machine() not in decoder_program._CALLS, reason="no such filter")
def test_a_sealed_process_can_do_nothing_but_write_what_is_open() -> None:
    folder = str(Path(decoder_program.__file__).parent)
    said = subprocess.run(
        [sys.executable, "-I", "-c", SEALED.format(folder=folder)],
        capture_output=True, text=True, check=False, input="secret",
    )  # fmt: skip
    refused = [
        f"{name} 1" for name in ("open", "write", "socket", "fork", "execute", "kill", "read")
    ]
    assert said.stdout.split("\n")[:-1] == ["True", *refused, "memory"], said.stderr


OPENS = """
import sys
sys.path.insert(0, {folder!r})
import decoder_program as program
program.warm_up = lambda kind: None
program.decoded = lambda data, kind: open("/etc/passwd", "rb").read()
program.main("GIF", 1000)
"""


@pytest.mark.skipif(platform.machine() not in decoder_program._CALLS, reason="no such filter")
def test_a_decoder_that_was_taken_over_opens_nothing() -> None:
    folder = str(Path(decoder_program.__file__).parent)
    said = subprocess.run(
        [sys.executable, "-I", "-c", OPENS.format(folder=folder)],
        capture_output=True, check=False, input=b"",
    )  # fmt: skip
    assert said.stdout[:8] == bytes(8) and b"Operation not permitted" in said.stdout


def test_what_breaks_its_decoder_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = saved("GIF")

    def program(text: str) -> None:
        (tmp_path / "program.py").write_text(text)
        monkeypatch.setattr(decoder_process, "_PROGRAM", tmp_path / "program.py")

    program("import os; os.abort()")
    with pytest.raises(ValueError, match=r"this GIF cannot be read \(it broke its decoder\)"):
        decode("GIF", data)
    program("import time; time.sleep(60)")
    with pytest.raises(ValueError, match=r"it took more than 0\.5 s"):
        decode("GIF", data, limit_s=0.5)
    program("import sys; sys.stdout.buffer.write(b'\\x02\\0\\0\\0' * 2 + bytes(12))")
    with pytest.raises(ValueError, match="its pixels are not as many as its header says"):
        decode("GIF", data)
    program("import os; print(os.environ, os.getcwd())")
    with pytest.raises(ValueError, match="cannot be read"):
        decode("GIF", data)
