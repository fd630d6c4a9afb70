"""Finds the changes that tests/mutants/mutants.py can make in a file, and where a note shows that tests reach them."""

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NOTE = "__import__('mutants_probe').hit({})"
WATCH = "__import__('mutants_probe').watch({{}}, {}, {!r})\n"
OTHERS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,),
}  # fmt: skip
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
NO_NUMBER = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)  # a sum with one of these is no arithmetic
SKIPPED = (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom, ast.match_case)
Probes = tuple[tuple[int, str], ...]  # bytes at which a note is put in, and its text; {} is the number of the change


@dataclass(frozen=True)
class Mutant:
    """A change: the bytes [start, end) of a file become `new`."""

    file: str
    line: int
    inside: str  # qualified name of the class or function
    kind: str
    old: str
    new: str
    start: int
    end: int
    probes: Probes

    @property
    def key(self) -> str:
        return f"{self.file} {self.inside}: {self.kind}: {self.old} -> {self.new}"


def with_op(node: ast.AST, op: type, place: int | None = None) -> str:
    """Returns the text of an expression with another operator."""
    made = copy.deepcopy(node)
    if place is None:
        made.op = op()  # type: ignore[attr-defined]
    else:
        made.ops[place] = op()  # type: ignore[attr-defined]
    return f"({ast.unparse(made)})"


def changes(node: ast.AST, constant: str) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:  # noqa: C901 (a table)
    """Yields the changes of one node of the syntax tree: the part that is changed, the kind, the new text."""
    match node:
        case ast.Compare():
            for place, op in enumerate(node.ops):
                for number, other in enumerate(OTHERS[type(op)]):
                    boundary = number == 0 and len(OTHERS[type(op)]) == 2
                    yield node, "boundary" if boundary else "comparison", with_op(node, other, place)
        case ast.BoolOp():
            yield node, "boolean", with_op(node, OTHERS[type(node.op)][0])
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, "sign or not", f"({ast.unparse(node.operand)})"
        case ast.BinOp(left, op, right) if type(op) in OTHERS:
            if not any(isinstance(s, NO_NUMBER) or isinstance(getattr(s, "value", 0), str) for s in (left, right)):
                yield node, "arithmetic", with_op(node, OTHERS[type(op)][0])
        case ast.Constant(value=bool(value)):
            yield node, constant, str(not value)
        case ast.Constant(value=int(value)):
            yield node, constant, f"({value + 1})"
        case ast.Constant(value=float(value)):
            yield node, constant, str(value * 10 if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in TWINS:
            yield node.func, "function", TWINS[name]
        case ast.comprehension():
            yield from ((condition, "dropped filter", "True") for condition in node.ifs)
        case ast.If() | ast.While():
            yield node.test, "condition", "False"
        case ast.IfExp():
            yield node, "condition", f"({ast.unparse(node.orelse)})"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield node, "return value", "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
            yield node, "removed statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "removed statement", "pass"


class Finder:
    """Finds the changes of a file: `found`."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, tree = file, source, ast.parse(source)
        self.found: list[Mutant] = []
        self.equal = Counter[tuple[str, ...]]()
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        for statement in tree.body:  # what the module itself runs is reached by who names what it makes
            names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            readers = [f for f in functions if any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(f))]
            self.walk(statement, (), tuple(self.before(f.body[-1]) for f in readers or functions))

    def before(self, statement: ast.stmt) -> tuple[int, str]:
        """Returns the note that a statement is reached."""
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        start, own = self.starts[first - 1], self.starts[first - 1] + statement.col_offset
        indent = self.source[start:own].decode()
        return (own, NOTE + "; ") if indent.strip() else (start, indent + NOTE + "\n")

    def walk(self, node: ast.AST, names: tuple[str, ...], probes: Probes, constant: str = "constant") -> None:
        """Visits a node and those in it, but for messages and what only type checkers read."""
        text = ast.unparse(node)[:100] if isinstance(node, ast.Expr | ast.If | ast.ClassDef) else ""
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion, as the skipped asserts are
            return
        if isinstance(node, SKIPPED) or "(Protocol" in text or text.startswith(("_log.", "log.", "if TYPE_CHECKING")):
            return
        for target, kind, new in changes(node, constant):
            self.add(target, names, probes, kind, new)
        children: Sequence[ast.AST] = [*ast.iter_child_nodes(node)]
        match node:
            case ast.Raise():
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names, children = (*names, node.name), node.body
                for value in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    self.walk(value, names, (self.before(node.body[-1]),), "default")
            case ast.ClassDef():
                names, children = (*names, node.name), [s for s in node.body if not isinstance(s, ast.AnnAssign)]
                for field in [s for s in node.body if isinstance(s, ast.AnnAssign) and s.value]:
                    watch = " " * node.col_offset + WATCH.format(node.name, ast.unparse(field.target))
                    self.walk(field.value, names, ((self.starts[node.end_lineno or 0], watch),), "default")  # type: ignore[arg-type]
            case ast.AnnAssign():
                children = [node.value] if node.value is not None else []
        for child in children:
            inside = isinstance(child, ast.stmt) and names and not isinstance(node, ast.ClassDef)
            if inside and not self.source.startswith(b"elif", self.starts[child.lineno - 1] + child.col_offset):
                self.walk(child, names, (self.before(child),), constant)
            else:
                self.walk(child, names, probes, constant)

    def add(self, node: ast.expr | ast.stmt, names: tuple[str, ...], probes: Probes, kind: str, new: str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old, inside = " ".join(self.source[start:end].decode().split()), ".".join(names)
        self.equal[inside, kind, old, new] += 1
        if (number := self.equal[inside, kind, old, new]) > 1:
            inside += f"#{number - 1}"
        self.found.append(Mutant(self.file, node.lineno, inside, kind, old, new, start, end, probes))
