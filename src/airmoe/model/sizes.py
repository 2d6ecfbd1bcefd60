"""Model sizes by name: the paper's three, and one for a laptop."""

from __future__ import annotations

from typing import Any

from airmoe.errors import ConfigError
from airmoe.model.configuration import AirMoeConfig

# The paper's table of architectures; all with AIR at E = 65,536, K = 512, G = 1024, M = 2048.
PAPER_MOE: dict[str, Any] = {
    "num_experts": 65_536,
    "num_experts_per_tok": 512,
    "router_options": {"num_codewords": 1024, "shortlist_size": 2048},
}
SIZES: dict[str, dict[str, Any]] = {
    # Ours, to see everything work on a CPU. A run sets vocab_size to its tokenizer's.
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_experts": 1024,
        "num_experts_per_tok": 32,
        "router_options": {"num_codewords": 64, "shortlist_size": 256},
        "load_balance_weight": 0.01,  # the Switch paper's: 5e-5 is too slow for a few hundred steps
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        **PAPER_MOE,
    },
    "medium": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        **PAPER_MOE,
    },
    "large": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        **PAPER_MOE,
    },
}


def model_size(name: str) -> AirMoeConfig:
    """A fresh config of a named size, with AIR."""
    if name not in SIZES:
        raise ConfigError(
            "model_size.name", name, f"must be one of {', '.join(SIZES)}", "Choose one of these."
        )
    return AirMoeConfig(**SIZES[name])
