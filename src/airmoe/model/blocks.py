"""Llama's attention and feed-forward network, with projections of the same input fused.

Small models spend their time on many small products. In training, queries, keys and values are one
product instead of three, gate and up one instead of two, and likewise in backward. The parameters
stay separate and keep Llama's names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class Attention(LlamaAttention):
    """Causal attention over grouped heads with rotary positions."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [B, L, D] -> [B, L, D], and the attention weights if they are computed."""
        assert position_embeddings is not None
        projections = (self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in project(hidden_states, *projections)
        )  # [B, heads, L, head width]
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        chosen = self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, eager_attention_forward)
        attended, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attended.flatten(-2)), weights


class FeedForward(LlamaMLP):
    """down(act(gate(x)) * up(x))."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(self.act_fn(gate) * up)


def project(hidden: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Apply each layer to `hidden`, in training with one product for all.

    With few tokens, as in generation, concatenating the weights would cost more than it saves.
    """
    apart = any("kept_apart" in layer.__dict__ or not layer.training for layer in layers)
    fused = not apart and all(is_one_product(layer, hidden) for layer in layers)
    if not fused or _has_any_global_hook():
        return [layer(hidden) for layer in layers]
    joined = F.linear(hidden, torch.cat([layer.weight for layer in layers]))
    return list(joined.split([layer.out_features for layer in layers], dim=-1))


def keep_apart(layer: nn.Linear) -> None:
    """Never fuse this layer: FSDP frees a gathered weight after its own product only."""
    layer.kept_apart = True  # pyright: ignore[reportArgumentType]


def is_one_product(layer: nn.Module, hidden: Tensor) -> bool:
    """Whether the layer is a product and nothing else; any other layer must be called.

    Adapters and quantized layers have another class or another kind of weight; offloading replaces
    `forward` and keeps the weight elsewhere; hooks want to be run.
    """
    own = layer.__dict__
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.device == hidden.device
        and layer.bias is None
        and "forward" not in own
        and not any(hooks)
    )
