"""Tiny dense models of transformers for the tests of `swap_ffn`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from airmoe import AirRouter, RouterConfig

DIM, NEURONS, VOCABULARY = 16, 48, 61
SILU = ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo2")
GEMMAS = ("Gemma", "Gemma2", "Gemma3")


def dense(family: str = "Llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A random model of three layers, in evaluation mode."""
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": DIM,
        "intermediate_size": NEURONS,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, config_name)(**sizes | options)
    torch.manual_seed(3)
    # As from_pretrained builds it: positions stay float32 in every dtype.
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype)
    return model.eval()


def ids(seed: int = 0, batch: int = 2, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def air(
    top_k: int = 12, num_experts: int = 48, shortlist_size: int = 24, **options: Any
) -> RouterConfig:
    sizes: dict[str, Any] = {"dim": DIM, "num_experts": num_experts, "top_k": top_k}
    sizes |= {"num_codewords": 4, "shortlist_size": shortlist_size}
    return AirRouter.Config(**sizes | options)


def layer_of(model: Any, index: int) -> Any:
    return model.get_decoder().layers[index].mlp


@torch.no_grad()
def logits_of(model: Any, seed: int = 0) -> Tensor:
    return model.eval()(ids(seed)).logits
