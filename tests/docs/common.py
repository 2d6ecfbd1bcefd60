"""Pages, their code and the scripts beside them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

from tests.training.command import succeeds

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Each goes on in the folder of the one before; test_train.py runs them, because they have commands.
TRAINING = [ROOT / "docs" / name for name in ("train.md", "resume.md", "huggingface.md")]
QUOTED = re.compile(r"<!-- quote: .*? -->\n```python\n.*?```\n", re.DOTALL)
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def load_script(path: str) -> ModuleType:
    """A script of the repository as a module (docs/ is no package)."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:  # dataclasses look theirs up by name
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def run_blocks(blocks: list[tuple[str, str]], name: str) -> None:
    """Run a page's blocks, Python as one module (dataclasses look theirs up by name)."""
    module = sys.modules[name] = ModuleType(name)
    try:
        for number, (language, code) in enumerate(blocks, 1):
            if language == "python":
                exec(compile(code, f"{name}, block {number}", "exec"), module.__dict__)
                continue
            for line in command_lines(code):
                program, *arguments = shlex.split(line, comments=True)
                assert program == "airmoe", line
                succeeds(*arguments)
    finally:
        del sys.modules[name]


def code_blocks(page: Path) -> list[tuple[str, str]]:
    """(language, code) that a reader may paste; quotes of the source are not meant to run."""
    return BLOCK.findall(QUOTED.sub("", page.read_text(encoding="utf-8")))


def command_lines(script: str) -> list[str]:
    """The commands of a piece of shell, without comments, continued lines in one."""
    lines = script.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
