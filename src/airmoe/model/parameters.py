"""How many parameters a config makes, without building the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from airmoe.errors import ConfigError
from airmoe.kernels.expert_tables import is_gated
from airmoe.model.configuration import AirMoeConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Trained numbers of the whole model (all layers), by what they are for."""

    embedding: int  # once, where input and output share it
    attention: int
    feed_forward: int  # of the dense layers
    router: int
    experts: int
    active_experts: int  # of these, what one token uses (expert choice: on average)
    norms: int

    @property
    def total(self) -> int:
        """What `sum(p.numel() for p in model.parameters())` gives."""
        return self.active + self.experts - self.active_experts

    @property
    def active(self) -> int:
        """What one token uses: everything but the experts it did not choose.

        A router counts whole, also where it scores only a part of its experts.
        """
        return (
            self.embedding
            + self.attention
            + self.feed_forward
            + self.router
            + self.active_experts
            + self.norms
        )


def parameter_counts(config: AirMoeConfig) -> ParameterCounts:
    """Count the parameters of `AirMoeForCausalLM(config)`."""
    dim = config.hidden_size
    num_layers, num_moe_layers = config.num_hidden_layers, len(config.moe_layers or ())
    num_matrices = 3 if is_gated(config.expert_activation) else 2
    per_expert = num_matrices * config.expert_size * dim
    post_norm = 2 * dim if config.moe_post_norm == "layernorm" else 0
    return ParameterCounts(
        embedding=config.vocab_size * dim * (1 if config.tie_word_embeddings else 2),
        attention=num_layers * _attention(config),
        feed_forward=(num_layers - num_moe_layers) * _feed_forward(config),
        router=num_moe_layers * _router(config),
        experts=num_moe_layers * config.num_experts * per_expert,
        active_experts=num_moe_layers * config.num_experts_per_tok * per_expert,
        norms=(2 * num_layers + 1) * dim + num_moe_layers * post_norm,
    )


def _attention(config: AirMoeConfig) -> int:
    assert config.head_dim is not None and config.num_key_value_heads is not None
    queries = config.num_attention_heads * config.head_dim
    keys = values = config.num_key_value_heads * config.head_dim
    weights = (queries + keys + values) * config.hidden_size + config.hidden_size * queries
    biases = queries + keys + values + config.hidden_size
    return weights + (biases if config.attention_bias else 0)


def _feed_forward(config: AirMoeConfig) -> int:
    weights = 3 * config.hidden_size * config.intermediate_size
    biases = 2 * config.intermediate_size + config.hidden_size
    return weights + (biases if config.mlp_bias else 0)


def _router(config: AirMoeConfig) -> int:
    """Asked of the router itself, built without memory: any router of `ROUTERS` can be counted."""
    try:
        with torch.device("meta"):
            router = config.router_config().build()
    except RuntimeError as error:  # more bytes than 64 bits can count
        raise ConfigError(
            "model.num_experts",
            config.num_experts,
            f"makes a table too large for PyTorch ({error})",
            "Give a smaller one.",
        ) from error
    return sum(weight.numel() for weight in router.parameters())
