"""The book stands alone: copies of it without the wings train the pages, and a whole run.

Of a page are copied what the walks enter and import, the packages' doors, the C++, and the files
that a set-up asks for by name: choosing an engine, checking options, fresh weights, compiling.
Those are listed, so that nothing joins them unseen. A run has options, papers and a sandbox, which
are wings, too: of it is listed what is left out.
"""

from __future__ import annotations

import json
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
from house import PACKAGES, House  # noqa: E402

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
AGENT = {
    "the sandbox": tuple(
        str(file.relative_to(ROOT)) for file in sorted((ROOT / "nanorl" / "sandbox").glob("*.py"))
    ),
    "supervised steps": (
        *("nanoengine/sft/chats.py", "nanoengine/text/tokenizer.py"),
        *("nanoengine/text/special_guard.py", "nanoengine/formats/template_files.py"),
        "kernels/varlen/flash_attention.py",
    ),
}
"""Beside SET_UP, for the page of an agent."""
NOT_OF_A_RUN = (
    *("kernels/gpu", "kernels/paged", "kernels/returns", "kernels/triton"),
    *("nanoinfer/dialects", "nanoinfer/server"),
    *("kernels/vision", "nanoengine/vision", "nanoinfer/vision"),
    *("nanorl/agents/endpoint", "nanorl/envs/hosting", "nanorl/envs/remote", "nanorl/envs/shipped"),
    *("nanorl/inspection", "nanorl/parsers", "nanorl/serving"),
    "nanorl/observability/trajectories",
)
"""Rooms that a run of preset tiny does without."""
OF_THE_COPY = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in repr(one).lower()]
sys.path[:] = [one for one in sys.path if "editable" not in one]
import nanorl
assert nanorl.__file__.startswith(sys.argv[1]), nanorl.__file__
"""
GRPO_PAGE = """
import grpo_on_a_page
rewards = [step["reward"] for step in grpo_on_a_page.train(steps=12)]
assert rewards[-1] > rewards[0] + 0.1, rewards
"""
AGENT_PAGE = """
import agent_on_a_page
steps = agent_on_a_page.train(steps=12)
assert all(step["gap"] == 0.0 for step in steps), steps
success = [step["reward"] for step in steps]
assert sum(success[-3:]) > sum(success[:3]) + 0.3, success
"""
TINY = """
from nanorl.cli import main
few = "--warm-start.steps 4 --rl.steps 2 --rl.tasks-per-step 4 --evaluation.num-tasks 4"
assert main(["train", "--preset", "tiny", "--out", sys.argv[1] + "/run", *few.split()]) == 0
"""


def copy(file: str, into: Path) -> None:
    """The file, and the doors of the packages that it stands in."""
    doors = [str(folder / "__init__.py") for folder in Path(file).parents if folder.parts]
    for one in [file, *doors]:
        (into / one).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / one, into / one)


def copy_book(into: Path, *set_ups: dict[str, tuple[str, ...]]) -> None:
    core = Walk.of(House(), [trace_steps()[name] for name in CORE])
    listed = [file for set_up in set_ups for files in set_up.values() for file in files]
    for file in (*core.closure, *listed):
        copy(file, into)
    for source in (ROOT / "kernels" / "cpp").iterdir():
        if source.suffix in (".h", ".cpp"):
            shutil.copy(source, into / "kernels" / "cpp")


def run(program: str, folder: Path) -> None:
    """Run a program in a process of its own, in which the copy's packages are the only ones."""
    done = subprocess.run(
        [sys.executable, "-c", OF_THE_COPY + program, str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_a_page_trains_on_the_book_alone(native: None, tmp_path: Path) -> None:
    copy_book(tmp_path, SET_UP)
    shutil.copy(ROOT / "scripts" / "grpo_on_a_page.py", tmp_path)
    run(GRPO_PAGE, tmp_path)


def test_the_page_of_an_agent_trains_on_the_book_and_a_sandbox(
    native: None, tmp_path: Path
) -> None:
    copy_book(tmp_path, SET_UP, AGENT)
    shutil.copy(ROOT / "scripts" / "agent_on_a_page.py", tmp_path)
    run(AGENT_PAGE, tmp_path)


def test_a_tiny_run_trains_without_the_rooms_that_it_does_not_name(
    native: None, tmp_path: Path
) -> None:
    for package in PACKAGES:
        left_out = {Path(room) for room in NOT_OF_A_RUN}
        for file in sorted((ROOT / package).rglob("*")):
            path = file.relative_to(ROOT)
            if file.is_file() and file.suffix != ".pyc" and not left_out & {*path.parents}:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, tmp_path / path)
    run(TINY, tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["logp_gap_max"] == 0.0


@pytest.mark.parametrize(
    "file", [one for part in (SET_UP, AGENT) for files in part.values() for one in files]
)
def test_what_a_set_up_asks_for_is_there(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("room", NOT_OF_A_RUN)
def test_a_room_that_is_left_out_is_there(room: str) -> None:
    assert (ROOT / room).is_dir()
