"""Activation checkpointing of a Hugging Face model leaves routing and gradients be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe import GranularExperts, MoELayer
from tests.state.common import (
    CASES,
    assert_same,
    build_router,
    checkpoint_activations,
    two_steps,
)

transformers = pytest.importorskip("transformers")


def tiny_llama(case: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_dropout=0.1,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    router = build_router(case)
    experts = GranularExperts(router.config.num_experts, router.config.dim)
    model.model.layers[1].mlp = MoELayer(router, experts)
    return model


def train(case: str, use_reentrant: bool | None, tracked: bool) -> dict[str, Tensor]:
    model = tiny_llama(case).train()
    if use_reentrant is not None:
        checkpoint_activations(model, use_reentrant)
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if tracked:
        airmoe.track_optimizer(model, optimizer)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(31, (3, 9), generator=generator) for _ in range(4)]
    torch.manual_seed(6)
    return two_steps(model, optimizer, batches)


RUNS = [(case, True) for case in CASES] + [("air", False)]


@pytest.mark.parametrize(("case", "tracked"), RUNS)
def test_activation_checkpointing_changes_nothing(case: str, tracked: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without a tracked optimizer")
        expected = train(case, None, tracked)
        for use_reentrant in (True, False):
            actual = train(case, use_reentrant, tracked)
            assert_same(actual, expected, f"use_reentrant={use_reentrant}")
