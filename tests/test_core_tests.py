"""scripts/core_tests.py: which tests `bash scripts/test.sh core` runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from core_tests import core_tests

PAGE = """
1. [nanoinfer/engine_core.py](../nanoinfer/engine_core.py) `EngineCore.step`: asks the scheduler.
2. [nanorl/agents/loop.py](../nanorl/agents/loop.py) `Agent.play`
3. [kernels/rope.py](../kernels/rope.py) and [the tour](tour.md)
"""


def test_they_are_those_of_the_roots_and_of_other_files_that_are_walked(
    tmp_path: Path,
) -> None:
    wanted = ("nanoinfer/test_engine_core.py", "nanoinfer/test_anything.py")
    wanted += ("nanorl/agents/test_loop.py", "test_core_page.py")
    wanted += ("nanorl/test_batching.py",)
    others = ("nanorl/agents/test_loops.py", "nanoinfer/serving.py")
    others += ("nanoinfer/server/test_server.py", "kernels/test_rope.py", "test_book.py")
    for name in (*wanted, *others):
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert core_tests(PAGE, tmp_path) == sorted(f"tests/{name}" for name in wanted)
