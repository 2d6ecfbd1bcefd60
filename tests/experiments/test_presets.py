"""The named runs are the paper's, number by number (appendix, Training and Architectures)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from airmoe.errors import ConfigError
from airmoe.experiments import PRESETS, preset
from airmoe.model import METHODS, AirMoeForCausalLM
from airmoe.training import RunConfig, arguments, override
from airmoe.training.arguments import make_arguments, total_steps

PAPER = [name for name in PRESETS if name != "tiny"]
LLAMA3_VOCABULARY, LLAMA3_END = 128_256, 128_001

# Size -> width, feed-forward width, layers, heads, key/value heads.
ARCHITECTURES = {
    "small": (256, 768, 16, 4, 1),
    "medium": (512, 1536, 24, 8, 2),
    "large": (768, 2048, 24, 12, 4),
}
# (size, corpus) -> block, sequences on each of 4 devices.
BATCHES = {
    ("small", "wikitext103"): (256, 16),
    ("medium", "wikitext103"): (256, 16),
    ("small", "c5"): (1024, 16),
    ("medium", "c5"): (1024, 16),
    ("large", "c5"): (1024, 32),
    ("small", "openwebtext2"): (1024, 16),
    ("medium", "openwebtext2"): (1024, 16),
    ("large", "openwebtext2"): (1024, 32),
}


def test_every_run_of_the_paper_has_a_name() -> None:
    named = {(name.partition("-")[0], preset(name).data.corpus) for name in PAPER}
    assert named == set(BATCHES)


@pytest.mark.parametrize("name", PAPER)
def test_batches_and_blocks(name: str) -> None:
    run = preset(name)
    block, per_device = BATCHES[name.partition("-")[0], run.data.corpus]
    assert run.data.block_size == block
    assert run.training.batch_size == 4 * per_device
    assert (
        run.training.batch_size * block
        == {
            (256, 16): 16_384,
            (1024, 16): 65_536,
            (1024, 32): 131_072,
        }[block, per_device]
    )
    assert run.training.batch_size % (4 * run.training.micro_batch_size) == 0  # runs on 4 devices
    assert run.data.tokenizer == "llama-3"


@pytest.mark.parametrize("name", PAPER)
def test_recipe(name: str) -> None:
    options = preset(name).training
    assert (options.beta1, options.beta2, options.epsilon) == (0.9, 0.95, 1e-8)
    assert (options.weight_decay, options.max_grad_norm) == (0.1, 1.0)
    assert (options.learning_rate, options.warmup) == (3e-4, 0.05)
    assert (options.seed, options.precision) == (42, "fp16")
    assert (options.log_every, options.keep_checkpoints) == (500, 2)
    on_wikitext = preset(name).data.corpus == "wikitext103"
    assert options.eval_every == ("epoch" if on_wikitext else 500)


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


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's fp16 is refused without one; nothing of it runs here."""
    monkeypatch.setattr(arguments, "check_device", lambda *_: None)


def arguments_of(run: RunConfig, folder: Path, processes: int = 4) -> TrainingArguments:
    return make_arguments(run, folder, num_processes=processes, steps_per_epoch=70)


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_trainer_is_told_so(name: str, tmp_path: Path) -> None:
    run = preset(name)
    made = arguments_of(run, tmp_path)
    assert (made.adam_beta1, made.adam_beta2, made.adam_epsilon) == (0.9, 0.95, 1e-8)
    assert (made.weight_decay, made.max_grad_norm) == (0.1, 1.0)
    assert made.optim == "adamw_torch_fused"
    assert (made.learning_rate, made.lr_scheduler_type) == (3e-4, "linear")
    steps = run.training.steps or 10 * 70
    assert made.max_steps == steps
    assert made.get_warmup_steps(steps) == -(-steps * 5 // 100)  # 5 %, rounded up
    assert made.seed == 42
    assert made.logging_steps == 500
    assert made.eval_steps == made.save_steps == (70 if run.training.eval_every == "epoch" else 500)
    together = made.per_device_train_batch_size * made.gradient_accumulation_steps * 4
    assert together == run.training.batch_size
    assert (made.metric_for_best_model, made.greater_is_better) == ("loss", False)
    assert (made.fp16, made.bf16) == (True, False)


def test_precision_is_passed_on(tmp_path: Path) -> None:
    run = override(preset("tiny"), ["training.precision=bf16"])
    made = make_arguments(run, tmp_path, num_processes=1, steps_per_epoch=3)
    assert (made.bf16, made.fp16) == (True, False)


def test_epochs_become_steps() -> None:
    assert total_steps(preset("small"), steps_per_epoch=123) == 1230
    assert total_steps(preset("small-c5"), steps_per_epoch=123) == preset("small-c5").training.steps


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_with_every_method(name: str, method: str) -> None:
    """Without memory: the largest has billions of numbers."""
    run = preset(name, method)
    config = run.model_config(LLAMA3_VOCABULARY, LLAMA3_END)
    with torch.device("meta"):
        model = AirMoeForCausalLM(config)
    routers = {type(module).__name__ for module in model.modules() if hasattr(module, "observe")}
    assert (
        routers
        == {
            "air": {"AirRouter"},
            "exact": {"TopKRouter"},
            "peer": {"PeerRouter"},
            "hierarchical": {"HierarchicalRouter"},
            "expert_choice": {"ExpertChoiceRouter"},
            "coarse": {"TopKRouter"},
            "dense": set(),
        }[method]
    )
    assert run.preset == name


def test_tiny_runs_on_a_laptop() -> None:
    run = preset("tiny")
    assert (run.data.corpus, run.data.tokenizer) == ("python-docs", "bpe:2048")
    assert run.training.precision == "fp32" and run.training.sharding == "none"


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"preset: got 'huge', .*large-c5"):
        preset("huge")
    with pytest.raises(ConfigError, match=r"method: got 'topk', .*exact"):
        preset("tiny", "topk")
