"""The rules of the house that a program can check: import direction, packaging, first lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "nanosched", "nanoengine", "nanoinfer", "nanorl")
ALLOWED = {
    "kernels": set(),
    "nanosched": set(),
    "nanoengine": {"kernels"},
    "nanoinfer": {"kernels", "nanoengine.model", "nanoengine.parallel"},
    "nanorl": {"kernels", "nanosched", "nanoengine", "nanoinfer"},
}


def modules_imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(), str(path))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_only_downwards(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for name in modules_imported(path):
            top = name.split(".")[0]
            if top not in (*PACKAGES, "scripts", "tests") or top == package:
                continue
            is_allowed = any(
                name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[package]
            )
            assert is_allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_kernels_is_our_package_and_not_the_unrelated_one_of_that_name() -> None:
    import kernels

    assert Path(kernels.__file__).resolve().parent == ROOT / "kernels"


def test_setup_lists_every_package_that_exists_and_no_other() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    listed = set(ast.literal_eval(assigned["PACKAGES"]))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found


def test_source_files_say_what_they_are() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), f"{path.relative_to(ROOT)}: no docstring"
