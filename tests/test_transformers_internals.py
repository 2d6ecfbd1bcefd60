"""What is not public in transformers: one module uses it, and says so when it is gone."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from transformers.utils import output_capturing

from airmoe import transformers_internals
from airmoe.errors import ConfigError

FILE = Path(transformers_internals.__file__)
PRIVATE_MODULES = (
    "transformers.conversion_mapping",
    "transformers.models.auto",
    "transformers.utils.generic",
    "transformers.utils.output_capturing",
)


def private_imports(source: str) -> list[str]:
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers.")
        for alias in node.names
        if alias.name.startswith("_") or str(node.module).startswith(PRIVATE_MODULES)
    ]


def test_one_module_holds_all_private_imports() -> None:
    found = {
        file.name: names
        for file in FILE.parent.rglob("*.py")
        if (names := private_imports(file.read_text(encoding="utf-8")))
    }
    assert list(found) == [FILE.name]
    assert "transformers.utils.output_capturing._CAN_RECORD_REGISTRY" in found[FILE.name]


def test_a_missing_name_says_which_versions_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(output_capturing, "_CAN_RECORD_REGISTRY")
    spec = importlib.util.spec_from_file_location("probe", FILE)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ConfigError, match=r"^transformers: got '5.* it knows 5\.17\.0 to 5\.") as e:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "_CAN_RECORD_REGISTRY" in str(e.value) and "\n" not in str(e.value)
