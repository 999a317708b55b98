"""Small bugs that can be planted into a source text: which there are, a draw, putting one in.

`candidates` reads a source text and lists every small change of a line that would be a bug;
`draw` picks some of them with a seed; `apply` puts one into a text. A mutation names its place by
the function and the text of its lines, not by their numbers, so that a list that was drawn once
can be put into later versions of the code, and one whose lines are gone says so (`GoneError`).

What is never changed, because nothing but words or speed would come of it (the rule was written
before anything was drawn): docstrings and texts of several words; type annotations; imports, and
what stands under `if TYPE_CHECKING`; decorators; calls of a log, of `print` and of warnings; texts
inside a `raise`; f-strings; `assert`; `__repr__` and `__str__`; numbers that are seconds, which
are those given to a name that ends in `_s` or to a `sleep`.

Left out: changes of two places at once, and running tests (mutants.py).
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

KINDS = ("compare", "arithmetic", "boolean", "not", "constant", "arguments", "dropped", "returned")
OTHER_COMPARISON: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
OTHER_OPERATOR: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
LOGS = ("log", "logger", "logging", "warnings", "print", "warn")


class GoneError(ValueError):
    """The lines that a mutation changes are not in the source any more."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change: in `function` of a file, the lines `before` become `after`."""

    file: str
    function: str
    """The qualified name, or "" at the top of the module; of a class its own name."""
    kind: str
    before: str
    after: str
    nth: int = 0
    """Which of several places of the function that read alike."""


@dataclass(frozen=True)
class _Scope:
    """A function, class or module while its tree is walked."""

    name: str
    first: int
    last: int


class _Source:
    """A source text by bytes, since `ast` counts columns in them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def cut(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self.data[first:last].decode()

    def lines(self, first: int, last: int) -> tuple[int, int]:
        """The whole lines around two places."""
        start = self.data.rfind(b"\n", 0, first) + 1
        end = self.data.find(b"\n", last)
        return start, len(self.data) if end < 0 else end


@dataclass(frozen=True)
class _Edit:
    """Bytes `first:last` of a source become `text`."""

    kind: str
    first: int
    last: int
    text: str


def candidates(file: str, text: str) -> list[Mutation]:
    """Every mutation of one file, in its order."""
    source = _Source(text)
    walked = _walk(source, source.tree, _Scope("", 1, text.count("\n") + 1), "")
    return list(dict.fromkeys(_as_lines(source, file, scope, edit) for scope, edit in walked))


def draw(sources: Mapping[str, str], *, seed: int, count: int) -> list[Mutation]:
    """The first `count` of an order that the seed decides: a kind, each equally often, then one of
    that kind. A line is changed once, and to something else that is Python."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Mutation]] = {}
    for file in sorted(sources):
        for mutation in candidates(file, sources[file]):
            by_kind.setdefault(mutation.kind, []).append(mutation)
    drawn: list[Mutation] = []
    places: set[tuple[str, str, str, int]] = set()
    while by_kind and len(drawn) < count:
        kind = rng.choice(sorted(by_kind))
        left = by_kind[kind]
        mutation = left.pop(rng.randrange(len(left)))
        if not left:
            del by_kind[kind]
        place = (mutation.file, mutation.function, mutation.before, mutation.nth)
        if place not in places and _is_another_program(mutation, sources[mutation.file]):
            places.add(place)
            drawn.append(mutation)
    return drawn


def apply(mutation: Mutation, text: str) -> str:
    """The text with the bug in it. `GoneError` where its function or its lines are not there."""
    found = places(mutation, text)
    if mutation.nth >= len(found):
        raise GoneError(
            f"{mutation.file}: {mutation.function or 'the module'} does not say any more: "
            f"{mutation.before.strip()}"
        )
    place = found[mutation.nth]
    data, old = text.encode(), mutation.before.encode()
    return (data[:place] + mutation.after.encode() + data[place + len(old) :]).decode()


def places(mutation: Mutation, text: str) -> list[int]:
    """Where the lines that it changes begin, in bytes. `GoneError` without its function."""
    source = _Source(text)
    spans = [
        (scope.first, scope.last)
        for scope in _scopes(source.tree, _Scope("", 1, text.count("\n") + 1))
        if scope.name == mutation.function
    ]
    if not spans:
        raise GoneError(f"{mutation.file} has no {mutation.function}")
    first = source.at(min(first for first, _ in spans), 0)
    return _places(source, mutation.before, first, max(last for _, last in spans))


def _places(source: _Source, before: str, first: int, last_line: int) -> list[int]:
    """Where whole lines that read like `before` begin, from a byte to a line."""
    data, wanted = source.data + b"\n", before.encode() + b"\n"
    end = source.lines(source.at(last_line, 0), source.at(last_line, 0))[1]
    places, at = [], data.find(wanted, first)
    while 0 <= at < end:
        if at == 0 or data[at - 1 : at] == b"\n":
            places.append(at)
        at = data.find(wanted, at + 1)
    return places


def _is_another_program(mutation: Mutation, text: str) -> bool:
    try:
        return ast.dump(ast.parse(apply(mutation, text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def _as_lines(source: _Source, file: str, scope: _Scope, edit: _Edit) -> Mutation:
    start, end = source.lines(edit.first, edit.last)
    before = source.data[start:end].decode()
    after = (source.data[start : edit.first] + edit.text.encode()).decode()
    after += source.data[edit.last : end].decode()
    first = source.at(scope.first, 0)
    nth = _places(source, before, first, scope.last).index(start)
    return Mutation(
        file=file, function=scope.name, kind=edit.kind, before=before, after=after, nth=nth
    )


# What is walked.


def _inner(node: ast.AST, scope: _Scope) -> _Scope:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return scope
    name = f"{scope.name}.{node.name}" if scope.name else node.name
    assert node.end_lineno is not None
    return _Scope(name, node.lineno, node.end_lineno)


def _scopes(node: ast.AST, scope: _Scope) -> Iterator[_Scope]:
    if isinstance(node, ast.Module):
        yield scope
    for child in ast.iter_child_nodes(node):
        inner = _inner(child, scope)
        if inner is not scope:
            yield inner
        yield from _scopes(child, inner)


def _walk(
    source: _Source, node: ast.AST, scope: _Scope, name: str
) -> Iterator[tuple[_Scope, _Edit]]:
    """Every edit at or below a node; `name` is what its value is given to."""
    for edit in _edits(source, node, name):
        yield scope, edit
    for child, given in _children(node, name):
        if not _is_left_alone(child):
            yield from _walk(source, child, _inner(child, scope), given)


def _children(node: ast.AST, name: str) -> Iterator[tuple[ast.AST, str]]:
    """The children that are walked, each with the name that its value is given to."""
    words = isinstance(node, ast.Raise)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child, "raise" if words else _given(node, field, child, name)


def _given(node: ast.AST, field: str, child: ast.AST, name: str) -> str:
    """The name of what `child` is given to: a target, a keyword, a parameter, a function."""
    if isinstance(node, ast.Assign) and field == "value":
        return _last_name(node.targets[0])
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and field == "value":
        return _last_name(node.target)
    if isinstance(node, ast.keyword):
        return name if name == "raise" else node.arg or ""
    if isinstance(node, ast.Call) and field in ("args", "keywords"):
        return name if name == "raise" else _last_name(node.func)
    if isinstance(node, ast.arguments) and field in ("defaults", "kw_defaults"):
        parameters = [*node.posonlyargs, *node.args] if field == "defaults" else node.kwonlyargs
        values: Sequence[ast.AST | None] = getattr(node, field)
        return parameters[len(parameters) - len(values) + values.index(child)].arg
    if isinstance(node, ast.stmt):
        return ""
    return name


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
        return True
    if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return True
    return isinstance(node, ast.Expr) and (_is_log(node.value) or _is_text(node.value))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_log(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    names = [each for each in ast.walk(node.func) if isinstance(each, ast.Name | ast.Attribute)]
    return any(_last_name(each).strip("_").lower() in LOGS for each in names)


# The changes that a node offers.


def _edits(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    makers: dict[type[ast.AST], Callable[[_Source, ast.AST, str], Iterator[_Edit]]] = {
        ast.Compare: _of_compare,
        ast.BinOp: _of_arithmetic,
        ast.AugAssign: _of_step,
        ast.BoolOp: _of_boolean,
        ast.UnaryOp: _of_not,
        ast.Constant: _of_constant,
        ast.Call: _of_call,
        ast.Return: _of_return,
    }
    maker = makers.get(type(node))
    if maker is not None:
        yield from maker(source, node, name)
    if _can_be_dropped(node):
        yield _Edit("dropped", *source.span(node), "pass")


def _can_be_dropped(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete | ast.Raise):
        return True
    return isinstance(node, ast.Continue | ast.Break)


def _swapped(
    source: _Source, kind: str, left: ast.AST, right: ast.AST, pair: tuple[str, str]
) -> Iterator[_Edit]:
    """The sign between two nodes replaced by its other."""
    start, end = source.span(left)[1], source.span(right)[0]
    between = source.data[start:end].decode()
    old, new = pair
    at = between.find(old)
    if at >= 0 and "#" not in between:
        first = start + len(between[:at].encode())
        yield _Edit(kind, first, first + len(old.encode()), new)


def _of_compare(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.Compare)
    lefts = [node.left, *node.comparators]
    for left, sign, right in zip(lefts, node.ops, node.comparators, strict=False):
        yield from _swapped(source, "compare", left, right, OTHER_COMPARISON[type(sign)])


def _of_arithmetic(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.BinOp)
    pair = OTHER_OPERATOR.get(type(node.op))
    if pair is not None and not any(isinstance(each, ast.JoinedStr) for each in ast.walk(node)):
        yield from _swapped(source, "arithmetic", node.left, node.right, pair)


def _of_step(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.AugAssign)
    pair = OTHER_OPERATOR.get(type(node.op))
    if pair is not None:
        yield from _swapped(source, "arithmetic", node.target, node.value, pair)


def _of_boolean(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.BoolOp)
    pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in itertools.pairwise(node.values):
        yield from _swapped(source, "boolean", left, right, pair)


def _of_not(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.UnaryOp)
    if isinstance(node.op, ast.Not):
        first, last = source.span(node)
        yield _Edit("not", first, last, f"({source.cut(node.operand)})")


def _of_constant(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.Constant)
    value, span = node.value, source.span(node)
    if isinstance(value, bool):
        yield _Edit("constant", *span, str(not value))
    elif isinstance(value, int | float) and not _is_seconds(name):
        yield _Edit("constant", *span, f"({source.cut(node)} + 1)")
        yield _Edit("constant", *span, f"({source.cut(node)} - 1)")
    elif isinstance(value, str) and value and " " not in value and name != "raise":
        yield _Edit("constant", *span, '""')
    elif isinstance(value, bytes) and value:
        yield _Edit("constant", *span, 'b""')


def _is_seconds(name: str) -> bool:
    return name.lower().endswith("_s") or name in ("sleep", "timeout")


def _of_call(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.Call)
    if name == "raise":
        return
    plain = [each for each in node.args if not isinstance(each, ast.Starred)]
    for left, right in itertools.pairwise(plain):
        one, other = source.cut(left), source.cut(right)
        if one != other:
            between = source.data[source.span(left)[1] : source.span(right)[0]].decode()
            first, last = source.span(left)[0], source.span(right)[1]
            yield _Edit("arguments", first, last, other + between + one)
    for keyword in node.keywords:
        if keyword.arg is not None and not _is_seconds(keyword.arg):
            first, last = source.span(keyword)
            rest = source.data[last:]
            more = len(rest) - len(rest.lstrip(b", \n")) if rest.lstrip()[:1] == b"," else 0
            yield _Edit("arguments", first, last + more, "")


def _of_return(source: _Source, node: ast.AST, name: str) -> Iterator[_Edit]:
    assert isinstance(node, ast.Return)
    value = node.value
    if value is None or (isinstance(value, ast.Constant) and value.value in (None, True, False)):
        return
    is_truth = isinstance(value, ast.Compare | ast.BoolOp) or (
        isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    )
    yield _Edit(
        "returned", *source.span(value), f"not ({source.cut(value)})" if is_truth else "None"
    )
