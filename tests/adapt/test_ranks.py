"""Two processes calibrate as one: each reads a part of the text, both get the same codebooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.adapt.ranks import (
    BATCHES,
    calibrate_a_part,
    calibrate_one_sequence,
    loss_without_logits,
)
from tests.distributed.launch import run_all


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_ranks_agree_and_none_waits_for_one_with_little_text(tmp_path: Path) -> None:
    parts, single, no_logits = run_all(
        {
            "parts": calibrate_a_part,
            "one sequence": calibrate_one_sequence,
            "no logits": loss_without_logits,
        },
        tmp_path,
    ).values()
    first, second = parts
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    for name in ("codewords", "scales"):
        for left, right in zip(first[name], second[name], strict=True):
            assert torch.equal(left, right), name
    for name in ("overlap", "trials", "tokens"):
        assert first[name] == second[name], name
    alone = calibrate_a_part(None, lambda: None)
    assert first["tokens"] == alone["tokens"]
    assert first["overlap"] == pytest.approx(alone["overlap"], abs=0.1)

    first, second = single
    assert not isinstance(first, str), first
    assert first == second
    rows, length = BATCHES[0].shape
    assert first["tokens"] == [6 * rows * length, (2 * rows + 1) * length]
    assert no_logits == [[None], [None]]
