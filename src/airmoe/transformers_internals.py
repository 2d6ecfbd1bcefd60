"""Everything that airmoe uses of transformers and that is not public; no other module does.

Transformers may change these names in any release, so importing this module checks that they are
there. Not here: what transformers documents for authors of models (`_init_weights`,
`_can_record_outputs`, `config._attn_implementation`, layers of Llama to build on, ...).
"""
# ruff: noqa: F401 (other modules take these names from here)

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor

from airmoe.errors import ConfigError

KNOWN = ("5.17.0", "5.23.0")  # oldest and newest that the tests have run with


try:
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
    from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, capture_outputs

    if not isinstance(_CAN_RECORD_REGISTRY, dict):  # keys: `str(model class)`
        raise ImportError("_CAN_RECORD_REGISTRY is no dict")
except (ImportError, AttributeError) as error:
    rule = f"lacks a name that airmoe needs ({error}): it knows {' to '.join(KNOWN)}"
    remedy = f"Run: pip install 'transformers=={KNOWN[1]}'."
    raise ConfigError("transformers", transformers.__version__, rule, remedy) from error


def record_outputs_like(made: Any, stock: Any) -> None:
    """Let `output_hidden_states=True` and the like work for a class that models change to.

    Transformers notes which outputs a class can record when it builds the first model of it. Since
    5.23 the registry is a dict that wants a model in place of the name, but stores the name.
    """
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(made), stock._can_record_outputs)


def shift_labels_of(model_type: str, class_name: str) -> None:
    """With label smoothing the Trainer shifts the labels of classes whose name it finds here."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = class_name


def convert_checkpoints_like(model_type: str, stock: str) -> None:
    """Let weights be converted between files and memory as those of another model type."""
    conversions = get_checkpoint_conversion_mapping(stock)
    if conversions is not None:
        register_checkpoint_conversion_mapping(model_type, conversions)


def is_loaded(tensor: Tensor) -> bool:
    """Whether `from_pretrained` has read this tensor from a file, so it keeps its values."""
    return getattr(tensor, "_is_hf_initialized", False)
