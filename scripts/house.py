"""Measures the house: lines, files, import circles, names without a user, long parameter lists.

    python scripts/house.py
    python scripts/house.py --json house.json

The source is read with `ast`, and one decode step and one GRPO step are run (core_steps.py) to see
which files they enter. The laws of tests/test_house.py are a few lines each over the same `House`.

A name counts as used where the source refers to it: through an import, wherever that import stands
and whichever `__init__` hands the name on, or in its own module outside its own body. Methods are
told by their bare names, because the source does not say what type an object has.
Left out: programs that are texts (`python -c "from ... import main"`); a name that only such a text
has stands in the laws' lists of exceptions.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import re
import statistics
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "nanosched", "nanoengine", "nanoinfer", "nanorl")
USERS = ("scripts", "examples")  # may use the packages' public names; tests are not asked
MOST_PARAMETERS = 7  # `self` and `cls` are not counted
CPP = (".cpp", ".h")
FILE_NAME = re.compile(r"(?<![\w*/<>{}$.-])((?:\.\./)*[\w/.-]*\w\.(?:py|sh|cpp|h|md))\b(?![*(])")
NAMED_INSIDE = re.compile(r"`([\w/]+\.py): (\w+(?:\.\w+)?)")
HISTORY = ("log.md", "CHANGELOG.md")  # they name files that have gone
DIRECTIVES = re.compile(r"#\s*(type:|noqa|fmt:|ruff:|mypy:)")  # comments that tell people nothing
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Name(NamedTuple):
    """A name at the top of a module; `name` is "" where the module itself is meant."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    @property
    def is_private(self) -> bool:
        parts = [*self.module.split("."), self.name]
        return any(part.startswith("_") and not _is_dunder(part) for part in parts)


class Reference(NamedTuple):
    """Somewhere in `user`, a definition or a module's own statements, `target` is named."""

    user: Name
    target: Name


class Sized(NamedTuple):
    """A function and what is counted of it."""

    name: str  # with its class
    module: str
    num_lines: int
    num_parameters: int
    is_kernel: bool  # compiled by Triton: its parameters are pointers, strides and tile sizes


def parse(source: str, path: Path = Path("<annotation>"), mode: str = "exec") -> Any:
    """`ast.parse` without garbage collection: in CPython 3.11 a finalizer that runs meanwhile and
    formats a traceback, which parses too, makes it fail ("recursion depth mismatch")."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source, str(path), mode)
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class Module:
    """One parsed file."""

    name: str
    path: Path
    source: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @classmethod
    def read(cls, path: Path, root: Path) -> Module:
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text()
        return cls(name, path, source, parse(source, path))

    @property
    def package(self) -> str:
        return self.name.split(".")[0]

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """What the module defines at its top, also under `if` and `try`: name -> statement."""
        found: dict[str, ast.stmt] = {}
        for statement in _top_statements(self.tree.body):
            for name in _defined_names(statement):
                found.setdefault(name, statement)
        return found

    @property
    def is_door(self) -> bool:
        """True for an `__init__` that defines nothing and only hands names on."""
        own = (name for name in self.definitions if not _is_dunder(name) and name[0] != "_")
        return self.path.name == "__init__.py" and not any(own)

    @cached_property
    def imports(self) -> dict[str, list[Name]]:
        """What the file's imports bind, at whatever depth they stand: local name -> what is meant,
        as written (`House.resolve` finds where it is defined)."""
        bound: dict[str, list[Name]] = defaultdict(list)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound[alias.asname or alias.name].append(Name(alias.name, ""))
                    if not alias.asname:  # `import a.b` binds a; the entry "a.b" is for the graph
                        root = alias.name.split(".")[0]
                        bound[root].append(Name(root, ""))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    bound[alias.asname or alias.name].append(Name(node.module, alias.name))
        for name, place in self._lazy.items():
            module, _, inside = place.partition(":")
            bound[name].append(Name(module, inside))
        return bound

    @property
    def _lazy(self) -> dict[str, str]:
        """Names that a door hands on when they are first asked for, by a dict of "module:name"
        that its `__getattr__` reads."""
        found: dict[str, str] = {}
        if self.path.name == "__init__.py" and "__getattr__" in self.definitions:
            for statement in self.tree.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                    pairs = zip(statement.value.keys, statement.value.values, strict=True)
                    texts = [
                        (key.value, value.value)
                        for key, value in pairs
                        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
                    ]
                    found |= {key: place for key, place in texts if ":" in str(place)}
        return found


class House:
    """The packages below `root` and the scripts that use them."""

    def __init__(
        self,
        root: Path = ROOT,
        packages: Sequence[str] = PACKAGES,
        users: Sequence[str] = USERS,
    ) -> None:
        self.root = root
        self.packages = tuple(packages)
        self.modules = _read(root, packages)
        self.users = _read(root, users)

    @property
    def all_modules(self) -> list[Module]:
        return [*self.modules.values(), *self.users.values()]

    def of(self, folder: str) -> list[Module]:
        """The modules of a package, or the scripts of a folder."""
        return [module for module in self.all_modules if module.package == folder]

    # -- who names what --------------------------------------------------------------------------

    def resolve(self, wanted: Name) -> Name | None:
        """Where a name that is written `wanted` is defined; None if it is none of ours."""
        for _ in range(20):  # a name is handed on once or twice; more would be a circle of doors
            module = self.modules.get(wanted.module)
            if module is None:
                return None
            if not wanted.name or wanted.name in module.definitions:
                return wanted
            handed_on = module.imports.get(wanted.name)
            inner = f"{wanted.module}.{wanted.name}"
            if handed_on:
                wanted = handed_on[0]
            elif inner in self.modules:
                return Name(inner, "")
            else:
                return Name(wanted.module, "")
        return None

    @cached_property
    def references(self) -> set[Reference]:
        """Who names what: users are the packages' definitions and the scripts'."""
        found: set[Reference] = set()
        for module in self.all_modules:
            for name, statement in _parts(module):
                user = Name(module.name, name)
                targets = set(self._named_in(module, statement))
                found |= {Reference(user, target) for target in targets if target != user}
        return found

    def _named_in(self, module: Module, statement: ast.AST) -> Iterator[Name]:
        """What `statement` names, defined in its own module or imported. An import that nobody
        uses names nothing."""
        for node in _walk_with_annotations(statement):
            if isinstance(node, ast.Name) and node.id in module.definitions:
                yield Name(module.name, node.id)
            elif isinstance(node, ast.Name | ast.Attribute):
                for written in self._as_written(module, node):
                    target = self.resolve(written)
                    if target is not None:
                        yield target

    def _as_written(self, module: Module, node: ast.expr) -> Iterator[Name]:
        """`sampling.sample` after `from kernels import sampling` is `kernels.logits: sample`."""
        if isinstance(node, ast.Name):
            yield from module.imports.get(node.id, ())
        elif isinstance(node, ast.Attribute):
            for owner in self._as_written(module, node.value):
                resolved = self.resolve(owner)
                if resolved is not None and not resolved.name:
                    yield Name(resolved.module, node.attr)
                elif resolved is None and not owner.name:  # `nanorl` of `import nanorl.envs.tasks`
                    yield Name(owner.module, node.attr)

    @cached_property
    def used(self) -> set[Name]:
        """Definitions that something outside their own body refers to, tests apart. That an
        `__init__` hands a name on is no use of it. A text such as "module.path:RuleReward",
        by which a table of names finds what it loads, is one."""
        return {reference.target for reference in self.references} | self._named_in_texts

    @cached_property
    def _named_in_texts(self) -> set[Name]:
        words, _ = self._words
        texts = (word.rpartition(":") for word in words if word.startswith(self.packages))
        found = (self.resolve(Name(place, name)) for place, _, name in texts if name.isidentifier())
        return {target for target in found if target is not None and target.name}

    def is_mentioned(self, method: str) -> bool:
        """True if packages or scripts have an attribute or a text of that name, or put it together
        for `getattr`."""
        words, prefixes = self._words
        return method in words or method.startswith(tuple(prefixes))

    @cached_property
    def _words(self) -> tuple[set[str], set[str]]:
        words: set[str] = set()
        prefixes: set[str] = set()
        for module in self.all_modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute):
                    words.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    words.add(node.value)
                elif isinstance(node, ast.Call):
                    prefixes |= _getattr_prefix(node)
        return words, prefixes

    # -- what the laws ask -----------------------------------------------------------------------

    def import_graph(self) -> dict[str, set[str]]:
        """Module -> modules it imports, wherever in the file; doors are looked through."""
        graph: dict[str, set[str]] = {
            name: set() for name, module in self.modules.items() if not module.is_door
        }
        for name in graph:
            for written in (one for group in self.modules[name].imports.values() for one in group):
                target = self.resolve(written)
                if target is not None and target.module in graph:
                    graph[name].add(target.module)
        for user, target in self.references:
            if user.module in graph and target.module in graph:
                graph[user.module].add(target.module)
        return {name: targets - {name} for name, targets in graph.items()}

    def broken_imports(self, folders: Sequence[str] = ()) -> list[str]:
        """`user -> target` for names of ours that nobody defines: in packages, scripts, `folders`.
        GPU tests and benchmarks import what no test of a CPU would miss."""
        found = set()
        for module in (*self.all_modules, *_read(self.root, folders).values()):
            for written in (one for group in module.imports.values() for one in group):
                if written.package in self.packages and not self._exists(written):
                    found.add(f"{module.name} -> {written}")
        return sorted(found)

    def _exists(self, written: Name) -> bool:
        module = self.modules.get(written.module)
        return module is not None and (
            not written.name
            or written.name in module.definitions
            or written.name in module.imports
            or f"{written.module}.{written.name}" in self.modules
        )

    def broken_file_names(self) -> dict[str, str]:
        """Files that documents, docstrings and comments name and that are not there -> who does.
        `optim.py` is there if some folder has one. Of `engine.py: LLMEngine.step` the name has to
        be there too. What history tells is not asked."""
        folders = (*self.packages, *USERS, "tests", "docs", "benchmarks")
        paths = [path for folder in folders for path in (self.root / folder).rglob("*")]
        paths += self.root.glob("*")
        known = {f"/{path.relative_to(self.root)}" for path in paths}
        texts = {
            path.relative_to(self.root): path.read_text()
            for path in paths
            if path.suffix == ".md" and path.name not in HISTORY
        }
        texts |= {m.path.relative_to(self.root): _prose(m) for m in self.all_modules}
        found: dict[str, set[str]] = defaultdict(set)
        for file, text in texts.items():
            for name in FILE_NAME.findall(text):
                plain = re.sub(r"^(\.\./)+", "", name)
                if not any(path.endswith(f"/{plain}") for path in known):
                    found[plain].add(str(file))
            for name, inside in NAMED_INSIDE.findall(text):
                if not self._is_defined_in(name, inside):
                    found[f"{name}: {inside}"].add(str(file))
        return {name: ", ".join(sorted(users)) for name, users in sorted(found.items())}

    def _is_defined_in(self, file: str, name: str) -> bool:
        """True if a module whose path ends in `file` has `Class.method` or `function` `name`, or if
        there is no such module."""
        owner, _, method = name.partition(".")
        found = [m for m in self.all_modules if f"/{m.path}".endswith(f"/{file}")]
        return not found or any(
            owner in module.definitions
            and re.search(rf"\b{method}\b", ast.unparse(module.definitions[owner]))
            for module in found
        )

    def import_circles(self) -> list[list[str]]:
        """Sets of modules that import one another, each sorted."""
        return sorted(sorted(circle) for circle in _components(self.import_graph()))

    def classes_of_one_name(self) -> dict[str, list[str]]:
        """Public class name -> its modules, for names that more than one module defines."""
        homes: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for name, statement in module.definitions.items():
                if isinstance(statement, ast.ClassDef) and not name.startswith("_"):
                    homes[name].add(module.name)
        return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > 1}

    def without_a_user(self) -> list[Name]:
        """Public definitions, and public methods (`Class.method`), that only tests name. References
        (`*_ref`) are excepted: they are there for tests to compare with."""
        found = []
        for module in self.modules.values():
            for name, statement in module.definitions.items():
                is_asked = not name.startswith("_") and not name.endswith("_ref")
                if is_asked and Name(module.name, name) not in self.used:
                    found.append(Name(module.name, name))
                if isinstance(statement, ast.ClassDef) and self._owns_its_methods(
                    module, statement
                ):
                    found += [
                        Name(module.name, f"{name}.{method.name}")
                        for method in statement.body
                        if isinstance(method, Function)
                        and not method.name.startswith("_")
                        and not self.is_mentioned(method.name)
                    ]
        return sorted(set(found))

    def _methods_without_a_user(self, module: Module, statement: ast.ClassDef) -> list[Name]:
        return [
            Name(module.name, f"{statement.name}.{method.name}")
            for method in statement.body
            if isinstance(method, Function)
            and not method.name.startswith("_")
            and not self.is_mentioned(method.name)
            and self._owns_its_methods(module, statement)
        ]

    def _owns_its_methods(self, module: Module, statement: ast.ClassDef) -> bool:
        """False where a base from elsewhere (an autograd function, a visitor) calls them."""
        bases = [
            base.value if isinstance(base, ast.Subscript) else base for base in statement.bases
        ]
        for base in bases:
            name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
            is_ours = name in module.definitions or any(
                self.resolve(written) for written in self._as_written(module, base)
            )
            if not is_ours and name not in ("Protocol", "NamedTuple", "Generic", "Enum"):
                return False
        return True

    def private_imports(self) -> list[str]:
        """`user -> target` for private names and modules that another package or a script names."""
        found = set()
        for module in self.all_modules:
            for written in (one for group in module.imports.values() for one in group):
                if (
                    self.resolve(written)
                    and written.is_private
                    and written.package != module.package
                ):
                    found.add(f"{module.name} -> {written}")
        for user, target in self.references:
            if target.is_private and target.package != user.package:
                found.add(f"{user.module} -> {target}")
        return sorted(found)

    def ops(self, package: str = "kernels") -> set[Name]:
        """The public functions that `package` exports or that let the caller choose a back end."""
        found = set()
        door = self.modules[package]
        for written in (one for group in door.imports.values() for one in group):
            target = self.resolve(written)
            if target is not None and target.name:
                found.add(target)
        for module in self.of(package):
            for name, statement in module.definitions.items():
                if not isinstance(statement, Function) or name.startswith("_"):
                    continue
                if "backend" in _parameter_names(statement):
                    found.add(Name(module.name, name))
        return {op for op in found if isinstance(self._statement(op), Function)}

    def _statement(self, name: Name) -> ast.stmt | None:
        return self.modules[name.module].definitions.get(name.name)

    def ops_without_a_caller(self, package: str = "kernels") -> list[Name]:
        """Ops that no other package reaches, be it through other functions of `package`."""
        reached: set[Name] = set()
        waiting = [
            target
            for user, target in self.references
            if target.package == package != user.package and user.package in self.packages
        ]
        edges: dict[Name, list[Name]] = defaultdict(list)
        for user, target in self.references:
            if user.package == target.package == package:
                edges[user].append(target)
        for user, target in self._paths(package):
            edges[user].append(target)
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting += edges[name]
        return sorted(self.ops(package) - reached)

    def _paths(self, package: str) -> Iterator[Reference]:
        """What a table of "module:name" reaches, doors apart: a name on a door is no call."""
        for module in self.of(package):
            for name, statement in module.definitions.items():
                for node in ast.walk(statement) if not module.is_door else ():
                    if isinstance(node, ast.Constant) and ":" in str(node.value):
                        place, _, inside = str(node.value).partition(":")
                        target = self.resolve(Name(place, inside))
                        if target is not None:
                            yield Reference(Name(module.name, name), target)

    def functions(self, package: str) -> list[Sized]:
        """All functions and methods of a package, nested ones included."""
        return [sized for module in self.of(package) for sized in _functions(module)]

    def of_many_parameters(self, package: str) -> list[Sized]:
        return [one for one in self.functions(package) if one.num_parameters > MOST_PARAMETERS]


# -- reading ---------------------------------------------------------------------------------------


def _read(root: Path, folders: Iterable[str]) -> dict[str, Module]:
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    modules = (Module.read(path, root) for path in paths)
    return {module.name: module for module in modules}


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _top_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_statements(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _top_statements(handler.body)
        else:
            yield statement


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, Function | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _parts(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every top statement with the name that it defines: "" for those that define none. Imports
    and `__all__` name nothing."""
    for statement in _top_statements(module.tree.body):
        names = list(_defined_names(statement))
        if not isinstance(statement, ast.Import | ast.ImportFrom) and names != ["__all__"]:
            yield (names[0] if names else ""), statement
    for node in module.tree.body:  # the conditions of `if` and the heads of `with` at the top
        if isinstance(node, ast.If):
            yield "", ast.Expr(node.test)
        elif isinstance(node, ast.With):
            yield from (("", ast.Expr(item.context_expr)) for item in node.items)


def _walk_with_annotations(statement: ast.AST) -> Iterator[ast.AST]:
    """`ast.walk`, and what annotations in quotes say."""
    for node in ast.walk(statement):
        yield node
        annotation = getattr(node, "returns", None) or getattr(node, "annotation", None)
        for part in ast.walk(annotation) if annotation else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                try:
                    yield from ast.walk(parse(part.value, mode="eval"))
                except SyntaxError:  # a text of Literal["..."]
                    continue


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Strongly connected components of more than one node: of every node the nodes that it reaches
    and that reach it."""
    reach = {start: _reachable(graph, start) for start in graph}
    circles: list[set[str]] = []
    for start in graph:
        circle = {other for other in reach[start] if start in reach[other]}
        if len(circle) > 1 and circle not in circles:
            circles.append(circle)
    return circles


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def _getattr_prefix(call: ast.Call) -> set[str]:
    """{"run_"} for `getattr(x, f"run_{phase}")`."""
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr"
    if is_getattr and isinstance(call.args[1], ast.JoinedStr):
        first = call.args[1].values[0]
        if isinstance(first, ast.Constant):
            return {str(first.value)}
    return set()


# -- counting --------------------------------------------------------------------------------------


def _parameter_names(function: Function) -> list[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def _functions(module: Module) -> Iterator[Sized]:
    def visit(node: ast.AST, prefix: str) -> Iterator[Sized]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield Sized(
                    name=prefix + child.name,
                    module=module.name,
                    num_lines=(child.end_lineno or child.lineno) - child.lineno + 1,
                    num_parameters=len(_parameter_names(child)),
                    is_kernel=any("jit" in ast.unparse(one) for one in child.decorator_list),
                )
            is_scope = isinstance(child, Function | ast.ClassDef)
            yield from visit(child, f"{prefix}{child.name}." if is_scope else prefix)  # type: ignore[attr-defined]

    yield from visit(module.tree, "")


def _prose(module: Module) -> str:
    """Comments and docstrings."""
    parts = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            parts.append(ast.get_docstring(node) or "")
    return "\n".join(parts)


def count_lines(module: Module) -> tuple[int, int]:
    """(lines of code, comments): a line of code has a token other than a comment, and docstrings
    are no code."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in {*LAYOUT, tokenize.COMMENT}:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            first = node.body[0]
            code -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code), len(comment_lines(module))


def comment_lines(module: Module) -> set[int]:
    """The lines that have a comment which tells people something."""
    return {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(module.source).readline)
        if token.type == tokenize.COMMENT and not DIRECTIVES.match(token.string)
    }


def sizes(modules: Sequence[Module], functions: Sequence[Sized] = ()) -> dict[str, float]:
    """One row of the table."""
    counts = [count_lines(module) for module in modules]
    code = sum(lines for lines, _ in counts)
    lengths = sorted(one.num_lines for one in functions) or [0]
    return {
        "files": len(modules),
        "lines": sum(len(module.source.splitlines()) for module in modules),
        "code": code,
        "comments_per_100": round(100 * sum(number for _, number in counts) / max(code, 1), 1),
        "functions": len(functions),
        "median": statistics.median_low(lengths),
        "p90": lengths[int(0.9 * (len(lengths) - 1))],
        "max": lengths[-1],
        "many_parameters": sum(one.num_parameters > MOST_PARAMETERS for one in functions),
    }


def measure(house: House) -> dict[str, Any]:
    """Everything that the source says, as it goes into the JSON file."""
    functions = {package: house.functions(package) for package in house.packages}
    rows = {package: sizes(house.of(package), found) for package, found in functions.items()}
    every = [one for found in functions.values() for one in found]
    rows["packages"] = sizes(list(house.modules.values()), every)
    for folder in USERS:
        rows[folder] = sizes(house.of(folder), house.functions(folder))
    cpp = [path for package in house.packages for path in (house.root / package).rglob("*")]
    cpp = [path for path in cpp if path.suffix in CPP]
    rows["C++"] = {
        "files": len(cpp),
        "lines": sum(len(path.read_text().splitlines()) for path in cpp),
    }
    return {
        "sizes": rows,
        "import_circles": house.import_circles(),
        "classes_of_one_name": house.classes_of_one_name(),
        "without_a_user": [str(name) for name in house.without_a_user()],
        "private_imports": house.private_imports(),
        "ops": len(house.ops()),
        "ops_without_a_caller": [str(name) for name in house.ops_without_a_caller()],
        "many_parameters": [
            {"function": f"{one.module}.{one.name}", "parameters": one.num_parameters}
            for one in every
            if one.num_parameters > MOST_PARAMETERS
        ],
    }


def measure_steps() -> dict[str, Any]:
    """Files and functions of ours that the default steps enter (core_steps.py runs them)."""
    from core_steps import trace_steps

    steps = {name: dict(entered) for name, entered in trace_steps().items()}
    union = {file for entered in steps.values() for file in entered}
    counts = {
        name: {
            "files": len(entered),
            "functions": sum(len(functions) for functions in entered.values()),
            "entered": entered,
        }
        for name, entered in steps.items()
    }
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in union)
    return {**counts, "together": {"files": len(union), "lines": lines}}


COLUMNS = {
    "files": "files",
    "lines": "lines",
    "code": "code",
    "comments_per_100": "comments/100",
    "functions": "functions",
    "median": "median",
    "p90": "p90",
    "max": "max",
    "many_parameters": f">{MOST_PARAMETERS} parameters",
}


def show(measured: Mapping[str, Any]) -> str:
    """The table and the lists, for people."""
    lines = [f"{'':11}" + "".join(f"{title:>14}" for title in COLUMNS.values())]
    for name, row in measured["sizes"].items():
        cells = (f"{row.get(column, ''):>14}" for column in COLUMNS)
        lines.append((f"{name:11}" + "".join(cells)).rstrip())
    lines += [
        "",
        "code: lines that are not empty, a comment or a docstring; median, p90 and max: of",
    ]
    lines += ["the lines of a function; parameters are counted without self", ""]
    for title in ("import_circles", "classes_of_one_name", "without_a_user", "private_imports"):
        lines.append(f"{title.replace('_', ' ')}: {len(measured[title])}")
    lines.append(
        f"ops of kernels without a caller: {len(measured['ops_without_a_caller'])} of "
        f"{measured['ops']}"
    )
    lines += [f"import circle: {' <-> '.join(one)}" for one in measured["import_circles"]]
    for name, step in measured.get("steps", {}).items():
        counts = ", ".join(f"{step[unit]} {unit}" for unit in step if unit != "entered")
        lines.append(f"{name}: {counts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    parser.add_argument("--static", action="store_true", help="read the source only, run nothing")
    arguments = parser.parse_args()
    head = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    measured = {"date": date.today().isoformat(), "commit": commit, **measure(House())}
    if not arguments.static:
        measured["steps"] = measure_steps()
    print(show(measured))
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
