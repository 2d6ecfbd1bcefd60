"""Keeps the code quoted in docs/*.md equal to its source: `python docs/quotes.py` rewrites it.

A quote is a python block right after `<!-- quote: path/of/file.py Qualified.name -->`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUOTE = re.compile(r"(<!-- quote: (\S+) (\S+) -->\n```python\n)(.*?)(```\n)", re.DOTALL)


def source(path: Path, name: str) -> str:
    """The text of a function or class, without decorators and indentation."""
    text = path.read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "") + "\n"


def refreshed(text: str) -> str:
    """A page with every quote as its source has it now."""
    return QUOTE.sub(lambda m: m[1] + source(ROOT / m[2], m[3]) + m[5], text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
