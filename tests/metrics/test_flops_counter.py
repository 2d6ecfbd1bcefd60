"""The ledger's products against torch's own counter over a real forward and backward."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import airmoe
from airmoe.flops import Workload, count_flops
from airmoe.kernels.backend import Choice, use_backend
from airmoe.kernels.token_experts import Activation, is_gated
from airmoe.metrics.flop_counter import flop_counter
from airmoe.model import METHODS, AirMoeConfig, AirMoeForCausalLM, with_method
from tests.model.common import config_of

BATCH, LENGTH = 2, 4
TOKENS = BATCH * LENGTH
WORKLOAD = Workload(sequence_length=LENGTH, tokens_per_step=TOKENS, tokens_per_micro_batch=TOKENS)


def tiny_config() -> AirMoeConfig:
    options = {"num_codewords": 4, "shortlist_size": 16}
    sizes = {"num_hidden_layers": 2, "num_experts": 64, "num_experts_per_tok": 8}
    return config_of("air", **sizes, router_options=options)


def measured(config: AirMoeConfig, counter: FlopCounterMode) -> int:
    """Of one training step, the first after an optimizer's: it refreshes the shortlists."""
    model = AirMoeForCausalLM(config).train()
    optimizer = torch.optim.SGD(model.parameters())
    if config.moe_layers:
        airmoe.track_optimizer(model, optimizer)
    ids = torch.randint(config.vocab_size, (BATCH, LENGTH))
    with counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # Up to some release of transformers the angles of positions were a product.
    angles = counter.get_flop_counts().get("AirMoeForCausalLM.model.rotary_emb", {})
    return counter.get_total_flops() - sum(angles.values())


def assert_counted(config: AirMoeConfig, backend: Choice) -> None:
    """The ledger has every product that is launched, forward and backward, to the last FLOP."""
    with use_backend(backend):
        counted = measured(config, flop_counter())
    assert counted == TOKENS * count_flops(config, WORKLOAD).cost("executed", kind="product").total


def test_dense_parts_with_torch_alone() -> None:
    """A counter that knows nothing of ours, part by part."""
    config = with_method(tiny_config(), "dense")
    counter = FlopCounterMode(display=False)
    with use_backend("reference"):
        total = measured(config, counter)
    by_module = counter.get_flop_counts()

    def counted(module: str) -> int:
        names = [f"AirMoeForCausalLM.model.layers.{layer}.{module}" for layer in range(2)]
        return sum(sum(by_module[name].values()) for name in names)

    ledger = count_flops(config, WORKLOAD)
    head, ffn, projections, sdpa = (
        TOKENS * ledger.cost("executed", part, kind="product").total
        for part in ("head", "ffn", "attention projections", "sdpa")
    )
    assert counted("mlp") == ffn
    # Before torch 2.15 it misses attention on a CPU.
    knows_sdpa = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    assert counted("self_attn") == projections + knows_sdpa * sdpa
    assert total - counted("mlp") - counted("self_attn") == head


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (method, weight)
        for method in METHODS
        for weight in (0.01, 0.0)
        if weight or method != "dense"
    ],
)
@pytest.mark.slow
def test_executed_products_of_the_kernels(method: str, weight: float) -> None:
    config = with_method(tiny_config(), method)
    config.load_balance_weight = weight
    assert_counted(config, "triton")


@pytest.mark.parametrize(("gate", "top_k"), [("token_choice", 1), ("expert_choice", 8)])
def test_gates_without_a_balance_loss(gate: str, top_k: int) -> None:
    """Their own gradient needs the scores again where gates are shares of all candidates."""
    config = tiny_config()
    config.router_options["gate"] = gate
    config.num_experts_per_tok, config.load_balance_weight = top_k, 0.0
    assert_counted(config, "triton")


@pytest.mark.parametrize("activation", get_args(Activation))
def test_every_activation_trains_and_is_counted(activation: Activation) -> None:
    """Products as torch counts them, and between them what the paper counts per neuron."""
    config = tiny_config()
    config.expert_activation = activation
    assert_counted(config, "reference")
    found = count_flops(config, WORKLOAD).cost("algorithmic", "experts", kind="elementwise").forward
    config.expert_activation = "relu" if not is_gated(activation) else "swiglu"
    known = count_flops(config, WORKLOAD).cost("algorithmic", "experts", kind="elementwise").forward
    costs = {"swiglu": 3, "geglu": 6, "geglu_tanh": 6, "gelu": 6, "relu": 1, "silu": 3}
    per_neuron = costs[activation] - costs[config.expert_activation]
    assert found - known == per_neuron * config.num_experts_per_tok


def test_executed_products_of_clusters_in_plain_pytorch() -> None:
    """The reference has no operators of its own: here torch's formulas count cells, too."""
    assert_counted(with_method(tiny_config(), "hierarchical"), "reference")


def test_other_losses_and_shapes() -> None:
    """Two layers of two-matrix experts of two neurons, and all router losses."""
    config = tiny_config()
    config.expert_size, config.expert_activation, config.moe_layers = 2, "gelu", [0, 1]
    config.shortlist_balance_weight = config.router_z_weight = 0.01
    assert_counted(config, "reference")


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_attention_of_a_gpu_with_shared_keys(kind: str) -> None:
    """Four heads of queries, two of keys and values: the products are those of four."""
    query, shared = torch.empty(2, 4, 16, 8, device="meta"), torch.empty(2, 2, 16, 8, device="meta")
    attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    further = () if kind == "flash" else (None, False)  # no bias, no log-sum-exp
    with flop_counter() as counter:
        attention(query, shared, shared, *further)
    assert counter.get_total_flops() == 2 * (2 * 2 * 4 * 16 * 16 * 8)
