"""Named model sizes, and how many parameters a config makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError
from airmoe.model.configuration import AirMoeConfig
from airmoe.model.modeling import AirMoeForCausalLM

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
# Our own, small enough for a CPU. A run sets vocab_size to its tokenizer's.
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


# What a parameter is for, by the first of these that its name contains.
PARTS = {
    "embed": "embedding",
    "lm_head": "embedding",
    "self_attn": "attention",
    "mlp.router": "router",
    "mlp.experts": "experts",
    "norm": "norms",
    "mlp": "feed_forward",
}


def parameter_counts(config: AirMoeConfig) -> ParameterCounts:
    """Count the parameters of `AirMoeForCausalLM(config)`, built without memory."""
    try:
        with torch.device("meta"):
            model = AirMoeForCausalLM(config)
    except RuntimeError as error:  # more bytes than 64 bits can count
        rule = f"makes a table too large for PyTorch ({error})"
        raise ConfigError("model.num_experts", config.num_experts, rule, "Lower it.") from error
    counts = dict.fromkeys(PARTS.values(), 0)
    for name, weight in model.named_parameters():
        counts[next(part for mark, part in PARTS.items() if mark in name)] += weight.numel()
    active = counts["experts"] * config.num_experts_per_tok // config.num_experts
    return ParameterCounts(**counts, active_experts=active)
