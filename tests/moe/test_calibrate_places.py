"""Calibration where weights are offloaded, and beside those who watch or guard a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import airmoe
from airmoe import AirRouter, ConfigError
from tests.moe.families import BATCHES, calibrated, logits_of


def test_offloaded_models_are_refused(tmp_path: Path) -> None:
    """Weights come back for a forward only; buffers, where asked, never for a codebook."""
    calibrated("mixtral").save_pretrained(tmp_path)
    parts = ("embed_tokens", "rotary_emb", "layers.1", "norm")
    places = {**{f"model.{part}": "cpu" for part in parts}, "lm_head": "cpu"}
    options: Any = {
        "device_map": {**places, "model.layers.0": "disk"},
        "offload_folder": tmp_path / "offloaded",
    }
    expected = logits_of(calibrated("mixtral"))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert torch.equal(logits_of(model), expected)
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.gate' on the meta device"):
        airmoe.calibrate(model, BATCHES)
    assert torch.equal(logits_of(model), expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, offload_buffers=True, **options)
    with pytest.raises(ConfigError, match="without offload_buffers=True"):
        logits_of(model)


def test_tokens_without_their_mean_are_not_calibrated() -> None:
    """Codebooks would be fitted to tokens that the router never sees."""
    router = AirRouter.Config(
        dim=8, num_experts=36, top_k=4, num_codewords=3, shortlist_size=9, center_tokens=True
    ).build()
    layer = airmoe.MoELayer(router, airmoe.GranularExperts(36, 8))
    with pytest.raises(ConfigError, match='with center_tokens", must route tokens as they are'):
        airmoe.calibrate(layer, [torch.randn(2, 5, 8)])
