"""Llama's attention, feed-forward network and norms, with steps that belong together fused.

Small models spend their time on many small products. In training, queries, keys and values are one
product instead of three, gate and up one instead of two, and likewise in backward. What follows
these products, and a norm with the addition before it, are one kernel each. The parameters stay
separate and keep Llama's names.
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
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from airmoe.kernels.projections import rotary_heads, swiglu
from airmoe.kernels.rms_norm import add_rms_norm


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
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        if isinstance(projected, Tensor):
            num_kv_heads = self.k_proj.out_features // self.head_dim
            heads = rotary_heads(projected, *position_embeddings, num_kv_heads)
            queries, keys, values = (each.transpose(1, 2) for each in heads)
        else:
            queries, keys, values = (
                each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected
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
        projected = project(x, self.gate_proj, self.up_proj)
        joined = isinstance(projected, Tensor)
        if joined and self.config.hidden_act == "silu":
            return self.down_proj(swiglu(projected))
        gate, up = projected.chunk(2, dim=-1) if joined else projected
        return self.down_proj(self.act_fn(gate) * up)


def add_and_norm(
    norm: LlamaRMSNorm, hidden: Tensor, delta: Tensor | None = None, *, for_products: bool = False
) -> tuple[Tensor, Tensor]:
    """hidden + delta (or `hidden` itself) and its norm, both [.., D].

    Under autocast the norm is float32, but `for_products` may have it in autocast's dtype, to which
    products round it anyway.
    """
    if not norm.training or not _is_plain(norm, LlamaRMSNorm, hidden) or _has_any_global_hook():
        hidden = hidden if delta is None else hidden + delta
        return hidden, norm(hidden)
    device = hidden.device.type
    rounds = for_products and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if rounds else None
    return add_rms_norm(hidden, delta, norm.weight, norm.variance_epsilon, dtype)


def project(hidden: Tensor, *layers: nn.Linear) -> Tensor | list[Tensor]:
    """Apply each layer to `hidden`; in training with one product, which has the outputs joined.

    With few tokens, as in generation, concatenating the weights would cost more than it saves.
    """
    apart = any("kept_apart" in layer.__dict__ or not layer.training for layer in layers)
    fused = not apart and all(is_one_product(layer, hidden) for layer in layers)
    if not fused or _has_any_global_hook():
        return [layer(hidden) for layer in layers]
    return F.linear(hidden, torch.cat([layer.weight for layer in layers]))


def keep_apart(layer: nn.Linear) -> None:
    """Never fuse this layer: FSDP frees a gathered weight after its own product only."""
    layer.kept_apart = True  # pyright: ignore[reportArgumentType]


def is_one_product(layer: nn.Module, hidden: Tensor) -> bool:
    """Whether the layer is a product and nothing else; any other layer must be called."""
    return _is_plain(layer, nn.Linear, hidden) and layer.bias is None


def _is_plain(layer: nn.Module, kind: type[nn.Module], hidden: Tensor) -> bool:
    """Whether calling the layer does what its class does with its weight, and nothing else.

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
        type(layer) is kind
        and type(layer.weight) is nn.Parameter
        and layer.weight.device == hidden.device
        and "forward" not in own
        and not any(hooks)
    )
