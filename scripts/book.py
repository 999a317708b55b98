"""Measures the book: the files that a default step enters and what they import.

    python scripts/book.py             the table, each measure beside its goal
    python scripts/book.py --write     docs/core.md says the figures

The book is what one decode step and one GRPO step of the tiny preset run through on a CPU
(core_steps.py runs them), and what those files import. Everything else is a wing: it comes in by
name, "package.module:Object", or as an object that somebody else made. A rollout with a tool call
is the third walk, counted outside the engines.

    lines            of the files entered
    lines that run   of them, lines of functions that were entered, docstrings and comments included
    imports out      names that a file of the book, or one that it imports, takes from a wing,
                     wherever the import stands

The roots of the packages, nanoengine/model and kernels/cpp are the book's; other folders are wings.
Front doors stand in a root too, `LLMEngine` or nanorl's shell: the ceiling on files with all that
they import keeps a step from taking them in.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from generated_part import GeneratedPart
from house import PACKAGES, ROOT, Function, House, Module, count_lines

CORE = ("decode", "grpo")
ROOMS_OF_THE_BOOK = {*PACKAGES, "nanoengine/model", "kernels/cpp"}
ENGINES = ("kernels/", "nanoengine/", "nanoinfer/")
OF_THE_CHAT = "nanoinfer/chat/"  # how calls are written: a rollout's, not the engine's
PAGE = ROOT / "docs" / "core.md"
PART = GeneratedPart("size", "book.py")
BARE = re.compile(r"^(What|Where|Which|Whether|Who|Whose|How|Of)\b")


@dataclass(frozen=True)
class Walk:
    """The files that a step entered, each with the qualified names of its functions."""

    entered: Mapping[str, frozenset[str]]
    house: House

    @classmethod
    def of(cls, house: House, steps: Iterable[Mapping[str, Iterable[str]]]) -> Walk:
        found: dict[str, set[str]] = defaultdict(set)
        for step in steps:
            for file, functions in step.items():
                found[file] |= set(functions)
        return cls({file: frozenset(names) for file, names in found.items()}, house)

    def outside_the_engines(self) -> Walk:
        """The same without the engines' files."""
        left = {
            file: names
            for file, names in self.entered.items()
            if not file.startswith(ENGINES) or file.startswith(OF_THE_CHAT)
        }
        return Walk(left, self.house)

    @cached_property
    def by_file(self) -> dict[str, Module]:
        """Every module of the packages by its file."""
        return {
            str(module.path.relative_to(self.house.root)): module
            for module in self.house.modules.values()
        }

    @cached_property
    def modules(self) -> dict[str, Module]:
        return {file: self.by_file[file] for file in self.entered}

    @property
    def num_lines(self) -> int:
        return sum(len(module.source.splitlines()) for module in self.modules.values())

    @property
    def num_lines_that_run(self) -> int:
        return sum(self.lines_that_run(file) for file in self.entered)

    def lines_that_run(self, file: str) -> int:
        """A nested function is a part of the one around it."""
        names = self.entered[file]
        return sum(
            (function.end_lineno or function.lineno) - function.lineno + 1
            for name, function in outer_functions(self.modules[file].tree)
            if name in names
        )

    @property
    def comments_per_100(self) -> float:
        counts = [count_lines(module) for module in self.modules.values()]
        return round(100 * sum(n for _, n in counts) / max(1, sum(n for n, _ in counts)), 1)

    @property
    def longest_class(self) -> tuple[int, str]:
        """Lines and name of the longest class."""
        return max(
            ((node.end_lineno or node.lineno) - node.lineno + 1, f"{file}: {node.name}")
            for file, module in self.modules.items()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        )

    @cached_property
    def imports_out(self) -> list[str]:
        """`file -> file: name`, for every name that the book takes from a wing. An `__init__` that
        only names its package is nobody's."""
        return sorted(
            f"{file} -> {target}: {name}"
            for file in self.closure
            if is_of_the_book(file)
            for target, name in imported(self.by_file[file], self.house.root)
            if not is_of_the_book(target) and not target.endswith("__init__.py")
        )

    @property
    def num_lines_with_imports(self) -> int:
        return sum(len(self.by_file[file].source.splitlines()) for file in self.closure)

    @cached_property
    def closure(self) -> set[str]:
        """The files entered and, wherever an import stands, all that they lead to."""
        found, waiting = set(self.entered), list(self.entered)
        while waiting:
            for target, _ in imported(self.by_file[waiting.pop()], self.house.root):
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return found


def is_of_the_book(file: str) -> bool:
    """Whether the file stands in a folder of the book; all others are wings."""
    return str(Path(file).parent) in ROOMS_OF_THE_BOOK


def outer_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, function) of all functions that are in no other."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from outer_functions(node, f"{prefix}{node.name}.")
        else:
            yield from outer_functions(node, prefix)


def imported(module: Module, root: Path) -> Iterator[tuple[str, str]]:
    """(file, name) of everything of ours that a module imports, at its top, in a function or for
    its types alone."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        else:
            continue
        for name, parent in names:
            if name.split(".")[0] in PACKAGES and (file := file_of(name, parent, root=root)):
                yield file, name.removeprefix(f"{parent}.")


def file_of(*names: str, root: Path) -> str | None:
    """The file of the first of these dotted names that is a module or a package."""
    for name in names:
        path = Path(*name.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (root / candidate).exists():
                return str(candidate)
    return None


# -- rooms -----------------------------------------------------------------------------------------


def rooms(house: House, package: str = "nanorl") -> dict[str, set[str]]:
    """The root of a package and its folders: each with those whose names it imports. The package's
    own `__init__` is its front door, which names what users import: it is of no room."""
    arrows: dict[str, set[str]] = {}
    for module in house.of(package):
        if module.name == package:
            continue
        here = room(module.path.relative_to(house.root))
        arrows.setdefault(here, set())
        for file, _ in imported(module, house.root):
            if file.startswith(f"{package}/") and room(Path(file)) != here:
                arrows[here].add(room(Path(file)))
    return arrows


def room(path: Path) -> str:
    return path.parts[1] if len(path.parts) > 2 else "root"


def arrows_up(arrows: Mapping[str, set[str]]) -> int:
    """How many arrows run against the order in which most run down (Eades, Lin and Smyth 1993)."""
    edges = {(one, other) for one, others in arrows.items() for other in others}
    nodes, top, bottom = set(arrows), [], []  # type: ignore[var-annotated]
    while nodes:
        out = {n: sum((n, m) in edges for m in nodes) for n in nodes}
        into = {n: sum((m, n) in edges for m in nodes) for n in nodes}
        if sinks := sorted(n for n in nodes if not out[n]):
            bottom.append(sinks[0])
            nodes.remove(sinks[0])
            continue
        first = max(sorted(nodes), key=lambda n: (not into[n], out[n] - into[n]))
        top.append(first)
        nodes.remove(first)
    place = {name: i for i, name in enumerate([*top, *reversed(bottom)])}
    return sum(place[one] > place[other] for one, other in edges)


def names_used_twice(house: House) -> int:
    counts = Counter(
        module.path.name
        for package in PACKAGES
        for module in house.of(package)
        if module.path.name != "__init__.py"
    )
    return sum(number > 1 for number in counts.values())


def bare_docstrings(house: House) -> float:
    """The share, in %, of docstrings of classes and functions that begin with a bare relative."""
    texts = [
        text
        for package in PACKAGES
        for module in house.of(package)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef | Function) and (text := ast.get_docstring(node))
    ]
    return round(100 * sum(bool(BARE.match(text)) for text in texts) / len(texts), 1)


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A figure of the book and its goal; `is_floor` where more is better."""

    name: str
    value: float
    goal: float
    is_floor: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.goal if self.is_floor else self.value <= self.goal


def measures(house: House, steps: Mapping[str, Mapping[str, Iterable[str]]]) -> list[Measure]:
    """Every measure of the book, of the third walk where `steps` has it, and of the house."""
    core = Walk.of(house, [steps[name] for name in CORE])
    run = core.num_lines_that_run
    inner = rooms(house)
    found = [
        Measure("core: files", len(core.entered), 45),
        Measure("core: lines", core.num_lines, 8000),
        Measure("core: lines that run", run, 4800),
        Measure("core: share that runs, %", round(100 * run / core.num_lines, 1), 55, True),
        Measure("core: names imported from wings", len(core.imports_out), 0),
        Measure("core: files with all that they import", len(core.closure), 45),
        Measure("core: lines with all that they import", core.num_lines_with_imports, 8000),
        Measure("core: comments per 100 lines of code", core.comments_per_100, 5, True),
        Measure("core: lines of the longest class", core.longest_class[0], 400),
        Measure("nanorl: rooms", len(inner), 20),
        Measure("nanorl: arrows between rooms", sum(map(len, inner.values())), 90),
        Measure("nanorl: arrows up", arrows_up(inner), 0),
        Measure("file names used twice", names_used_twice(house), 40),
        Measure("bare docstrings, %", bare_docstrings(house), 2),
    ]
    if "rollout" in steps:
        third = Walk.of(house, [steps["rollout"]])
        outside = Walk({file: frozenset() for file in third.closure}, house).outside_the_engines()
        found += [
            Measure("rollout: files with all that they import", len(outside.entered), 40),
            Measure("rollout: lines with all that they import", outside.num_lines, 5000),
        ]
    return found


def paragraph(house: House, steps: Mapping[str, Mapping[str, Iterable[str]]]) -> str:
    """The sentences of docs/core.md."""
    core = Walk.of(house, [steps[name] for name in CORE])
    share = 100 * core.num_lines_that_run / core.num_lines
    return (
        f"The two steps enter {len(core.entered)} files of {core.num_lines:,} lines, of which "
        f"{core.num_lines_that_run:,} ({share:.0f} %)\nlie in functions that run. With all that "
        f"they import they are {len(core.closure)} files of "
        f"{core.num_lines_with_imports:,} lines.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the book.")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/core.md")
    parser.add_argument("--out", action="store_true", help="list the imports out of the book")
    options = parser.parse_args()
    from core_steps import trace_rollout, trace_steps

    house, steps = House(), {**trace_steps(), "rollout": trace_rollout()}
    if options.write:
        PAGE.write_text(PART.put(PAGE.read_text(), paragraph(house, steps)))
    for measure in measures(house, steps):
        word = "" if measure.is_met else "  missed"
        print(f"{measure.name:42}{measure.value:>9,}   goal {measure.goal:>6,}{word}")
    core = Walk.of(house, [steps[name] for name in CORE])
    if options.out:
        print("\n".join(core.imports_out))


if __name__ == "__main__":
    main()
