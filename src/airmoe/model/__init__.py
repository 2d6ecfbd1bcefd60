"""Tokens -> hidden -> logits: a Llama-3 decoder with mixture-of-experts layers.

Importing this makes the model known to `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from airmoe.model.configuration import AirMoeConfig
from airmoe.model.initialization import draw_weights
from airmoe.model.methods import METHODS, with_method
from airmoe.model.modeling import (
    AirMoeDecoderLayer,
    AirMoeForCausalLM,
    AirMoeModel,
    AirMoeOutput,
)
from airmoe.model.parameters import ParameterCounts, parameter_counts
from airmoe.model.sizes import SIZES, model_size

AutoConfig.register(AirMoeConfig.model_type, AirMoeConfig)
AutoModel.register(AirMoeConfig, AirMoeModel)
AutoModelForCausalLM.register(AirMoeConfig, AirMoeForCausalLM)
# With label smoothing the Trainer shifts the labels of classes whose name it finds here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AirMoeConfig.model_type] = AirMoeForCausalLM.__name__

__all__ = [
    "METHODS",
    "SIZES",
    "AirMoeConfig",
    "AirMoeDecoderLayer",
    "AirMoeForCausalLM",
    "AirMoeModel",
    "AirMoeOutput",
    "ParameterCounts",
    "draw_weights",
    "model_size",
    "parameter_counts",
    "with_method",
]
