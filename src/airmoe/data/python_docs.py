"""The corpus every Python brings along: its language reference and its docstrings, about 2 MB.

Good for trying things out with no download. Content and order depend on the interpreter's version
only. Documents are the topics of `help()`, and for every module of the standard library its own
and its functions' docstrings, and each of its classes. Modules are parsed, never imported.
"""

from __future__ import annotations

import ast
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from airmoe.data.documents import Document

# Not prose about the language: tests, other people's packages, tables that are parsed elsewhere.
_SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "lib2to3")
)
_ODD_CHARACTERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]|[^\S \n]")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_version() -> str:
    """What the content depends on."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def read_python_docs() -> Iterator[Document]:
    """The documents of the running interpreter: topics first, then modules by path."""
    for text in _topics():
        yield Document(_clean(text))
    root = Path(sysconfig.get_path("stdlib"))
    # Sorted by their parts, which is the same on every file system.
    inside = sorted((file.relative_to(root).parts, file) for file in root.rglob("*.py"))
    files = [file for parts, file in inside if not _SKIPPED_FOLDERS.intersection(parts)]
    for count, file in enumerate(files, 1):
        names = file.relative_to(root).with_suffix("").parts
        module = ".".join(names[:-1] if names[-1] == "__init__" else names)
        for text in _docstrings(file, module):
            yield Document(_clean(text), count / len(files))


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics  # type: ignore[import-not-found]
    except ModuleNotFoundError:  # some distributions ship it as a package of its own
        return
    for name in sorted(topics):
        yield topics[name]


def _docstrings(file: Path, module: str) -> Iterator[str]:
    """One document for the module and its functions, one for each class with its methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules hold odd escapes
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return  # some distributions add templates that only end in .py
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = [node for node in tree.body if isinstance(node, _Definition)]
    about_module = [_paragraph(module, ast.get_docstring(tree))]
    for node in functions:
        if node not in classes:
            about_module += _about(node, module)
    for paragraphs in (about_module, *(_about(node, module) for node in classes)):
        if text := "\n\n".join(filter(None, paragraphs)):
            yield text


def _about(node: _Definition, outside: str) -> list[str]:
    """The docstring of a definition, then those of the definitions in it."""
    name = f"{outside}.{node.name}"
    paragraphs = [_paragraph(name, ast.get_docstring(node))]
    for inner in node.body:
        if isinstance(inner, _Definition):
            paragraphs += _about(inner, name)
    return paragraphs


def _paragraph(name: str, docstring: str | None) -> str:
    return f"{name}\n{docstring}" if docstring else ""


def _clean(text: str) -> str:
    """Plain lines: tabs and other odd characters become spaces."""
    return _ODD_CHARACTERS.sub(" ", text.replace("\r\n", "\n")).strip()
