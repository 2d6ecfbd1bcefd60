"""A model with swapped networks is an ordinary Hugging Face model: train, generate, save, load."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

import airmoe
from airmoe import ConfigError, FfnExperts, MoELayer, load_swapped_ffn, swap_ffn
from tests.moe.dense_models import DIM, NEURONS, air, dense, ids, layer_of, logits_of
from tests.state.common import checkpoint_activations

UNTRACKED = "ignore:AirRouter runs with gradients:UserWarning"
pytestmark = [pytest.mark.filterwarnings(UNTRACKED), pytest.mark.filterwarnings("ignore:codebook")]


def swapped(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Layers 0 and 2, by two calls and of two kinds, after three batches of training."""
    model = dense(dtype=dtype, **options)
    swap_ffn(model, layers=[0], router=air(12, shortlist_size=24))
    new = airmoe.AirRouter.Config.for_budget(dim=DIM, num_experts=64, top_k=8)
    swap_ffn(model, layers=[2], router=new, experts=FfnExperts(activation="geglu"))
    with torch.no_grad():
        for seed in range(3):
            model.train()(ids(seed, batch=8))
    return model.eval()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def test_generate_with_cache_is_generate_without() -> None:
    """A token's experts depend on that token only."""
    model = swapped()
    prompt = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    options = {"max_new_tokens": 8, "do_sample": False}
    with_cache, without = (
        model.generate(**prompt, **options, use_cache=cache) for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    ends = []
    for checkpointed in (False, True):
        model = swapped().train()
        if checkpointed:
            checkpoint_activations(model, use_reentrant)
        torch.manual_seed(5)
        for seed in (7, 8):
            model(ids(seed), labels=ids(seed), use_cache=False).loss.backward()
        grads = {
            f"{name}.grad": weight.grad
            for name, weight in model.named_parameters()
            if weight.requires_grad
        }
        assert None not in grads.values()
        ends.append(state_of(model) | grads)
    assert_same(ends[1], ends[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_of_the_trainer(dtype: torch.dtype, tmp_path: Path) -> None:
    model = swapped(dtype)
    before = state_of(model)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2,
        use_cpu=True, report_to=[], disable_tqdm=True, save_steps=3, logging_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids(1, batch=12)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    after = state_of(model)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    for part in ("0.mlp.experts.gate", "2.mlp.experts.down", "2.mlp.router.centroids"):
        assert f"model.layers.{part}" in moved, part
    codebook = "model.layers.0.mlp.router.codebook.updates"
    assert after[codebook] - before[codebook] == 3  # once per micro-batch
    # The Trainer's checkpoint is a saved model like any other.
    assert_same(state_of(load_swapped_ffn(tmp_path / "checkpoint-3")), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_the_saved_one(dtype: torch.dtype, tmp_path: Path) -> None:
    model = swapped(dtype)
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    loaded = load_swapped_ffn(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.dtype == dtype and not loaded.training
    assert_same(state_of(loaded), state_of(model))
    assert torch.equal(logits_of(loaded), expected)
    ends = []
    for one in (model, loaded):  # noise, counters and codebooks: training goes on the same
        torch.manual_seed(1)
        one.train()(ids(9), labels=ids(9)).loss.backward()
        grads = {name: w.grad for name, w in one.named_parameters() if w.grad is not None}
        ends.append(state_of(one) | {f"{name}.grad": grad for name, grad in grads.items()})
    assert_same(ends[1], ends[0])
    again = tmp_path / "again"
    loaded.eval().save_pretrained(again)
    assert_same(state_of(load_swapped_ffn(again)), state_of(loaded))


def test_nothing_is_left_unwritten(tmp_path: Path) -> None:
    swapped().save_pretrained(tmp_path)
    loaded = load_swapped_ffn(tmp_path, options={"dtype": torch.float64})
    assert loaded.dtype == torch.float64
    for name, buffer in loaded.named_buffers():
        if "lists." in name or "_built_at" in name:
            assert (buffer == 0).all(), name  # derived, not saved
    assert layer_of(loaded, 0).router.codebook.codewords.dtype == torch.float32


def test_state_names(tmp_path: Path) -> None:
    """Checkpoints depend on them."""
    model = swapped()
    names = {
        name.removeprefix("model.layers.0.mlp.")
        for name in model.state_dict()
        if "layers.0.mlp" in name
    }
    codebook = ("codewords", "counts", "initialized", "seed", "sums", "updates")
    assert names == {
        "experts.gate", "experts.up", "experts.down", "router.centroids", "router.noise_seed",
        "router.micro_batches", "post_norm.weight", "post_norm.bias",
        *(f"router.codebook.{part}" for part in codebook),
    }  # fmt: skip
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "airmoe_ffn_llama"
    note = saved["airmoe_ffn"]
    assert note["architecture"] == "LlamaForCausalLM" and set(note["layers"]) == {"0", "2"}
    assert note["layers"]["0"]["router"]["name"] == "air"
    assert note["layers"]["0"]["router"]["top_k"] == 12


def test_a_bare_decoder_comes_back(tmp_path: Path) -> None:
    """Its class need not have been used before: transformers registers classes by name."""
    model = dense().model
    swap_ffn(model, layers=[1], router=air())
    with torch.no_grad():
        expected = model(ids(), output_hidden_states=True)
    model.save_pretrained(tmp_path)
    dict.pop(_CAN_RECORD_REGISTRY, str(type(model)))
    loaded = load_swapped_ffn(tmp_path)
    with torch.no_grad():
        actual = loaded(ids(), output_hidden_states=True)
    assert len(actual.hidden_states) == 4
    for one, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(one, other)


STOCK = """
import sys, transformers
folder = sys.argv[1]
try:
    transformers.AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    assert "airmoe_ffn_llama" in str(error), error
else:
    raise AssertionError("the Auto class took it")
transformers.LlamaForCausalLM.from_pretrained(folder)
assert "airmoe" not in sys.modules
"""


def test_transformers_alone_refuses_or_warns(tmp_path: Path) -> None:
    swapped().save_pretrained(tmp_path)
    command = [sys.executable, "-c", STOCK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "You are using a model of type `airmoe_ffn_llama`" in done.stderr
    assert "MISSING" in done.stderr and "UNEXPECTED" in done.stderr


def test_loading_what_is_no_swapped_model(tmp_path: Path) -> None:
    dense().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="its config has no 'airmoe_ffn'"):
        load_swapped_ffn(tmp_path)
    swapped().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must be a model class of transformers"):
        load_swapped_ffn(tmp_path, model_class=nn.Linear)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.router.centroids"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.mlp\.router\.centroids"):
        load_swapped_ffn(tmp_path)


def test_copies_and_pickles() -> None:
    model = swapped()
    twin = copy.deepcopy(model)
    assert_same(state_of(twin), state_of(model))
    assert torch.equal(logits_of(twin), logits_of(model))
    assert model.config.model_type == "llama"  # in memory it is what it was
    config = pickle.loads(pickle.dumps(model.config))
    assert config.to_dict() == model.config.to_dict()
    assert config.to_dict()["model_type"] == "airmoe_ffn_llama"


def test_compiled() -> None:
    model = swapped()
    expected = logits_of(model)
    torch.testing.assert_close(logits_of(torch.compile(model, backend="eager")), expected)


def test_adapters_on_the_rest() -> None:
    peft = pytest.importorskip("peft")
    model = swapped()
    expected = logits_of(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    torch.testing.assert_close(logits_of(wrapped), expected)
    wrapped.train()(input_ids=ids(), labels=ids()).loss.backward()
    grads = [name for name, weight in wrapped.named_parameters() if weight.grad is not None]
    assert grads and all("lora_" in name for name in grads)


def test_the_project_s_own_dense_layers() -> None:
    """`swap_ffn` needs the shape of the network, not the family's name."""
    config = airmoe.AirMoeConfig(
        vocab_size=61, hidden_size=DIM, intermediate_size=NEURONS, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, moe_layers=[],
    )  # fmt: skip
    model = airmoe.AirMoeForCausalLM(config)
    expected = logits_of(model)
    swap_ffn(model, layers=[1], router=air())
    assert isinstance(layer_of(model, 1), MoELayer)
    assert logits_of(model).shape == expected.shape
