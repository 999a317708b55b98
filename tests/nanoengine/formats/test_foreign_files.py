"""Adapters, checkpoints and model folders that somebody else has made: names in them lead nowhere
else, sizes in them are believed no further than the file reaches, and no pattern runs for ever."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from nanoengine.adapters.lora import LowRank, read_adapter, write_adapter
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.formats.hf import read_state
from nanoengine.state.checkpoint import latest_checkpoint, open_checkpoint, write_meta, write_synced
from nanoengine.state.run_folder import take_lock
from nanoengine.state.tensor_file import CheckpointError, read_header, write_tensors


def header_file(path: Path, header: object, *, size: int | None = None, more: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + more)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "a size beyond the file": ({"a": ENTRY}, 1 << 40, bytes(8)),
    "a size of 64 bits": ({"a": ENTRY}, 2**64 - 1, bytes(8)),
    "deep": (b"[" * 100_000, None, b""),
    "a list": ([1], None, b""),
    "no place": ({"a": {"dtype": "F32", "shape": [2]}}, None, bytes(8)),
    "a place beyond the file": ({"a": ENTRY | {"data_offsets": [8, 16]}}, None, bytes(8)),
    "a place before the file": ({"a": ENTRY | {"data_offsets": [-64, -56]}}, None, bytes(8)),
    "a shape larger than its place": ({"a": ENTRY | {"shape": [1 << 50]}}, None, bytes(8)),
    "a negative shape": ({"a": ENTRY | {"shape": [-1, -2]}}, None, bytes(8)),
    "an unknown type": ({"a": ENTRY | {"dtype": "X"}}, None, bytes(8)),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_is_believed_no_further_than_the_file_reaches(tmp_path: Path, kind: str) -> None:
    header, size, more = HEADERS[kind]
    file = header_file(tmp_path / "x.safetensors", header, size=size, more=more)
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        read_header(file)


def checkpoint(root: Path, **changed: object) -> Path:
    """A checkpoint of one tensor, with its record changed by hand and its checksum right."""
    folder = root / "step_00000001"
    folder.mkdir(parents=True)
    facts = write_tensors(folder / "rank.safetensors", {"a": torch.ones(2)})
    record = {
        "format": 1,
        "step": 1,
        "serial": 1,
        "files": {"rank.safetensors": facts},
        "meta": {"cursor": {}},
    }
    write_meta(folder, record | changed)
    return folder


def test_a_checkpoint_names_its_own_files_alone(tmp_path: Path) -> None:
    assert open_checkpoint(checkpoint(tmp_path / "good")).read("a").tolist() == [1.0, 1.0]
    facts = write_tensors(tmp_path / "secret.safetensors", {"a": torch.zeros(2)})
    for name in ("../../secret.safetensors", str(tmp_path / "secret.safetensors")):
        folder = checkpoint(tmp_path / f"bad{len(name)}", files={name: facts})
        with pytest.raises(CheckpointError, match="is no name of a file in it"):
            open_checkpoint(folder)


def test_latest_names_a_checkpoint_of_its_own_folder(tmp_path: Path) -> None:
    ours, theirs = checkpoint(tmp_path / "ours"), checkpoint(tmp_path / "theirs")
    for name in ("../ours/step_00000001", str(ours)):
        (theirs.parent / "latest").write_text(name)
        assert latest_checkpoint(theirs.parent) == theirs


def test_a_tensor_larger_than_its_parts_is_not_made(tmp_path: Path) -> None:
    pieces = {"rank.safetensors": {"a": {"name": "a", "whole": [1 << 45], "begin": [0]}}}
    opened = open_checkpoint(checkpoint(tmp_path, pieces=pieces, format=2))
    with pytest.raises(CheckpointError, match="nothing holds all of a"):
        opened.read("a")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", 3])
def test_an_index_names_its_own_files_alone(tmp_path: Path, name: object) -> None:
    write_tensors(tmp_path / "secret.safetensors", {"a": torch.zeros(2)})
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    write_tensors(folder / "sub" / "x.safetensors", {"a": torch.zeros(2)})
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index"):
        list(read_state(folder))


def adapter(folder: Path, **changed: object) -> Path:
    name = "model.layers.0.self_attn.q_proj"
    change = LowRank(torch.zeros(2, 4), torch.zeros(4, 2), 1.0)
    write_adapter(folder, {name: change}, LoraConfig(rank=2), targets=["q_proj"])
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return folder


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(([a-z])+.)+[A-Z]([a-z])+$", "(.*)*x", "(?=(.*)+)x", r"(.+)\1+x",
        "(a|aa){1,90}x", ".*.*.*.*.*.*.*.*x", "a" * 1000, "(", "(?P<x>.*)",
    ],
)  # fmt: skip
def test_a_pattern_of_an_adapter_does_not_run_for_ever(tmp_path: Path, pattern: str) -> None:
    folder = adapter(tmp_path / "adapter", alpha_pattern={pattern: 3})
    with pytest.raises(ValueError, match=r"alpha_pattern .* is not supported"):
        read_adapter(folder)


def test_the_patterns_that_peft_writes_are_read(tmp_path: Path) -> None:
    for pattern in ("q_proj", r"layers\.0\..*q_proj", r"self_attn.(q|k)_proj", r".*\.\d+\..*_proj"):
        folder = adapter(tmp_path / "adapter", alpha_pattern={pattern: 32, "k_proj": 1})
        (change,) = read_adapter(folder).values()
        assert change.scale == 16.0, pattern


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", '{"peft_type": "LORA"}'])
def test_a_config_of_an_adapter_is_one_error(tmp_path: Path, text: str) -> None:
    folder = adapter(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        read_adapter(folder)


def test_what_is_written_into_a_folder_goes_through_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all that I have")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("lock", ".config.json"):
        (folder / name).symlink_to(precious)
    with pytest.raises((OSError, ValueError)):
        os.close(take_lock(folder / "lock"))
    with pytest.raises((OSError, ValueError)):
        write_synced(folder / ".config.json", "{}")
    assert precious.read_text() == "all that I have"
