"""What `import nanoinfer` promises: its example runs, and it costs no server."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_text import save_folder

import nanoinfer

OPTIONAL = ("starlette", "uvicorn", "pydantic", "llguidance", "tyro", "nanoinfer.server")


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_folder(tmp_path)
    assert nanoinfer.__doc__ is not None
    blocks = nanoinfer.__doc__.split("\n\n")
    example = textwrap.dedent(next(block for block in blocks if block.startswith("    ")))
    assert len(example.splitlines()) == 5
    code = example.replace("path/to/huggingface-folder", str(tmp_path))
    assert code != example, "the example names a folder"
    exec(code, {name: getattr(nanoinfer, name) for name in nanoinfer.__all__})
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("length -", "stop -")) for line in lines) == 2


def test_importing_it_imports_no_server_and_no_grammars() -> None:
    code = f"import sys, nanoinfer; print(*[name for name in {OPTIONAL} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
