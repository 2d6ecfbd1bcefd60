"""The example of the drop-in page runs, and finds the model as it was at the end."""

from __future__ import annotations

import re

from tests.docs.common import ROOT, python_blocks
from tests.docs.test_examples import run


def test_the_example_swaps_compares_and_undoes() -> None:
    output = run("drop_in.py", "--quick")
    assert "Routers swapped: AirMixtralRouter" in output
    assert re.search(r"model\.layers\.1\.mlp\.gate +64 +16 +16 +50%", output)
    difference = re.search(r"Logits differ by ([\d.e-]+) on average", output)
    assert difference and float(difference[1]) > 0
    assert "Restored: logits differ by 0. Done in" in output.splitlines()[-1]


def test_the_page_shows_the_whole_way() -> None:
    """`test_pages.py` runs it."""
    code = "\n".join(python_blocks(ROOT / "docs" / "drop_in.md"))
    for name in ("swap_routers", "calibrate", "restore_routers", "save_pretrained", "suggestion"):
        assert name in code
