"""`kernels` is the name of our package and of Hugging Face's: whichever was installed last has
overwritten the other, and importing ours says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).resolve().parents[2]
OURS = ("kernels", "nanoengine", "nanoinfer", "nanorl", "nanosched")
THEIRS = {
    "kernels/__init__.py": "from kernels.layer import Device\n",
    "kernels/backends.py": "",
    "kernels/layer/__init__.py": "class Device: ...\n",
    "kernels-0.17.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n",
}


def install_ours(site: Path) -> None:
    for name in OURS:
        shutil.copytree(
            ROOT / name, site / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pyc*")
        )


def install_theirs(site: Path) -> None:
    """The layout of their wheel."""
    for name, text in THEIRS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def said_by(program: str, site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("package", ["nanorl", "nanoengine", "nanoinfer"])
def test_theirs_over_ours_is_named_with_the_two_commands_that_mend_it(
    package: str, tmp_path: Path
) -> None:
    install_ours(tmp_path)
    install_theirs(tmp_path)
    done = said_by(f"import {package}", tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: "), done.stderr
    assert f"{tmp_path}/kernels" in last and "Hugging Face's `kernels`" in last
    assert "-m pip uninstall -y kernels && " in last and " install --force-reinstall " in last


def test_what_their_removal_leaves_is_named_too(tmp_path: Path) -> None:
    """pip takes away every file of its list: our `__init__.py` is among them."""
    install_ours(tmp_path)
    (tmp_path / "kernels" / "__init__.py").unlink()
    last = said_by("import nanorl", tmp_path).stderr.splitlines()[-1]
    assert "overwritten" in last and "--force-reinstall" in last


def test_ours_over_theirs_works_and_warns_of_transformers(tmp_path: Path) -> None:
    install_theirs(tmp_path)
    install_ours(tmp_path)
    done = said_by("import nanorl, sys; print('torch' in sys.modules)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("UserWarning") == 1 and "transformers" in done.stderr
    assert "uninstall -y kernels" in done.stderr


def test_ours_alone_is_silent(tmp_path: Path) -> None:
    install_ours(tmp_path)
    done = said_by("import nanorl, nanoengine", tmp_path, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


def test_transformers_imports_beside_ours_and_does_not_take_it_for_theirs(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the extra dev)")
    install_ours(tmp_path)
    program = """
import nanorl, kernels
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_kernels_available
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=8,
                     num_attention_heads=1, num_key_value_heads=1)
LlamaForCausalLM(config)
print(kernels.__file__, is_kernels_available())
"""
    done = said_by(program, tmp_path)
    assert done.stdout.split() == [f"{tmp_path}/kernels/__init__.py", "False"], done.stderr
