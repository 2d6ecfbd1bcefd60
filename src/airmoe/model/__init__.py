"""Tokens -> hidden -> logits: a Llama-3 decoder with mixture-of-experts layers.

Importing this registers the model with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from airmoe.model.configuration import AirMoeConfig
from airmoe.model.initialization import draw_weights
from airmoe.model.methods import METHODS, with_method
from airmoe.model.modeling import AirMoeDecoderLayer, AirMoeForCausalLM, AirMoeModel, AirMoeOutput
from airmoe.model.objective import TrackOptimizerCallback
from airmoe.model.sizes import SIZES, ParameterCounts, model_size, parameter_counts
from airmoe.transformers_internals import shift_labels_of

AutoConfig.register(AirMoeConfig.model_type, AirMoeConfig)
AutoModel.register(AirMoeConfig, AirMoeModel)
AutoModelForCausalLM.register(AirMoeConfig, AirMoeForCausalLM)
shift_labels_of(AirMoeConfig.model_type, AirMoeForCausalLM.__name__)

__all__ = [
    "METHODS",
    "SIZES",
    "AirMoeConfig",
    "AirMoeDecoderLayer",
    "AirMoeForCausalLM",
    "AirMoeModel",
    "AirMoeOutput",
    "ParameterCounts",
    "TrackOptimizerCallback",
    "draw_weights",
    "model_size",
    "parameter_counts",
    "with_method",
]
