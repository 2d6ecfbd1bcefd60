"""The language model for Hugging Face: Llama's parts around mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from airmoe.errors import ConfigError
from airmoe.model.blocks import Attention, FeedForward, add_and_norm
from airmoe.model.configuration import AirMoeConfig
from airmoe.model.initialization import initialize_ours
from airmoe.model.objective import model_losses, router_losses, weighted_sum
from airmoe.moe import CoarseExperts, GranularExperts, MoELayer
from airmoe.routers.base import run_eagerly
from airmoe.transformers_internals import (
    can_return_tuple,
    capture_outputs,
    merge_with_config_defaults,
)


@dataclass
class AirMoeModelOutput(BaseModelOutputWithPast):
    router_losses: Tensor | None = None  # [MoE layers, losses with a weight], in training


@dataclass
class AirMoeOutput(CausalLMOutputWithPast):
    """`loss` is what to minimise; the named losses are for logs and carry no gradient.

    Named router losses are unweighted means over the MoE layers. They are None if their weight is
    0 and in evaluation, where `loss` is the language loss alone. `router_loss` is their weighted
    sum for this micro-batch, with gradient and also without labels: add it to a loss of your own.
    """

    language_loss: Tensor | None = None
    load_balance_loss: Tensor | None = None
    shortlist_balance_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    router_loss: Tensor | None = None


def build_moe(config: AirMoeConfig) -> MoELayer:
    """The mixture-of-experts layer a config describes."""
    kind = {"granular": GranularExperts, "coarse": CoarseExperts}[config.experts]
    experts = kind(
        config.num_experts,
        config.hidden_size,
        activation=config.expert_activation,
        expert_size=config.expert_size,
    )
    return MoELayer(config.router_config().build(), experts, config.moe_post_norm)


class AirMoeDecoderLayer(GradientCheckpointingLayer):
    """Attention, then a feed-forward network or a mixture of experts; both on a residual stream."""

    def __init__(self, config: AirMoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.self_attn = Attention(config, layer_idx)
        has_experts = layer_idx in (config.moe_layers or ())
        self.mlp = build_moe(config) if has_experts else FeedForward(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        token_mask: Tensor | None = None,
        learn: bool = True,
        **attention: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden [B, L, D] -> hidden, and in training the router losses [n] of an MoE layer.

        The losses are returned as a tensor beside the hidden states, because their gradients would
        not pass through activation checkpointing any other way.
        """
        hidden, normed = add_and_norm(self.input_layernorm, hidden_states, for_products=True)
        attended, _ = self.self_attn(normed, **attention)
        norm = self.post_attention_layernorm
        if not isinstance(self.mlp, MoELayer):
            hidden, normed = add_and_norm(norm, hidden, attended, for_products=True)
            return hidden + self.mlp(normed), None
        hidden, normed = add_and_norm(norm, hidden, attended)
        whole = not torch.compiler.is_compiling() or self.mlp.compiles(normed)
        mix = self._mix if whole else self._mix_eagerly
        mixed, losses = mix(self.mlp, normed, token_mask, learn)
        return hidden + mixed, losses

    def _mix(
        self, layer: MoELayer, hidden: Tensor, token_mask: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None]:
        output = layer.forward_with_routing(hidden, token_mask, learn=learn)
        losses = router_losses(self.config, output.routing) if self.training else None
        return output.hidden, losses

    _mix_eagerly = run_eagerly(_mix)


class AirMoePreTrainedModel(LlamaPreTrainedModel):
    config: AirMoeConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class = AirMoeConfig
    _no_split_modules = ["AirMoeDecoderLayer"]  # noqa: RUF012 (transformers' declaration)
    _can_compile_fullgraph = True  # where Triton computes, and without labels
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": AirMoeDecoderLayer,
        "attentions": Attention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not initialize_ours(module, self.config):
            super()._init_weights(module)


class AirMoeModel(AirMoePreTrainedModel):
    """Tokens -> hidden states."""

    def __init__(self, config: AirMoeConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            AirMoeDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> AirMoeModelOutput:
        """Like `LlamaModel.forward`.

        A mask [B, past + L] of 0 and 1 also keeps padding out of routing statistics and codebooks.
        Codebooks do not learn from a forward that is given a cache, because it is generating.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, and not both.")
        asked = getattr(self.config, "output_router_logits", False)  # as for other models
        if kwargs.get("output_router_logits", asked):
            rule = "is not available: a router need not score all experts"
            remedy = "For losses read router_loss; for metrics call router.full_logits(hidden)."
            raise ConfigError("output_router_logits", True, rule, remedy)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        learn = past_key_values is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        # Plain causal attention needs no mask. `create_causal_mask` would find that out by reading
        # the positions on the host, which cannot happen while a CUDA graph is captured.
        plain = attention_mask is None and position_ids is None and past_key_values is None
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0) + past
        causal_mask = None
        if not plain or self.config._attn_implementation != "sdpa":
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        position_embeddings = self.rotary_emb(hidden, position_ids=position_ids)
        token_mask = token_mask_of(attention_mask, hidden.shape[1])
        losses = []
        for layer in self.layers:
            hidden, layer_losses = layer(
                hidden,
                token_mask=token_mask,
                learn=learn,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
            if layer_losses is not None:
                losses.append(layer_losses)
        return AirMoeModelOutput(
            last_hidden_state=add_and_norm(self.norm, hidden)[1],
            past_key_values=past_key_values,
            router_losses=torch.stack(losses) if losses else None,
        )


def token_mask_of(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Which of the newest `length` tokens are real: [B, past + L] -> [B, L] bool.

    None if no mask was given, or one that says which positions may attend to which.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return None
    return attention_mask[:, -length:].bool()


class AirMoeForCausalLM(AirMoePreTrainedModel, GenerationMixin):
    """Tokens -> logits, or with labels -> loss."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch

    def __init__(self, config: AirMoeConfig) -> None:
        super().__init__(config)
        self.model = AirMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **kwargs: Any,
    ) -> AirMoeOutput:
        """Like `LlamaForCausalLM.forward`, but with labels [B, L] it returns no logits.

        Logits [B, L, V] are by far the largest tensor of a training step, and the loss is computed
        without them: `return_logits=True` gives both. Labels are shifted here; -100 marks a
        position without a target.
        """
        if use_cache is None and labels is not None:
            use_cache = False  # a loss needs no cache
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,  # even if the caller wants a tuple from this model
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        logits, losses = None, {}
        if return_logits or (return_logits is None and labels is None):
            kept = logits_to_keep
            logits = self.lm_head(hidden[:, slice(-kept, None) if isinstance(kept, int) else kept])
        if labels is not None:
            layer_losses, window = outputs.router_losses, num_items_in_batch
            losses = model_losses(self.config, hidden, self.lm_head, labels, layer_losses, window)
        return AirMoeOutput(
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_loss=weighted_sum(self.config, outputs.router_losses),
            **losses,  # pyright: ignore[reportArgumentType]
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; refused if experts choose tokens, which would look at later tokens."""
        if not self.config.routes_causally:
            router = self.config.router
            rule = "must let tokens choose experts in order to generate; here experts choose tokens"
            remedy = 'Train with another router (for AIR: gate="token_choice").'
            gate = self.config.router_options.get("gate")
            option = ("model.router_options.gate", gate) if gate else ("model.router", router)
            raise ConfigError(*option, rule, remedy)
        return super().generate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
