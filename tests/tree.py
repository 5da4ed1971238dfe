"""`python -m tests.tree`: writes docs/TREE.md, every file with the first line of its docstring."""

import ast
from itertools import groupby
from pathlib import Path

from tests.source_tree import PRODUCT, ROOT, trees

FOLDERS = (*PRODUCT, "tests")
TREE = ROOT / "docs" / "TREE.md"
HEAD = """# Tree

Every module with the first line of its docstring, and of tests the shared modules. `make tree`
writes this page.
[ARCHITECTURE.md](../ARCHITECTURE.md) says how the modules work together.
"""


def tree_page() -> str:
    """The text of docs/TREE.md."""
    modules = {Path(name): module for folder in FOLDERS for name, module in trees(folder).items()}
    # A folder's own files before its subfolders, which a plain sort of paths would mix.
    ordered = sorted(modules, key=lambda path: (FOLDERS.index(path.parts[0]), path.parent, path))
    explained = [path for path in ordered if modules[path].body and path.name[:5] != "test_"]
    text = HEAD
    for folder, files in groupby(explained, key=lambda path: path.parent):
        rows = [f"- `{path.name}`: {_first_line(modules[path])}" for path in files]
        text += "\n".join([f"\n## {folder}/\n", *rows, ""])
    return text


def _first_line(module: ast.Module) -> str:
    return (ast.get_docstring(module) or "").partition("\n")[0]


if __name__ == "__main__":
    TREE.write_text(tree_page())
