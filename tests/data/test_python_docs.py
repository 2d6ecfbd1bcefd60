"""The corpus every Python brings along."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest

from airmoe.data import python_docs
from airmoe.data.python_docs import read_python_docs

MODULE = '''"""About the module."""
def function():
    """Does\x0ca thing.

    In two parts.
    """
    def inner():
        "Inside."
class Thing:
    """A thing."""
    def method(self):
        """Its method."""
class Bare:
    pass
'''


def test_documents_are_topics_modules_and_classes_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a standard library of a few files, in place of this interpreter's."""
    for name in ("b", "a/__init__", "a/test/skipped", "site-packages/skipped", "bad"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(MODULE if name != "bad" else "def (:", encoding="utf-8")
    monkeypatch.setattr(python_docs.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(python_docs, "_topics", lambda: iter(["A topic.\r\nMore.\n"]))

    def module_and_class(name: str) -> list[str]:
        return [
            f"{name}\nAbout the module.\n\n"
            f"{name}.function\nDoes a thing.\n\nIn two parts.\n\n{name}.function.inner\nInside.",
            f"{name}.Thing\nA thing.\n\n{name}.Thing.method\nIts method.",
        ]

    found = [document.text for document in read_python_docs()]
    assert found == ["A topic.\nMore.", *module_and_class("a"), *module_and_class("b")]


def test_goes_on_without_the_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert list(python_docs._topics()) == []


@pytest.mark.slow
def test_this_interpreter_brings_megabytes_of_clean_prose() -> None:
    texts = [document.text for document in read_python_docs()]
    assert sum(map(len, texts)) > 1_500_000 and len(texts) > 1000
    everything = "".join(texts)
    odd = {c for c in set(everything) if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"}
    assert not odd
    assert any(text.startswith("json\n") and "json.dumps\nSerialize" in text for text in texts)
    assert not any(text.startswith(("test.", "idlelib.idle_test")) for text in texts)
