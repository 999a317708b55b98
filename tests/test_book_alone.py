"""The book stands alone: a copy of it without the wings trains a page.

Copied are what the walks enter and import, the packages' doors, the C++, and the files that a
set-up asks for by name: choosing an engine, checking options, fresh weights, compiling. Those are
listed, so that nothing joins them unseen. Left out: agent_on_a_page.py, whose sandbox is a wing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from book import CORE, Walk  # noqa: E402
from core_steps import trace_steps  # noqa: E402
from house import House  # noqa: E402

SET_UP = {
    "the whole engines, which the pages make": (
        *("nanoengine/state/whole_engine.py", "nanoengine/state/kept_adamw.py"),
        *("nanoengine/heads/top_tokens.py", "nanoinfer/engine.py", "nanoinfer/config.py"),
        "nanoinfer/engine_memory.py",
    ),
    "options and shapes, checked and read": (
        *("nanoengine/our_kernels.py", "nanoengine/command_line.py", "nanoengine/extras.py"),
        *("nanoengine/plan/option_checks.py", "nanoengine/formats/config_json.py"),
        *("nanoengine/formats/families.py", "nanoengine/architectures/family_layer.py"),
        *("nanoengine/architectures/moe.py", "nanoengine/architectures/rope.py"),
        *("kernels/moe/fused_moe.py", "kernels/moe/clamped_swiglu.py"),
        *("kernels/moe/grouped_gemm.py", "kernels/moe/moe_routing.py"),
        *("kernels/torch/geglu.py", "kernels/torch/swiglu.py"),
        "nanoengine/parallel/parameter_record.py",
    ),
    "weights from nothing, and the compiler": (
        *("nanoengine/model/rope_tables.py", "nanoengine/model/fresh_weights.py"),
        "kernels/cpp/build.py",
    ),
}
ALONE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
sys.path[:] = [one for one in sys.path if "editable" not in one]
import grpo_on_a_page, nanorl
assert nanorl.__file__.startswith(sys.argv[1]), nanorl.__file__
rewards = [step["reward"] for step in grpo_on_a_page.train(steps=12)]
assert rewards[-1] > rewards[0] + 0.1, rewards
"""


def copy(file: str, into: Path) -> None:
    """The file, and the doors of the packages that it stands in."""
    doors = [str(folder / "__init__.py") for folder in Path(file).parents if folder.parts]
    for one in [file, *doors]:
        (into / one).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / one, into / one)


def test_a_page_trains_on_the_book_alone(native: None, tmp_path: Path) -> None:
    core = Walk.of(House(), [trace_steps()[name] for name in CORE])
    for file in (*core.closure, *(one for files in SET_UP.values() for one in files)):
        copy(file, tmp_path)
    for source in (ROOT / "kernels" / "cpp").iterdir():
        if source.suffix in (".h", ".cpp"):
            shutil.copy(source, tmp_path / "kernels" / "cpp")
    shutil.copy(ROOT / "scripts" / "grpo_on_a_page.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", [one for files in SET_UP.values() for one in files])
def test_what_a_set_up_asks_for_is_there(file: str) -> None:
    assert (ROOT / file).is_file()
