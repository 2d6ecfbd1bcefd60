"""Named model sizes, and how many parameters a config makes, without building the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError
from airmoe.kernels.token_experts import is_gated
from airmoe.model.configuration import AirMoeConfig

SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# The paper's table of architectures, all with AIR at E = 65,536, K = 512, G = 1024, M = 2048.
PAPER_MOE: dict[str, Any] = {
    "num_experts": 65_536,
    "num_experts_per_tok": 512,
    "router_options": {"num_codewords": 1024, "shortlist_size": 2048},
}
# Ours, to see everything work on a CPU. A run sets vocab_size to its tokenizer's.
TINY_MOE: dict[str, Any] = {
    "num_experts": 1024,
    "num_experts_per_tok": 32,
    "router_options": {"num_codewords": 64, "shortlist_size": 256},
    "load_balance_weight": 0.01,  # the Switch paper's: 5e-5 is too slow for a few hundred steps
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(zip(SHAPE, (128, 384, 3, 4, 1), strict=True)) | TINY_MOE,
    "small": dict(zip(SHAPE, (256, 768, 16, 4, 1), strict=True)) | PAPER_MOE,
    "medium": dict(zip(SHAPE, (512, 1536, 24, 8, 2), strict=True)) | PAPER_MOE,
    "large": dict(zip(SHAPE, (768, 2048, 24, 12, 4), strict=True)) | PAPER_MOE,
}


def model_size(name: str) -> AirMoeConfig:
    """A fresh config of a named size, with AIR."""
    if name not in SIZES:
        remedy = f"{did_you_mean(name, SIZES)}Choose one of these."
        raise ConfigError("model_size.name", name, f"must be one of {', '.join(SIZES)}", remedy)
    return AirMoeConfig(**SIZES[name])


@dataclass(frozen=True)
class ParameterCounts:
    """Trained numbers of the whole model (all layers), by what they are for."""

    embedding: int  # once where input and output share it
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

        A router counts in full, even if it scores only some of its experts.
        """
        dense = self.embedding + self.attention + self.feed_forward + self.norms
        return dense + self.router + self.active_experts


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
    """Built without memory and counted, which works for any router of `ROUTERS`."""
    try:
        with torch.device("meta"):
            router = config.router_config().build()
    except RuntimeError as error:  # more bytes than 64 bits can count
        rule = f"makes a table too large for PyTorch ({error})"
        raise ConfigError("model.num_experts", config.num_experts, rule, "Lower it.") from error
    return sum(weight.numel() for weight in router.parameters())
