"""examples/sparsify_dense.py runs into a plain pipe; with all neurons it is the dense model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_sparsify_dense() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    env.pop("COLUMNS", None)
    command = [sys.executable, str(ROOT / "examples" / "sparsify_dense.py"), "--quick"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[0] for row in rows] == ["dense", "128", "64", "32", "16", "8"]
    assert [row[1] for row in rows[1:]] == ["100 %", "50 %", "25 %", "12.5 %", "6.25 %"]
    assert [row[2] for row in rows[1:]] == ["128", "128", "64", "32", "16"]
    assert rows[1][3:5] == ["1.000", rows[0][4]]  # all neurons: nothing is lost
    assert all(1 < float(row[4]) < 256 and float(row[5]) > 0 for row in rows)
    assert "\x1b" not in done.stdout, "escape codes in a pipe"
    assert max(map(len, done.stdout.splitlines())) <= 80
