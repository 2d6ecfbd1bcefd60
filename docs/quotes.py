"""Keeps the code quoted in docs/*.md equal to its source: `python docs/quotes.py` rewrites it.

A quote is a python block right after `<!-- quote: path/of/file.py Qualified.name -->`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUOTE = re.compile(r"(<!-- quote: (\S+) (\S+) -->\n```python\n)(.*?)(```\n)", re.DOTALL)


def find(path: Path, name: str) -> ast.AST | None:
    """The definition (or assignment) with this dotted name in a file, or None."""
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        inside = [child for child in ast.iter_child_nodes(node) if part in _names(child)]
        if not inside:
            return None
        node = inside[0]
    return node


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def source(path: Path, name: str) -> str:
    """The text of a function or class, without indentation."""
    node = find(path, name)
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        raise LookupError(f"{path.name} defines no function or class {name}")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[first - 1 : node.end_lineno]
    return textwrap.dedent("".join(lines))


def refreshed(text: str) -> str:
    """A page with every quote as its source has it now."""
    return QUOTE.sub(lambda m: m[1] + source(ROOT / m[2], m[3]) + m[5], text)


def main() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = refreshed(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"rewrote the quotes of {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
