"""Models outside of the paper, counted by hand: every term of the ledger, and no other.

Numbers are (forward, backward) per token, written out from the architecture and the appendix's
rules alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

import pytest

from airmoe.flops import PARTS, Column, Workload, count_flops
from airmoe.model import AirMoeConfig

Count = dict[tuple[str, str], tuple[float, float]]
OTHER = "embedding, rotation, residuals"
PROJECTIONS = "attention projections"
COARSE, REFRESH, FINE = "router coarse", "router refresh", "router fine"
BALANCE = "balance losses"
MIXTURE = (COARSE, REFRESH, FINE, BALANCE, "experts")


def check(
    config: AirMoeConfig,
    workload: Workload,
    column: Column,
    expected: Count,
    parts: Sequence[str] = PARTS,
) -> None:
    terms = [term for term in count_flops(config, workload).terms if term.part in parts]
    found = {(t.part, t.name): t.cost(column) for t in terms if getattr(t, column) is not None}
    assert found.keys() == expected.keys()
    for name, (forward, backward) in expected.items():
        assert found[name].forward == pytest.approx(forward, rel=1e-12), name
        assert found[name].backward == pytest.approx(backward, rel=1e-12), name


def with_pools(expected: Count, factor: float) -> Count:
    """Cells compute all candidates, which are `factor` times the chosen experts."""
    return {
        name: (factor * cost[0], factor * cost[1]) if name[0] == "experts" else cost
        for name, cost in expected.items()
    }


def test_air_with_few_parts() -> None:
    """3 layers, 2 of them with two-matrix experts; no jitter, no losses, no unit centroids."""
    config = AirMoeConfig(
        vocab_size=1000,
        hidden_size=48,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=6,  # of 8
        num_key_value_heads=2,
        moe_layers=[0, 2],
        moe_post_norm="none",
        expert_activation="gelu",
        num_experts=300,
        num_experts_per_tok=10,
        router_options={
            "num_codewords": 7,
            "shortlist_size": 60,
            "codebook": "euclidean",
            "jitter_std": 0.0,
            "normalize_centroids": False,
        },
        load_balance_weight=0.0,
        bos_token_id=None,
        eos_token_id=1,
    )
    workload = Workload(
        sequence_length=40, tokens_per_step=960, tokens_per_micro_batch=240, devices=2
    )
    expected: Count = {
        (OTHER, "embedding"): (48, 48),
        (OTHER, "residuals"): (3 * 2 * 48, 0),
        (OTHER, "rotary positions"): (3 * 3 * (48 + 16), 3 * 3 * (48 + 16)),
        (PROJECTIONS, "queries"): (3 * 2 * 48 * 48, 3 * 4 * 48 * 48),
        (PROJECTIONS, "keys"): (3 * 2 * 16 * 48, 3 * 4 * 16 * 48),
        (PROJECTIONS, "values"): (3 * 2 * 16 * 48, 3 * 4 * 16 * 48),
        (PROJECTIONS, "output"): (3 * 2 * 48 * 48, 3 * 4 * 48 * 48),
        ("sdpa", "products"): (3 * 4 * 6 * 40 * 8, 3 * 10 * 6 * 40 * 8),
        ("sdpa", "softmax"): (3 * 2 * 6 * 40, 3 * 5 * 6 * 40),
        ("ffn", "gate"): (2 * 100 * 48, 4 * 100 * 48),
        ("ffn", "up"): (2 * 100 * 48, 4 * 100 * 48),
        ("ffn", "down"): (2 * 100 * 48, 4 * 100 * 48),
        ("ffn", "silu"): (3 * 100, 4 * 100),
        ("ffn", "gate * up"): (100, 200),
        (COARSE, "assignment for the update"): (2 * 2 * 7 * 48, 0),
        (COARSE, "nearest codeword"): (2 * 7, 0),
        (COARSE, "sums and counts"): (2 * 49, 0),
        (COARSE, "old sums, decayed"): (2 * 7 * 49 / 240, 0),
        (COARSE, "new sums, weighed"): (2 * 7 * 49 / 240, 0),
        (COARSE, "their sum"): (2 * 7 * 49 / 240, 0),
        (COARSE, "assignment for routing"): (2 * 2 * 7 * 48, 0),
        (COARSE, "nearest codeword for routing"): (2 * 7, 0),
        # Two devices, each for all tokens of a step.
        (REFRESH, "codewords times experts"): (2 * 2 * 7 * 300 * 48 * 2 / 960, 0),
        (REFRESH, "shortlists"): (2 * 7 * 300 * log2(61) * 2 / 960, 0),
        (FINE, "scores"): (2 * 2 * 60 * 48, 2 * 4 * 60 * 48),
        (FINE, "selection"): (2 * 60 * log2(11), 2 * 10),
        (FINE, "weights"): (2 * (2 * 10 + 1), 2 * 5 * 10),
        ("experts", "up"): (2 * 2 * 10 * 48, 2 * 4 * 10 * 48),
        ("experts", "down"): (2 * 2 * 10 * 48, 2 * 4 * 10 * 48),
        ("experts", "gelu"): (2 * 6 * 10, 2 * 7 * 10),
        ("experts", "routing weights"): (2 * 10, 2 * 2 * 10),
        ("norms", "before attention, before ffn, last"): (7 * 5 * 48, 7 * 8 * 48),
        ("head", "logits"): (2 * 1000 * 48, 4 * 1000 * 48),
        ("loss", "cross-entropy"): (2 * 1000 + 1, 5 * 1000),
    }
    check(config, workload, "algorithmic", expected)
    check(config, workload, "executed", with_pools(expected, 60 / 10))


def small_model(**options: Any) -> AirMoeConfig:
    """Of which only the mixture is counted."""
    sizes = {"vocab_size": 300, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    return AirMoeConfig(**sizes, bos_token_id=None, eos_token_id=1, **options)


def test_hierarchical_with_all_losses() -> None:
    """2 layers, the second with SwiGLU experts of 3 neurons; 20 clusters of 12, 5 selected."""
    config = small_model(
        hidden_size=64,
        num_hidden_layers=2,
        router="hierarchical",
        expert_size=3,
        num_experts=240,
        num_experts_per_tok=6,
        router_options={"num_clusters": 20, "num_selected_clusters": 5},
        load_balance_weight=0.1,
        shortlist_balance_weight=0.1,
        router_z_weight=0.1,
    )
    workload = Workload(sequence_length=25, tokens_per_step=1000, tokens_per_micro_batch=500)
    expected: Count = {
        (COARSE, "scores of clusters"): (2 * 20 * 64, 4 * 20 * 64),
        (COARSE, "jitter"): (20, 0),
        (COARSE, "best clusters"): (20 * log2(6), 5),
        (FINE, "unit centroids"): (260 * (4 * 64 + 1) / 500, 260 * 4 * 64 / 500),
        (FINE, "scores"): (2 * 60 * 64, 4 * 60 * 64),
        (FINE, "jitter"): (60, 0),
        (FINE, "cluster scores added"): (60, 0),
        (FINE, "selection"): (60 * log2(7), 6),
        (FINE, "weights"): (2 * 6 + 1, 5 * 6),
        (BALANCE, "softmax over candidates"): (2 * 60 + 1, 5 * 60),
        (BALANCE, "mean over tokens"): (60, 60),
        (BALANCE, "counts"): (6, 0),
        (BALANCE, "counts * means"): (240 / 500, 2 * 240 / 500),
        (BALANCE, "log Z"): (3 * 60 + 1, 2 * 60),
        (BALANCE, "softmax over clusters"): (2 * 20 + 1, 5 * 20),
        (BALANCE, "mean of clusters"): (2 * 20, 2 * 20),
        ("experts", "gate"): (2 * 18 * 64, 4 * 18 * 64),
        ("experts", "up"): (2 * 18 * 64, 4 * 18 * 64),
        ("experts", "down"): (2 * 18 * 64, 4 * 18 * 64),
        ("experts", "silu"): (3 * 18, 4 * 18),
        ("experts", "gate * up"): (18, 2 * 18),
        ("experts", "routing weights"): (18, 2 * 18),
    }
    check(config, workload, "algorithmic", expected, MIXTURE)
    check(config, workload, "executed", with_pools(expected, 60 / 6), MIXTURE)


def test_peer_in_a_single_layer() -> None:
    """144 experts: 12 x 12 sub-keys, 4 heads of 3; two-matrix experts, load balancing."""
    config = small_model(
        hidden_size=32,
        num_hidden_layers=1,
        router="peer",
        expert_activation="relu",
        num_experts=144,
        num_experts_per_tok=12,
        router_options={"num_heads": 4},
    )
    workload = Workload(sequence_length=10, tokens_per_step=200, tokens_per_micro_batch=100)
    expected: Count = {
        # 4 heads of 32; each of their halves of 16 meets 12 sub-keys.
        (COARSE, "queries"): (2 * 128 * 32, 4 * 128 * 32),
        (COARSE, "scores of sub-keys"): (4 * 2 * 12 * 2 * 16, 2 * 4 * 2 * 12 * 2 * 16),
        (COARSE, "jitter"): (4 * 2 * 12, 0),
        (COARSE, "best sub-keys"): (4 * 2 * 12 * log2(4), 4 * 2 * 3),
        (FINE, "sums of pairs"): (4 * 9, 0),
        (FINE, "selection"): (4 * 9 * log2(4), 4 * 3),
        (FINE, "weights"): (4 * (2 * 3 + 1), 4 * 5 * 3),
        (BALANCE, "softmax over sub-keys"): (4 * 2 * (2 * 12 + 1), 4 * 2 * 5 * 12),
        (BALANCE, "probabilities of pairs"): (2 * 4 * 12 * 12, 4 * 4 * 12 * 12),
        (BALANCE, "counts"): (12, 0),
        (BALANCE, "counts * means"): (144 / 100, 2 * 144 / 100),
        ("experts", "up"): (2 * 12 * 32, 4 * 12 * 32),
        ("experts", "down"): (2 * 12 * 32, 4 * 12 * 32),
        ("experts", "relu"): (12, 2 * 12),
        ("experts", "routing weights"): (12, 2 * 12),
        ("norms", "after the experts"): (7 * 32, 8 * 32),
        ("norms", "before attention, before ffn, last"): (3 * 5 * 32, 3 * 8 * 32),
    }
    parts = (*MIXTURE, "norms")
    check(config, workload, "algorithmic", expected, parts)
    # Lists of tokens: nothing else is computed.
    check(config, workload, "executed", expected, parts)
