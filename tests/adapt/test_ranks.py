"""Two processes calibrate as one: each reads a part of the text, both get the same codebooks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapt.ranks import calibrate_a_part, loss_without_logits
from tests.distributed.launch import run_all
from tests.state.common import assert_same


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_ranks_agree(tmp_path: Path) -> None:
    jobs = {"parts": calibrate_a_part, "no logits": loss_without_logits}
    (first, second), no_logits = run_all(jobs, tmp_path).values()
    assert no_logits == [[None], [None]]
    for name in ("codewords", "scales"):
        assert_same(first[name], second[name], name)
    for name in ("overlap", "report", "tokens"):
        assert first[name] == second[name], name
    alone = calibrate_a_part(None, lambda: None)
    assert first["tokens"] == alone["tokens"]
    assert first["overlap"] == pytest.approx(alone["overlap"], abs=0.1)
