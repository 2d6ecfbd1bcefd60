"""Settings of the language model: Llama-3's, and those of its mixture-of-experts layers."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, LlamaConfig
from transformers.activations import ACT2FN

from airmoe.config import check_choice, check_count, check_number, did_you_mean
from airmoe.errors import ConfigError
from airmoe.files import read_json
from airmoe.kernels.token_experts import Activation
from airmoe.moe.layer import PostNorm
from airmoe.routers import ADD_YOURS, ROUTERS, RouterConfig

ExpertsKind = Literal["granular", "coarse"]
LAYOUTS = ("CellRouting", "TokenRouting", "ExpertRouting")  # kinds of routing
# A router's name for a setting -> the model's.
TYPED = {"dim": "hidden_size", "num_experts": "num_experts", "top_k": "num_experts_per_tok"}

# Names that transformers gives a config besides its fields, and all with a leading underscore.
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

    The defaults are the paper's small model with AIR. Impossible settings raise `ConfigError` here,
    not when a model is built.
    """

    model_type = "airmoe"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "language_loss"]
    default_theta: ClassVar[float] = 500_000.0
    # transformers' plans do not know how to split routers and experts over devices.
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
    # Fields of the router's Config; all others come from its `for_budget` or their defaults.
    router_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_experts: int = 65_536
    num_experts_per_tok: int = 512
    experts: ExpertsKind = "granular"
    expert_size: int = 1  # neurons
    expert_activation: Activation = "swiglu"
    moe_layers: list[int] | None = None  # None: the middle layer; [] makes a dense model
    moe_post_norm: PostNorm = "layernorm"
    moe_post_norm_gain: float = 1.0  # initial value of its weights
    load_balance_weight: float = 5e-5
    shortlist_balance_weight: float = 0.0
    router_z_weight: float = 0.0

    def __post_init__(self, **names: Any) -> None:
        self._refuse_unknown(names)
        # Checked first, because Llama's constructor divides by them.
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            check_count(f"model.{name}", getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            rule = f"must be a multiple of num_attention_heads = {self.num_attention_heads}"
            raise ConfigError("model.hidden_size", self.hidden_size, rule, "Change one of them.")
        if self.moe_layers is None:
            self.moe_layers = [self.num_hidden_layers // 2]
        # Copies, so that later changes by the caller do not reach this config.
        options, layers = copy.deepcopy((self.router_options, self.moe_layers))
        self.router_options, self.moe_layers = options, layers
        super().__post_init__(**names)
        self.validate()  # Llama's rules, which otherwise run only where its errors hide ours
        self.check()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a saved config, and keep the entries that other tools left there, with a warning.

        A wrong value raises `ConfigError`, also where a check of transformers finds it.
        """
        generation = GenerationConfig()  # whose options may be in the file too
        unknown = {
            name: value
            for name, value in config_dict.items()
            if not (cls._knows(name) or hasattr(cls, name) or hasattr(generation, name))
        }
        for name in unknown.keys() & kwargs.keys():
            unknown[name] = kwargs.pop(name)
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        try:
            result = super().from_dict(known, **kwargs)
        except (StrictDataclassError, KeyError, TypeError, AttributeError) as error:
            raise refused(error, {**known, **kwargs}) from error
        config = result[0] if isinstance(result, tuple) else result
        config.check()  # again, because the base class sets `kwargs` after the checks
        if unknown:
            warnings.warn(
                f"AirMoeConfig: unknown entries in the saved config: {', '.join(sorted(unknown))}. "
                "They are kept and have no effect. To set an option, correct its name.",
                stacklevel=2,
            )
        for name, value in unknown.items():
            setattr(config, name, value)
        return result

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> Any:
        """Read a file as `from_dict` does; the base class would call the constructor."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike[str]) -> dict[str, Any]:
        """The JSON of a config; every method that reads a file calls this."""
        try:
            values = read_json(Path(json_file))
            if not isinstance(values, dict):
                raise ValueError("it must be an object")
        except ValueError as error:
            rule = f"must be the JSON of a model's config ({error})"
            remedy = "Take the file from another copy, or save the model again."
            raise ConfigError("config", str(json_file), rule, remedy) from error
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
            rule = f"must be 0 with the router {self.router!r}, which has no shortlists"
            remedy = "Set it to 0, or choose a router with cells (air, hierarchical)."
            weight = self.shortlist_balance_weight
            raise ConfigError("model.shortlist_balance_weight", weight, rule, remedy)

    def _check_decoder(self) -> None:
        """Check what Llama's own checks let through although no model can be built from it."""
        for name in ("intermediate_size", "num_key_value_heads", "head_dim"):
            if getattr(self, name) is not None:
                check_count(f"model.{name}", getattr(self, name))
        heads = self.num_key_value_heads
        if self.num_attention_heads % (heads or 1):
            rule = f"must divide num_attention_heads = {self.num_attention_heads}"
            raise ConfigError("model.num_key_value_heads", heads, rule, "Choose a divisor.")
        check_number("model.rms_norm_eps", self.rms_norm_eps, below=1.0, strict=True)
        check_number("model.attention_dropout", self.attention_dropout or 0, below=1.0)
        if self.hidden_act not in ACT2FN:
            rule = "must be an activation that transformers knows"
            raise ConfigError("model.hidden_act", self.hidden_act, rule, 'Llama uses "silu".')
        pad = self.pad_token_id
        if pad is not None and not -self.vocab_size <= pad < self.vocab_size:
            rule = f"must be < vocab_size = {self.vocab_size}"
            raise ConfigError("model.pad_token_id", pad, rule, "Give the tokenizer's, or None.")

    def router_config(self) -> RouterConfig:
        """The checked settings of this model's routers."""
        if not isinstance(self.router, str) or self.router not in ROUTERS:
            rule = f"must be one of {', '.join(ROUTERS)}"
            remedy = f"{did_you_mean(self.router, ROUTERS)}{ADD_YOURS}"
            raise ConfigError("model.router", self.router, rule, remedy)
        budget = {name: getattr(self, typed) for name, typed in TYPED.items()}
        options = self.router_options
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            rule = "must map names to values"
            raise ConfigError("model.router_options", options, rule, "Give a dict.")
        for name in budget.keys() & options.keys():
            rule = "is set by the model"
            remedy = "Set hidden_size, num_experts or num_experts_per_tok instead."
            raise ConfigError(f"model.router_options.{name}", options[name], rule, remedy)
        router = ROUTERS[self.router].Config
        try:
            return router.with_options(options, **budget)
        except ConfigError as error:
            raise _as_typed(error, router.label) from error

    @property
    def routes_causally(self) -> bool:
        """False where experts choose tokens: such a model sees later tokens and cannot generate.

        Not called `is_causal`, because transformers reads that name as a setting of attention.
        """
        if self._layout() == "ExpertRouting":
            return False
        return getattr(self.router_config(), "gate", None) != "expert_choice"

    @property
    def has_shortlists(self) -> bool:
        """True where tokens share cells, whose use can be balanced."""
        return self._layout() == "CellRouting"

    def _layout(self) -> str:
        """The kind of routing that the router's `route` is annotated to return."""
        declared = ROUTERS[self.router].route.__annotations__.get("return")
        name = getattr(declared, "__name__", declared)
        if name not in LAYOUTS:
            raise ConfigError(
                "model.router",
                self.router,
                f"must say what its `route` returns, but the annotation is {declared!r}: experts "
                "that choose tokens see the future, and only cells have shortlists",
                f"Write `-> {'` or `-> '.join(LAYOUTS)}`.",
            )
        return name

    def _check_moe_layers(self) -> None:
        layers, last = self.moe_layers, self.num_hidden_layers - 1
        if not isinstance(layers, list):
            raise ConfigError("model.moe_layers", layers, "must be a list", "Give a list of ints.")
        for layer in layers:
            check_count("model.moe_layers", layer, least=0)
            if layer > last:
                rule = f"must be <= {last}, the last of num_hidden_layers = {last + 1}"
                raise ConfigError("model.moe_layers", layer, rule, "Layers are counted from 0.")
        if len(set(layers)) < len(layers):
            rule = "must name each layer once"
            raise ConfigError("model.moe_layers", layers, rule, "Drop the repeated ones.")

    @classmethod
    def _options(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def _knows(cls, name: str) -> bool:
        return name.startswith("_") or name in TRANSFORMERS_NAMES or name in cls._options()

    def _refuse_unknown(self, names: dict[str, Any]) -> None:
        options = self._options()
        for name, value in names.items():
            if self._knows(name):
                continue
            hint = did_you_mean(name, options)
            if name == "top_k":
                hint = "The number of active experts is num_experts_per_tok. "
            remedy = f"{hint}Valid options: {', '.join(options)}."
            raise ConfigError(f"model.{name}", value, "is not an option", remedy)


def _as_typed(error: ConfigError, label: str) -> ConfigError:
    """A router's error under the model's names for the router's options."""
    before, _, name = error.field.rpartition(".")
    if before != label:
        return error
    field = f"model.{TYPED[name]}" if name in TYPED else f"model.router_options.{name}"
    # The first options in the router's lists of valid and required ones are set by the model.
    remedy = error.remedy.replace(f": {', '.join(TYPED)}, ", ": ")
    rule, remedy = (re.sub(r"\btop_k\b", TYPED["top_k"], text) for text in (error.rule, remedy))
    return ConfigError(field, error.value, rule, remedy)


def refused(error: Exception, given: Mapping[str, Any]) -> ConfigError:
    """An error of transformers' own checks, which takes several lines, as one `ConfigError`."""
    reason = str(error).splitlines()[-1].strip().rstrip(".")
    found = re.search(r"for field '(\w+)'", str(error))
    if found is None or found[1] not in given:
        rule = f"must make a model ({reason})"
        return ConfigError("model", "these options", rule, "Change one of them.")
    name = found[1]
    return ConfigError(f"model.{name}", given[name], f"is refused ({reason})", "Change it.")
