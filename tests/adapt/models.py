"""Tiny random models of every family, stock and swapped, built once and copied."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import airmoe
from airmoe import AirRouter
from airmoe.adapt.shortlist_router import ShortlistRouter

VOCAB, WIDTH, EXPERTS, TOP_K = 60, 32, 16, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# Names in transformers, and what each family's config calls its other sizes.
BUILD = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
}
EXTRA: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {"num_experts": EXPERTS},
    # The second and third layer have experts: four groups, of which a token uses two.
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8},
}
NORMALISABLE = ("qwen3_moe", "olmoe", "deepseek_v3")
DENSE = ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo2", "Gemma", "Gemma2", "Gemma3")


def fresh(family: str, **changes: Any) -> Any:
    """As transformers starts it, but with biases of its routers that are not 0."""
    config = getattr(transformers, f"{BUILD[family]}Config")
    model = getattr(transformers, f"{BUILD[family]}ForCausalLM")
    model = model(config(**{**SIZES, **EXTRA[family], **changes}))
    with torch.no_grad():
        for router in stock_routers(model):
            if family == "deepseek_v3":
                router.e_score_correction_bias.normal_(std=0.1)
            if family == "gpt_oss":
                router.bias.normal_()
    return model


def build(family: str, **changes: Any) -> Any:
    """A model whose routers are far from ties: weights 25 times the stock start."""
    return copy.deepcopy(_built(family, tuple(changes.items())))


@functools.cache
def _built(family: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(0)
    model = fresh(family, **dict(changes))
    with torch.no_grad():
        for router in stock_routers(model):
            router.weight.normal_(std=0.5)
    return model


def swap(model: Any, **settings: Any) -> Any:
    return airmoe.swap_routers(model, **{"num_codewords": 4, "shortlist_size": 8, **settings})


def fitted(model: Any, **settings: Any) -> Any:
    """Swapped and calibrated."""
    swap(model, **settings)
    airmoe.calibrate(model, BATCHES, passes=3)
    return model


def calibrated(family: str, size: int = 8, **changes: Any) -> Any:
    """A swapped model, ready to route by shortlists of `size`."""
    return copy.deepcopy(_calibrated(family, size, tuple(changes.items())))


@functools.cache
def _calibrated(family: str, size: int, changes: tuple[tuple[str, Any], ...]) -> Any:
    return fitted(build(family, **dict(changes)), shortlist_size=size).eval()


def dense(family: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of three dense layers, in evaluation mode."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"}
    sizes |= {"num_hidden_layers": 3, "head_dim": 8, "initializer_range": 0.2}
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**sizes | changes)
    torch.manual_seed(3)
    # As from_pretrained builds it: positions stay float32 in every dtype.
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype)
    return model.eval()


def air(**changes: Any) -> AirRouter.Config:
    sizes: dict[str, Any] = {"dim": WIDTH, "num_experts": 48, "top_k": 12}
    sizes |= {"num_codewords": 4, "shortlist_size": 24}
    return AirRouter.Config(**sizes | changes)


def granular(dtype: torch.dtype = torch.float32) -> Any:
    """A Llama with two kinds of new experts, by two calls, after three batches of training."""
    model = dense(dtype=dtype)
    airmoe.swap_ffn(model, layers=[0], router=air())
    experts = airmoe.FfnExperts(expert_size=2, activation="geglu")
    airmoe.swap_ffn(model, layers=[2], router=air(top_k=8), experts=experts)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no optimizer is tracked, and batches are small
        for seed in range(3):
            model.train()(ids(seed, batch=8))
    return model.eval()


def both(order: str = "ffn+routers") -> Any:
    """A DeepSeek-V3, of which the first layer is dense, with both kinds of swaps."""
    model = build("deepseek_v3").eval()
    torch.manual_seed(3)
    for step in order.split("+"):
        if step == "routers":
            swap(model)
        elif step == "back":
            airmoe.restore_routers(model)
        else:
            airmoe.swap_ffn(model, layers=[0], router=air())
    airmoe.calibrate(model, BATCHES, passes=2)
    return model.eval()


def layer_of(model: Any, index: int) -> Any:
    return model.get_decoder().layers[index].mlp


def stock_routers(model: Any) -> list[Any]:
    """In order of layers, swapped or not."""
    found = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
        if router is not None:
            found.append(router)
    return found


def swapped_routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ShortlistRouter)]


def ids(seed: int = 0, batch: int = 3, length: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (batch, length), generator=generator)


BATCHES = [ids(seed) for seed in range(10, 16)]


def reloaded(model: Any, folder: Path, **options: Any) -> Any:
    """Saved, and opened again as anybody would."""
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def logits_of(model: Any, tokens: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model.eval()(ids(1) if tokens is None else tokens).logits


@contextmanager
def routed(model: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """What the routers answer inside the block: (logits, weights, ids) in order of layers."""
    answers: list[tuple[Tensor, Tensor, Tensor]] = []
    with ExitStack() as hooks:
        for router in stock_routers(model):
            handle = router.register_forward_hook(lambda _router, _args, out: answers.append(out))
            hooks.enter_context(handle)
        yield answers


def gradients(model: Any, seed: int = 6, **options: Any) -> dict[str, Tensor]:
    """Of a language-model loss, by name."""
    model.zero_grad()
    torch.manual_seed(5)
    model(ids(seed), labels=ids(seed), **options).loss.backward()
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def run(model: Any, seed: int = 6, **inputs: Any) -> dict[str, Tensor]:
    """Gradients and state after one training step without an optimizer."""
    found = gradients(model.train(), seed, **inputs)
    return found | {f"state of {name}": value for name, value in model.state_dict().items()}


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Nothing that a half-done swap would have changed is another after the block."""

    def picture() -> list[Any]:
        config = getattr(model, "config", None)
        return [
            [(name, type(part), sorted(vars(part))) for name, part in model.named_modules()],
            [id(getattr(part, "config", None)) for part in model.modules()],
            [(name, id(x), x._version) for name, x in model.state_dict(keep_vars=True).items()],
            None if config is None else (type(config), repr(vars(config))),
        ]

    before = picture()
    yield
    assert picture() == before


# (argument of either swap, what the error says)
WRONG_LAYERS: list[tuple[Any, str]] = [
    ([0, 7], r"layers: got 7, must be the number of a .*layer.*: "),
    ([-1], r"layers: got -1"),
    ([True], r"layers: got True"),
    ([1.0], r"layers: got 1\.0, must be a list of whole numbers"),
    (["1"], r"layers: got '1', must be a list of whole numbers"),
    (torch.tensor([1]), r"layers: got tensor\(1\)"),
    (1, r"layers: got 1, must be a list"),
    ([], "must name each layer once, and at least one"),
    ([1, 0, 1], "must name each layer once"),
]
# Swapped in every way.
SWAPPED = {
    **{family: functools.partial(calibrated, family) for family in BUILD},
    "llama": granular,
    "both": both,
}
