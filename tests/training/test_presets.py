"""The named runs are the paper's, number by number, and any method gets the same budget there."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from airmoe.errors import ConfigError
from airmoe.experiments.suites import make_plan
from airmoe.model import METHODS, AirMoeForCausalLM
from airmoe.training import PRESETS, method_run, preset

PAPER = [name for name in PRESETS if name != "tiny"]
LLAMA3_VOCABULARY, LLAMA3_END = 128_256, 128_001

# Size -> width, feed-forward width, layers, heads, key/value heads.
ARCHITECTURES = {
    "small": (256, 768, 16, 4, 1),
    "medium": (512, 1536, 24, 8, 2),
    "large": (768, 2048, 24, 12, 4),
}
BLOCKS = {"wikitext103": 256, "c5": 1024, "openwebtext2": 1024}
PER_DEVICE = {"small": 16, "medium": 16, "large": 32}  # sequences on each of 4
ROUTERS = {
    "air": {"AirRouter"},
    "exact": {"TopKRouter"},
    "peer": {"PeerRouter"},
    "hierarchical": {"HierarchicalRouter"},
    "expert_choice": {"ExpertChoiceRouter"},
    "coarse": {"TopKRouter"},
    "dense": set(),
}


def test_every_run_of_the_paper_has_a_name() -> None:
    named = {(name.partition("-")[0], preset(name).data.corpus) for name in PAPER}
    assert named == set(product(PER_DEVICE, BLOCKS)) - {("large", "wikitext103")}


@pytest.mark.parametrize("name", PAPER)
def test_batches_and_blocks(name: str) -> None:
    run = preset(name)
    assert run.data.block_size == BLOCKS[run.data.corpus]
    assert run.training.batch_size == 4 * PER_DEVICE[name.partition("-")[0]]
    assert run.training.accumulation_steps(4) == 1  # runs on 4 devices
    assert run.data.tokenizer == "llama-3"


@pytest.mark.parametrize("name", PAPER)
def test_architecture(name: str) -> None:
    model = preset(name).model_config(LLAMA3_VOCABULARY, LLAMA3_END)
    assert (
        model.hidden_size,
        model.intermediate_size,
        model.num_hidden_layers,
        model.num_attention_heads,
        model.num_key_value_heads,
    ) == ARCHITECTURES[name.partition("-")[0]]
    assert (model.vocab_size, model.max_position_embeddings) == (128_256, 2048)
    assert model.rope_parameters["rope_theta"] == 500_000  # pyright: ignore
    assert model.tie_word_embeddings is True
    assert (model.num_experts, model.num_experts_per_tok) == (65_536, 512)
    router = model.router_config()
    assert (router.num_codewords, router.shortlist_size) == (1024, 2048)  # pyright: ignore


@pytest.mark.parametrize("name", PAPER)
def test_the_recipe_is_the_papers(name: str) -> None:
    made = preset(name).training
    assert (made.beta1, made.beta2, made.epsilon) == (0.9, 0.95, 1e-8)
    assert made.eval_every == ("epoch" if preset(name).data.corpus == "wikitext103" else 500)
    assert made.keep_checkpoints == 2
    assert (made.weight_decay, made.max_grad_norm) == (0.1, 1.0)
    assert (made.learning_rate, made.warmup, made.seed) == (3e-4, 0.05, 42)
    assert (made.log_every, made.precision) == (500, "auto")
    assert made.total_steps(steps_per_epoch=70) == (made.steps or 10 * 70)
    every = 70 if made.eval_every == "epoch" else 500
    assert made.steps_between_evaluations(steps_per_epoch=70) == every
    assert made.micro_batch_size == "auto"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_with_every_method(name: str, method: str) -> None:
    """Without memory: the largest has billions of numbers."""
    run = preset(name, method)
    config = run.model_config(LLAMA3_VOCABULARY, LLAMA3_END)
    with torch.device("meta"):
        model = AirMoeForCausalLM(config)
    routers = {type(module).__name__ for module in model.modules() if hasattr(module, "observe")}
    assert routers == ROUTERS[method]
    assert run.preset == name


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"preset: got 'huge', .*large-c5"):
        preset("huge")
    with pytest.raises(ConfigError, match=r"method: got 'topk', .*exact"):
        preset("tiny", "topk")


SIZES = [
    ["model.num_experts=4096"],
    ["model.num_experts_per_tok=64"],
    ["model.num_experts_per_tok=64", "model.num_experts=1024"],
    ["model.router_options.num_codewords=32", "model.router_options.shortlist_size=256"],
    ["model.expert_size=2", "model.hidden_size=64", "model.router_options.jitter_std=0.05"],
    ["training.steps=7", "data.block_size=64", "model.vocab_size=2048"],
]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_with_nothing_assigned_it_is_the_preset(name: str, method: str) -> None:
    assert method_run(name, method) == preset(name, method)


@pytest.mark.parametrize("assigned", SIZES, ids=" ".join)
def test_methods_are_those_of_the_suite(assigned: list[str]) -> None:
    runs = {run.variant: run.config for run in make_plan("main", "tiny", assigned).runs}
    for method, config in runs.items():
        assert method_run("tiny", method, assigned).model == config.model, method


def test_options_of_the_method_s_own_router() -> None:
    peer = method_run("tiny", "peer", ["model.router_options.num_heads=4"])
    assert peer.model["router_options"]["num_heads"] == 4
    whole = method_run("tiny", "peer", ['model.router_options={"num_heads": 2}'])
    assert whole.model["router_options"] == {"num_heads": 2}
    later = ['model.router_options={"num_heads": 2}', "model.router_options.jitter_std=0.3"]
    mixed = method_run("tiny", "peer", later).model["router_options"]
    assert mixed == {"num_heads": 2, "jitter_std": 0.3}
    room = method_run("tiny", "expert_choice", ["model.router_options.capacity_factor=2.0"])
    assert room.model["router_options"]["capacity_factor"] == 2.0
    shared = method_run("tiny", "peer", ["model.router_options.jitter_std=0.5"])
    assert shared.model["router_options"]["jitter_std"] == 0.5


@pytest.mark.parametrize("method", ["exact", "peer", "coarse", "expert_choice", "dense"])
def test_sizes_that_the_lists_of_the_preset_do_not_fit(method: str) -> None:
    run = method_run("tiny", method, ["model.num_experts=64"])
    assert run.model["num_experts"] == (2 if method == "coarse" else 64)
    for needs_lists in ("air", "hierarchical"):
        with pytest.raises(ConfigError, match=r"model\.router_options\.shortlist_size: got 256"):
            method_run("tiny", needs_lists, ["model.num_experts=64"])
    sizes = ["model.num_experts=64", "model.router_options.shortlist_size=99"]
    with pytest.raises(ConfigError, match=r"model\.router_options\.shortlist_size: got 99"):
        method_run("tiny", method, sizes)


def test_air_takes_any_router() -> None:
    run = method_run("tiny", "air", ["model.router=topk"])
    assert run.model["router"] == "topk"


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.router: got 'topk', must be 'air'"):
        method_run("tiny", "peer", ["model.router=topk"])
    with pytest.raises(ConfigError, match="nonsense"):
        method_run("tiny", "peer", ["model.router_options.nonsense=1"])
    with pytest.raises(ConfigError, match="method: got 'magic'"):
        method_run("tiny", "magic")
