"""The examples run from a checkout, into a plain pipe, and need nothing unusual."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.docs.common import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *arguments: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    env.pop("COLUMNS", None)
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_route_by_hand_agrees_with_the_library() -> None:
    output = run("route_by_hand.py")
    steps = [line.split()[0] for line in output.splitlines() if line[0].isdigit()]
    assert steps == ["1", "2", "3", "4", "5"]


def test_demo_shows_every_section_in_a_plain_pipe() -> None:
    output = run("demo.py", "--quick")
    titles = (
        "1  Real",
        "2  The codebook",
        "3  Coarse",
        "4  Fine",
        "5  How good",
        "6  What",
        "In sh",
    )
    assert [output.index(title) for title in titles] == sorted(map(output.index, titles))
    assert "\x1b" not in output, "escape codes in a pipe"
    assert max(map(len, output.splitlines())) <= 80
    assert "nan" not in output.lower().split()
    assert "Done in" in output.splitlines()[-2] + output.splitlines()[-1]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_import_little(file: os.PathLike[str]) -> None:
    with open(file, encoding="utf-8") as opened:
        tree = ast.parse(opened.read())
    modules = [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    modules += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    packages = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert packages <= {"torch", "rich", "numpy", "airmoe", "prose"}
