"""The written Python of this repository as text, syntax trees and numbers."""

import ast
import tokenize
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
NODES = ("engine", "serving", "connector", "prefill_node", "decode_node", "proxy")
PRODUCT = (*NODES, "deploy", "benchmarks")
GENERATED = "serving/rpc/pb/"

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match),
    *(ast.FunctionDef, ast.AsyncFunctionDef),
)


@cache
def sources(*folders: str) -> dict[str, str]:
    """Path from the root to text, of every written Python file below `folders`."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    named = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {name: text for name, text in named.items() if not name.startswith(GENERATED)}


def trees(*folders: str) -> dict[str, ast.Module]:
    return {name: parsed(text) for name, text in sources(*folders).items()}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def words(tree: ast.Module) -> set[str]:
    """Every imported module, and every name and attribute as it is written."""
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Name)}
    return used.union(imports(tree))


def functions(*folders: str) -> Iterator[tuple[str, Function]]:
    """`file::name` and node of every function and method."""
    for name, tree in trees(*folders).items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{name}::{node.name}", node


def body(function: Function) -> list[ast.stmt]:
    """The statements after the docstring; none if there is only a docstring or `...`."""
    return [
        statement
        for place, statement in enumerate(function.body)
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or place > 0
    ]


def num_lines(function: Function) -> int:
    statements = body(function)
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def nesting(node: ast.AST) -> int:
    """Blocks around the innermost statement below `node`; an `elif` is no deeper than its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        opens = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, opens + nesting(child))
    return deepest


def parameters(function: Function) -> tuple[list[str], list[str]]:
    """Names that may be given by position, and all names; `self` and `cls` are left out."""
    arguments = function.args
    positional = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
    positional = positional[positional[:1] in (["self"], ["cls"]) :]
    return positional, [*positional, *(item.arg for item in arguments.kwonlyargs)]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module named in an import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def comments_and_code(text: str) -> tuple[int, int]:
    """How many lines are comments, and how many have more than strings: docstrings are neither."""
    tokens = list(tokenize.generate_tokens(StringIO(text).readline))
    comments = sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens)
    code = {t.start[0] for t in tokens if t.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)}
    return comments, len(code)


def listed(folder: Path, *, deep: bool = False) -> Iterator[Path]:
    """Yields the paths in `folder` that a reader sees: no hidden, generated or marker files."""
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith((".", "__pycache__")) or name.endswith((".egg-info", ".pyc")):
            continue
        if name in ("__init__.py", "py.typed", "build", "dist"):
            continue
        yield path
        if deep and path.is_dir():
            yield from listed(path, deep=True)
