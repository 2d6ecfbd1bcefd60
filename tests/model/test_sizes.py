"""Sizes, methods and counts: the paper's numbers, and those of the model that is really built."""

from __future__ import annotations

import pytest

from airmoe import AirRouter, ConfigError, HierarchicalRouter, PeerRouter
from airmoe.model import (
    METHODS,
    AirMoeConfig,
    AirMoeForCausalLM,
    model_size,
    parameter_counts,
    with_method,
)
from tests.model.common import SMALL, config_of


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("small", (256, 768, 16, 4, 1)),
        ("medium", (512, 1536, 24, 8, 2)),
        ("large", (768, 2048, 24, 12, 4)),
    ],
)
def test_sizes_are_the_papers(name: str, numbers: tuple[int, ...]) -> None:
    config = model_size(name)
    assert numbers == (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    assert (config.vocab_size, config.max_position_embeddings) == (128_256, 2048)
    assert (config.num_experts, config.num_experts_per_tok) == (65_536, 512)
    router = config.router_config()
    assert isinstance(router, AirRouter.Config)
    assert (router.num_codewords, router.shortlist_size) == (1024, 2048)


def test_methods_keep_the_papers_equivalences() -> None:
    small = model_size("small")
    hierarchical = with_method(small, "hierarchical").router_config()
    assert isinstance(hierarchical, HierarchicalRouter.Config)
    assert (hierarchical.num_clusters, hierarchical.num_selected_clusters) == (1024, 32)
    peer = with_method(small, "peer").router_config()
    assert isinstance(peer, PeerRouter.Config)
    assert (peer.num_heads, peer.top_k) == (8, 512)
    coarse = with_method(small, "coarse")
    assert (coarse.num_experts, coarse.expert_size, coarse.num_experts_per_tok) == (128, 512, 1)
    assert (coarse.router, coarse.experts) == ("topk", "coarse")
    assert with_method(small, "exact").router == "topk"
    assert with_method(small, "dense").moe_layers == []
    assert with_method(small, "air").to_dict() == small.to_dict() == model_size("small").to_dict()


def test_coarse_experts_are_rounded_up() -> None:
    """ceil(E / K): a coarse model never has fewer neurons than the granular one."""
    small = model_size("small")
    small.num_experts, small.num_experts_per_tok = 4100, 16
    small.router_options = {"num_codewords": 4, "shortlist_size": 64}
    coarse = with_method(small, "coarse")
    assert (coarse.num_experts, coarse.expert_size) == (257, 16)


def test_methods_keep_what_routers_share_and_drop_what_they_lack() -> None:
    options = {"num_codewords": 4, "shortlist_size": 18, "jitter_std": 0.2, "codebook_decay": 0.5}
    config = AirMoeConfig(
        **{**SMALL, "router_options": options, "num_experts_per_tok": 8},
        shortlist_balance_weight=0.1,
        router_z_weight=0.2,
    )
    for method in METHODS:
        other = with_method(config, method)
        assert other.router_config().jitter_std == 0.2
        assert other.router_z_weight == 0.2
        shortlists = method in ("air", "hierarchical", "dense")
        assert other.shortlist_balance_weight == (0.1 if shortlists else 0.0)
    assert config.router_options == options


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="tiny, small, medium, large"):
        model_size("huge")
    with pytest.raises(ConfigError, match="air, exact, peer"):
        with_method(model_size("tiny"), "random")
    with pytest.raises(ConfigError, match="must be 'air'"):
        with_method(with_method(model_size("tiny"), "peer"), "hierarchical")
    uneven = config_of("air", router_options={"num_codewords": 4, "shortlist_size": 10})
    with pytest.raises(ConfigError, match="whole number of clusters"):
        with_method(uneven, "hierarchical")


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_those_of_the_paper_sizes(method: str) -> None:
    """D = 256, 16 layers, 4 heads on 1 pair of keys and values, one MoE layer in the middle."""
    config = with_method(model_size("small"), method)
    counts = parameter_counts(config)
    dense = method == "dense"
    assert counts.embedding == 128_256 * 256
    assert counts.attention == 16 * (256 * 256 * 2 + 256 * 64 * 2)
    assert counts.feed_forward == (16 if dense else 15) * 3 * 256 * 768
    assert counts.norms == 33 * 256 + (0 if dense else 2 * 256)
    assert counts.experts == (0 if dense else 65_536 * 3 * 256)
    assert counts.active_experts == (0 if dense else 512 * 3 * 256)
    assert counts.router == {
        "dense": 0,
        "coarse": 128 * 256,
        "peer": 8 * 256 * 256 + 8 * 2 * 256 * 128,
        "hierarchical": (65_536 + 1024) * 256,
    }.get(method, 65_536 * 256)
    assert counts.total == counts.active + counts.experts - counts.active_experts


def test_every_parameter_counts_once() -> None:
    changes = {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    config = config_of("air", **changes, moe_layers=[0, 2], expert_size=3)
    model = AirMoeForCausalLM(config)
    assert parameter_counts(config).total == sum(weight.numel() for weight in model.parameters())
