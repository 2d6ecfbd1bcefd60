"""Initial values of our modules under transformers' rules.

Transformers builds a model without memory (on the meta device), loads what a checkpoint has, marks
those tensors, and then initialises every module: tensors that were not loaded must get values,
buffers too, and loaded ones must keep theirs.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init  # leaves loaded tensors as they are

from airmoe.model.configuration import AirMoeConfig
from airmoe.moe import CoarseExperts, GranularExperts
from airmoe.routers import Codebook, Router
from airmoe.routers.lists import ListCache
from airmoe.transformers_internals import is_loaded


@torch.no_grad()
def initialize_ours(module: nn.Module, config: AirMoeConfig) -> bool:
    """Initialise modules that transformers does not know; False for all others.

    Experts start at the model's `initializer_range`, and embeddings with rows of norm 1:
    docs/decisions.md has the measurements.
    """
    if isinstance(module, nn.LayerNorm):  # the post-norm; the decoder's own norms are of RMS
        init.constant_(module.weight, config.moe_post_norm_gain)
        init.zeros_(module.bias)
        return True
    if isinstance(module, nn.Embedding):
        init.normal_(module.weight, std=module.embedding_dim**-0.5)
        return True
    return initialize_layer(module, config.initializer_range)


@torch.no_grad()
def initialize_layer(module: nn.Module, std: float) -> bool:
    """Initialise a part of a MoELayer, experts with this `std`; False for any other module."""
    if isinstance(module, (GranularExperts, CoarseExperts)):
        for weight in module.parameters():
            init.normal_(weight, std=std)
        return True
    if not isinstance(module, (Router, Codebook, ListCache)):
        return False
    tensors = (*module.parameters(), *module.buffers())
    loaded = [(tensor, tensor.clone()) for tensor in tensors if is_loaded(tensor)]
    module.reset_parameters()
    for tensor, value in loaded:
        tensor.copy_(value)
    if isinstance(module, Router):
        module.on_load()
    return True


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Initialise again, each module from the seed and its own name alone.

    Models that differ in one module, such as the router, then start equal in all others, so that
    two methods with one seed are a pair.
    """
    tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    # Children first, as transformers does: a router has the last word on its parts.
    for name, module in reversed(list(model.named_modules())):
        if module is tied:
            continue  # it shares the embedding's values
        key = hashlib.sha256(f"{seed} {name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(key[:7], "big"))
            model._init_weights(module)
