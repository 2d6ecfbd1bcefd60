"""Settings of the language model: Llama-3's, and those of its mixture-of-experts layers."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, LlamaConfig
from transformers.activations import ACT2FN

from airmoe.config import check_choice, check_count, check_number
from airmoe.errors import ConfigError
from airmoe.files import read_json
from airmoe.kernels.expert_tables import Activation
from airmoe.moe.layer import PostNorm
from airmoe.routers import (
    ROUTERS,
    CellRouting,
    ExpertRouting,
    RouterConfig,
    Routing,
    TokenRouting,
)
from airmoe.routers.registry import ADD_YOURS

ExpertsKind = Literal["granular", "coarse"]
MOST_LAYERS = 10_000
KINDS = (CellRouting, TokenRouting, ExpertRouting)

# What transformers gives a config besides its fields: written by `to_dict`, or taken by
# `PreTrainedConfig`. Names with a leading underscore are its own as well.
TRANSFORMERS_NAMES = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "rope_scaling",
        "rope_theta",
        "tie_last_hidden_states",
        "torch_dtype",
    }
)


class AirMoeConfig(LlamaConfig):
    """A Llama-3 decoder some of whose feed-forward layers are mixtures of experts.

    Defaults are the paper's small model with AIR. Impossible settings raise `ConfigError` here, not
    when a model is built.
    """

    model_type = "airmoe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "language_loss"]
    default_theta: ClassVar[float] = 500_000.0
    # Routers and experts cannot be split over devices by transformers' plans.
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = None
    base_model_pp_plan: ClassVar[dict[str, Any] | None] = None

    vocab_size: int = 128_256
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 16
    num_attention_heads: int = 4
    num_key_value_heads: int | None = 1
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 128_000
    eos_token_id: int | list[int] | None = 128_001
    tie_word_embeddings: bool = True

    router: str = "air"
    # Fields of that router's Config; the others come from its `for_budget` or their defaults.
    router_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_experts: int = 65_536
    num_experts_per_tok: int = 512
    experts: ExpertsKind = "granular"
    expert_size: int = 1  # neurons
    expert_activation: Activation = "swiglu"
    moe_layers: list[int] | None = None  # None: the middle layer; []: a dense model
    moe_post_norm: PostNorm = "layernorm"
    moe_post_norm_gain: float = 1.0  # what its weights start with
    load_balance_weight: float = 5e-5
    shortlist_balance_weight: float = 0.0
    router_z_weight: float = 0.0

    def __post_init__(self, **names: Any) -> None:
        self._refuse_unknown(names)
        # Before Llama divides by them.
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            check_count(f"model.{name}", getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "model.hidden_size",
                self.hidden_size,
                f"must be a multiple of num_attention_heads = {self.num_attention_heads}",
                "Change one of them.",
            )
        if self.moe_layers is None:
            self.moe_layers = [self.num_hidden_layers // 2]
        # Not the caller's own, which may go on to change.
        self.router_options = copy.deepcopy(self.router_options)
        self.moe_layers = copy.deepcopy(self.moe_layers)
        super().__post_init__(**names)
        # Llama's rules. Its decorator @strict would run them, but also hide our errors in its own.
        self.validate()
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """From a file. What others have written there is kept, with a warning, and saved again.

        (Tools leave marks in a model's config; options that a program gives are those of the
        constructor, which refuses what it does not know.) What is wrong there is a `ConfigError`,
        whoever finds it.
        """
        _check_transformers_own(config_dict)
        unknown = {name: config_dict[name] for name in config_dict if cls._is_foreign(name)}
        for name in unknown.keys() & kwargs.keys():
            unknown[name] = kwargs.pop(name)
        known = {name: config_dict[name] for name in config_dict if name not in unknown}
        try:
            result = super().from_dict(known, **kwargs)
        except (StrictDataclassError, KeyError, TypeError, AttributeError) as error:
            raise refused(error, {**known, **kwargs}) from error
        config = result[0] if isinstance(result, tuple) else result
        config.check()  # again, because the base class sets `kwargs` after the checks
        if unknown:
            warnings.warn(
                f"AirMoeConfig: no options, but in the saved config: {', '.join(sorted(unknown))}. "
                "They are kept and change nothing. Where an option was meant, correct its name.",
                stacklevel=2,
            )
        for name, value in unknown.items():
            setattr(config, name, value)
        return result

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Any:
        """The base class would give it to the constructor."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike[str]) -> dict[str, Any]:
        """transformers' own reader lets tracebacks through."""
        try:
            values = read_json(Path(json_file))
            if not isinstance(values, dict):
                raise ValueError("it must be an object")
        except ValueError as error:
            raise ConfigError(
                "config",
                str(json_file),
                f"must be the JSON of a model's config ({error})",
                "Take the file of another copy, or save the model again.",
            ) from error
        return values

    def check(self) -> None:
        """Raise `ConfigError` for settings that no model can be built from."""
        for name in ("num_experts", "num_experts_per_tok", "expert_size"):
            check_count(f"model.{name}", getattr(self, name))
        self._check_decoder()
        for name in ("load_balance_weight", "shortlist_balance_weight", "router_z_weight"):
            check_number(f"model.{name}", getattr(self, name))
        check_number("model.moe_post_norm_gain", self.moe_post_norm_gain, strict=True)
        check_choice("model.experts", self.experts, ExpertsKind)
        check_choice("model.expert_activation", self.expert_activation, Activation)
        check_choice("model.moe_post_norm", self.moe_post_norm, PostNorm)
        self._check_moe_layers()
        self.router_config()
        if not self.has_shortlists and self.shortlist_balance_weight > 0:
            raise ConfigError(
                "model.shortlist_balance_weight",
                self.shortlist_balance_weight,
                f"must be 0 with the router {self.router!r}, which has no shortlists",
                "Set it to 0, or choose a router with cells (air, hierarchical).",
            )

    def _check_decoder(self) -> None:
        """Llama's part, as far as its own checks let through what breaks when a model is built."""
        for name in ("intermediate_size", "num_key_value_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_count(f"model.{name}", getattr(self, name))
        if self.num_hidden_layers > MOST_LAYERS:
            raise ConfigError(
                "model.num_hidden_layers",
                self.num_hidden_layers,
                f"must be <= {MOST_LAYERS:,}",
                "Give fewer.",
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ConfigError(
                "model.num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads = {self.num_attention_heads}",
                "Choose a divisor.",
            )
        check_number("model.rms_norm_eps", self.rms_norm_eps, below=1.0, strict=True)
        check_number("model.attention_dropout", self.attention_dropout or 0, below=1.0)
        if self.hidden_act not in ACT2FN:
            raise ConfigError(
                "model.hidden_act",
                self.hidden_act,
                "must be an activation that transformers knows",
                'Llama has "silu".',
            )
        pad = self.pad_token_id
        if pad is not None and not -self.vocab_size <= pad < self.vocab_size:
            raise ConfigError(
                "model.pad_token_id",
                pad,
                f"must be < vocab_size = {self.vocab_size}",
                "Give the tokenizer's, or none.",
            )

    def router_config(self) -> RouterConfig:
        """The checked settings of this model's routers."""
        if not isinstance(self.router, str) or self.router not in ROUTERS:
            raise ConfigError(
                "model.router",
                self.router,
                f"must be one of {', '.join(ROUTERS)}",
                ADD_YOURS,
            )
        budget = {
            "dim": self.hidden_size,
            "num_experts": self.num_experts,
            "top_k": self.num_experts_per_tok,
        }
        options = self.router_options
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise ConfigError(
                "model.router_options", options, "must map names to values", "Give a dict."
            )
        for name in budget.keys() & options.keys():
            raise ConfigError(
                f"model.router_options.{name}",
                options[name],
                "is set by the model",
                "Set hidden_size, num_experts or num_experts_per_tok instead.",
            )
        router = ROUTERS[self.router].Config
        try:
            return router.with_options(options, **budget)
        except ConfigError as error:
            raise _as_typed(error, router.label) from error

    @property
    def routes_causally(self) -> bool:
        """False where experts choose tokens: such a model sees the future and cannot generate.

        (Not `is_causal`: transformers takes a field of that name for the attention's.)
        """
        if issubclass(self._layout(), ExpertRouting):
            return False
        return getattr(self.router_config(), "gate", None) != "expert_choice"

    @property
    def has_shortlists(self) -> bool:
        """True where tokens share cells, whose use can be balanced."""
        return issubclass(self._layout(), CellRouting)

    def _layout(self) -> type[Routing]:
        """The kind of routing this model's router declares to return."""
        route = ROUTERS[self.router].route
        declared = route.__annotations__.get("return")
        if isinstance(declared, str):  # alone: others may be names that only type checkers know
            alone = SimpleNamespace(__annotations__={"return": declared})
            with suppress(NameError):
                declared = get_type_hints(alone, route.__globals__)["return"]
        if not isinstance(declared, type) or not issubclass(declared, KINDS):
            raise ConfigError(
                "model.router",
                self.router,
                f"must say what its `route` returns, but the annotation is {declared!r}: experts "
                "that choose tokens see the future, and only cells have shortlists",
                f"Write `-> {' or `-> '.join(f'{kind.__name__}`' for kind in KINDS)}.",
            )
        return declared

    def _check_moe_layers(self) -> None:
        layers, last = self.moe_layers, self.num_hidden_layers - 1
        if not isinstance(layers, list):
            raise ConfigError("model.moe_layers", layers, "must be a list", "Give a list of ints.")
        for layer in layers:
            check_count("model.moe_layers", layer, least=0)
            if layer > last:
                raise ConfigError(
                    "model.moe_layers",
                    layer,
                    f"must be <= {last}, the last of num_hidden_layers = {last + 1}",
                    "Layers are counted from 0.",
                )
        if len(set(layers)) < len(layers):
            raise ConfigError(
                "model.moe_layers", layers, "must name a layer once", "Drop the repeated ones."
            )

    @classmethod
    def _options(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name.startswith("_") or name in TRANSFORMERS_NAMES or name in cls._options()

    @classmethod
    def _is_foreign(cls, name: str) -> bool:
        """No option, and without a meaning for transformers or for this class either."""
        return not (cls._knows(name) or hasattr(cls, name) or hasattr(GenerationConfig(), name))

    def _refuse_unknown(self, names: dict[str, Any]) -> None:
        for name, value in names.items():
            if self._knows(name):
                continue
            remedy = f"Valid options: {', '.join(self._options())}."
            if name == "top_k":
                remedy = "The number of active experts is num_experts_per_tok. " + remedy
            raise ConfigError(f"model.{name}", value, "is not an option", remedy)


# The router's names for what the model has other names for.
TYPED = {"dim": "hidden_size", "num_experts": "num_experts", "top_k": "num_experts_per_tok"}


def _as_typed(error: ConfigError, label: str) -> ConfigError:
    """A router's error with the names of the model's options."""
    before, _, name = error.field.rpartition(".")
    if before != label:
        return error
    field = f"model.{TYPED[name]}" if name in TYPED else f"model.router_options.{name}"
    remedy = error.remedy.replace(f"options: {', '.join(TYPED)}, ", "options: ")  # the model's
    rule, remedy = (re.sub(r"\btop_k\b", TYPED["top_k"], text) for text in (error.rule, remedy))
    return ConfigError(field, error.value, rule, remedy)


def refused(error: Exception, given: Mapping[str, Any]) -> ConfigError:
    """What transformers' own checks, which take several lines, have found among options."""
    reason = str(error).splitlines()[-1].strip().rstrip(".")
    found = re.search(r"for field '(\w+)'", str(error))
    if found is None or found[1] not in given:
        rule = f"must make a model ({reason})"
        return ConfigError("model", "these options", rule, "Change one of them.")
    name = found[1]
    return ConfigError(f"model.{name}", given[name], f"is refused ({reason})", "Change it.")


def _check_transformers_own(values: Mapping[str, Any]) -> None:
    """What transformers takes from a file without looking."""
    kind = values.get("model_type", "")
    if not isinstance(kind, str):
        raise ConfigError("model.model_type", kind, "must be a text", 'It is "airmoe".')
    for name in ("dtype", "torch_dtype"):
        value = values.get(name)
        named = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not (isinstance(named, torch.dtype) and named.is_floating_point):
            rule = "must be a floating-point type of torch"
            raise ConfigError(f"model.{name}", value, rule, 'Give for example "float32".')
