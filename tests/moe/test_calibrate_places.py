"""Calibration where weights are offloaded, and beside those who watch or guard a router."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import airmoe
from airmoe import AirRouter, ConfigError
from airmoe.moe.ffn.routing import PatientAirRouter
from airmoe.moe.swap.layers import AirLayer
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


def test_only_calibration_silences_an_uncalibrated_router() -> None:
    """A hook of somebody else does not; and while exact answers take its place, nothing is said."""
    config = AirRouter.Config(dim=8, num_experts=16, top_k=2, num_codewords=4, shortlist_size=4)
    hidden = torch.randn(5, 8)
    silent, watched = (PatientAirRouter(config).eval() for _ in range(2))
    layer = AirLayer("router", silent)
    layer.route_exactly(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = silent(hidden).to_token_routing().expert_ids
    assert torch.equal(
        chosen.sort(-1).values, silent.full_logits(hidden).topk(2).indices.sort(-1).values
    )
    layer.route_exactly(False)
    watched.register_forward_hook(lambda *_: None)
    for router in (silent, watched):
        with pytest.warns(UserWarning, match="not calibrated"):
            router(hidden)
