"""Small models, one for every way of routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from airmoe import ROUTERS
from airmoe.model import AirMoeConfig, AirMoeForCausalLM
from tests.state.common import EXTRA

VOCABULARY = 53
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "num_experts": 36,
    "num_experts_per_tok": 4,
}
# Every router of the table, and the other kinds of model.
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        name: {"router": name, "router_options": {"jitter_std": 0.1, **EXTRA[name]}}
        for name in ROUTERS
    },
    "air-expert-choice": {
        "router_options": {"jitter_std": 0.1, **EXTRA["air"], "gate": "expert_choice"}
    },
    "coarse": {
        "router": "topk",
        "experts": "coarse",
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "expert_size": 6,
    },
    "dense": {"moe_layers": []},
}
CAUSAL = [name for name in VARIANTS if "expert" not in name]


def config_of(variant: str, **changes: Any) -> AirMoeConfig:
    return AirMoeConfig(**{**SMALL, **VARIANTS[variant], **changes})


def build(variant: str = "air", **changes: Any) -> Any:
    """A model, the same in every run; `Any`, because tests use its internals."""
    torch.manual_seed(0)
    return AirMoeForCausalLM(config_of(variant, **changes))


def batch(index: int, shape: tuple[int, int] = (3, 12), vocabulary: int = VOCABULARY) -> Tensor:
    """Token ids of micro-batch `index`, the same in every run."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(index))


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=batch(9)).logits


def assert_close_gradients(found: Any, expected: Any) -> None:
    grads = [{n: p.grad for n, p in model.named_parameters()} for model in (found, expected)]
    torch.testing.assert_close(*grads)


def learn_a_little(model: Any, steps: int = 2) -> Any:
    """Training forwards, which change codebooks, counters and noise."""
    model.train()
    for step in range(steps):
        model(batch(step), labels=batch(step)).loss.backward()
    model.zero_grad()
    return model


def trainer_of(
    model: Any, folder: Path, examples: Any = None, callbacks: Any = (), **options: Any
) -> Trainer:
    if examples is None:
        examples = [{"input_ids": row, "labels": row} for row in batch(41, (16, 12))]
    settings: dict[str, Any] = {
        "use_cpu": True,
        "report_to": [],
        "save_steps": 2,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **options})
    return Trainer(model, arguments, train_dataset=examples, callbacks=list(callbacks))
