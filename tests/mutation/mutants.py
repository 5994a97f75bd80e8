"""Small faults of a Python file: an operator, constant, index, axis, condition or call differs."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
AXES = {"axis", "axes", "dim", "dims", "keepdims"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place: `file` is a path below the package, `function` the qualified name of
    the function around the place, "" outside of functions."""

    file: str
    function: str
    kind: str
    line: int
    column: int
    before: str
    after: str

    @property
    def room(self) -> str:
        """The folder of the file, or "." for files of the package itself."""
        return self.file.rpartition("/")[0].partition("/")[0] or "."

    def applied(self, source: str) -> str:
        """Returns the source with the change."""
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        whole = source.encode()
        end = start + len(self.before.encode())
        assert whole[start:end] == self.before.encode(), self
        return (whole[:start] + self.after.encode() + whole[end:]).decode()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before!r} -> {self.after!r}"


class _Finder(ast.NodeVisitor):
    """Finds all mutants of a file, apart from annotations and text."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.found: list[Mutant] = []
        self._names: list[str] = []
        self._function = ""

    def _add(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        before = ast.get_source_segment(self.source, node)
        if before is not None and before != after:
            place = node.lineno, node.col_offset
            self.found.append(Mutant(self.file, self._function, kind, *place, before, after))

    def _changed(self, kind: str, node: ast.expr, other: ast.expr) -> None:
        self._add(kind, node, f"({ast.unparse(other)})")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, names = self._function, self._names
        self._names = [*names, node.name]
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self._function = ".".join(self._names)
        self._names = [*self._names, "<locals>"]
        for statement in node.body:
            self.visit(statement)
        self._function, self._names = outer, names

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        names = self._names
        self._names = [*names, node.name]
        for statement in node.body:
            self.visit(statement)
        self._names = names

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._condition(node.test)
            self.generic_visit(node)
        else:
            for statement in node.body:
                self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        self._changed("condition", test, ast.UnaryOp(ast.Not(), test))

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            ops = [*map(_symbol, node.ops)]
            ops[i] = COMPARISONS[type(op)]
            parts = [ast.unparse(node.left)]
            for symbol, right in zip(ops, node.comparators, strict=True):
                parts += [symbol, ast.unparse(right)]
            self._add("operator", node, f"({' '.join(parts)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return
        other = OPERATORS.get(type(node.op))
        if other is not None:
            self._changed("operator", node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._changed("operator", node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._changed("operator", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._constant("constant", node)

    def _constant(self, kind: str, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(kind, node, str(not node.value))
        elif isinstance(node.value, int):
            self._add(kind, node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(kind, node, repr(node.value * 2 or 1.0))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if isinstance(node.slice, ast.Constant):
            self._constant("index", node.slice)
        else:
            self.visit(node.slice)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in AXES and isinstance(node.value, ast.Constant):
            self._constant("axis", node.value)
        else:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            self._add("function", node.func, FUNCTIONS[node.func.id])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._add("dropped call", node, "None")
        if not isinstance(node.value, ast.Constant):  # text
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("dropped raise", node, "None")


def _symbol(op: ast.cmpop) -> str:
    return ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))[2:-2]


def mutants(file: str, source: str) -> list[Mutant]:
    """Returns all mutants of a file that are Python."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


def sources(package: Path) -> Iterator[tuple[str, str]]:
    """Every Python file of a package below its folder, with its text."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), path.read_text()


def drawn(package: Path, count: int, seed: int) -> list[Mutant]:
    """Returns `count` mutants of a package, spread over the rooms by lines. The same seed draws the
    same ones from the same sources, room by room."""
    lines: dict[str, int] = {}
    of_room: dict[str, list[Mutant]] = {}
    for file, source in sources(package):
        for mutant in mutants(file, source):
            of_room.setdefault(mutant.room, []).append(mutant)
        room = Mutant(file, "", "", 0, 0, "", "").room
        lines[room] = lines.get(room, 0) + source.count("\n")
    lines = {room: n for room, n in lines.items() if room in of_room}
    shares = {room: count * n / sum(lines.values()) for room, n in lines.items()}
    counts = {room: max(int(share), 1) for room, share in shares.items()}
    for room in sorted(shares, key=lambda r: shares[r] - counts[r], reverse=True):
        counts[room] += sum(counts.values()) < count
    return [
        mutant
        for room in sorted(of_room)
        for mutant in random.Random(f"{seed} {room}").sample(of_room[room], counts[room])
    ]
