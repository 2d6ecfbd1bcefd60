"""Swapped models on disk: nothing lost on the way, nothing made up, and a way back."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MixtralForCausalLM,
    MixtralForQuestionAnswering,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    PreTrainedConfig,
)
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

import airmoe
from airmoe.adapt import models
from tests.adapt.models import (
    BATCHES,
    BUILD,
    SIZES,
    SWAPPED,
    air,
    both,
    build,
    calibrated,
    dense,
    granular,
    ids,
    logits_of,
    reloaded,
    run,
    stock_routers,
    swap,
    swapped_routers,
)
from tests.model.test_saving import transformers_log
from tests.state.common import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:AirRouter is trained without", "ignore:codebook")


PADDED: dict[str, Any] = {"attention_mask": (torch.arange(36) > 3).long().view(3, 12)}


def assert_same_state(found: Any, expected: Any) -> None:
    assert_same(found.state_dict(), expected.state_dict())


def assert_uncalibrated(model: Any) -> None:
    """Nothing of the codebooks is left unwritten: tests fill such memory with NaN."""
    assert swapped_routers(model)
    for router in swapped_routers(model):
        codebook = router.codebook
        assert not codebook.initialized and codebook.updates == 0
        torch.testing.assert_close(codebook.codewords.norm(dim=-1), torch.ones(4))
        assert (codebook.counts == 0).all() and (codebook.sums == 0).all()
        assert (codebook.scales == 1).all()
        assert 0 <= int(codebook.seed) < 2**62


@pytest.mark.parametrize("kind", SWAPPED)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    model = SWAPPED[kind]()
    model.save_pretrained(tmp_path)
    loaded: Any = None
    loaders: list[Any] = [type(model), AutoModelForCausalLM]
    for loader in loaders:
        with transformers_log() as messages:
            loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        # transformers warns about the positions of models this small.
        assert not [message for message in messages if "RoPE" not in message]
        assert not any(info.values()), info
        assert type(loaded) is type(model) and not loaded.training
        assert_same_state(loaded, model)
        assert torch.equal(logits_of(loaded), logits_of(model))
        # Tests fill unwritten memory with NaN.
        assert all(t.isfinite().all() for t in loaded.buffers() if t.is_floating_point())
    found, wanted = ([r.shortlists() for r in swapped_routers(m)] for m in (loaded, model))
    assert_same(found, wanted)
    # Noise, counters, codebooks and what is known of padding: training goes on.
    assert_same(run(loaded, **PADDED), run(model, **PADDED))
    assert_same_state(reloaded(loaded.eval(), tmp_path / "again"), loaded)


@pytest.mark.parametrize("family", BUILD)
def test_restored_models_are_stock_again(family: str, tmp_path: Path) -> None:
    stock, model = build(family), calibrated(family)
    loaded = reloaded(model, tmp_path / "swapped")
    for one in (model, loaded):
        assert airmoe.restore_routers(one) is one
        assert type(one) is type(stock) and type(one.model) is type(stock.model)
        assert type(one.config) is type(stock.config) and one.model.config is one.config
        assert not hasattr(one.config, "airmoe")
        assert_same_state(one, stock)
        assert torch.equal(logits_of(one), logits_of(stock))
        assert vars(stock_routers(one)[0]).keys() == vars(stock_routers(stock)[0]).keys()
    loaded.save_pretrained(tmp_path / "stock")
    plain = type(stock).from_pretrained(tmp_path / "stock")
    assert_same_state(plain, stock)
    for one in (loaded, plain):
        swap(one)
        assert_uncalibrated(one)
        again = reloaded(one, tmp_path / "again")
        assert type(again) is type(one)
        assert_same_state(again, one)


def test_the_config_says_which_routers_were_swapped(tmp_path: Path) -> None:
    model = swap(build("qwen3_moe"), layers=[1])
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["airmoe"] == {"num_codewords": 4, "shortlist_size": 8, "layers": [1]}
    assert written["architectures"] == ["AirQwen3MoeForCausalLM"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert swapped_routers(loaded) == [loaded.model.layers[1].mlp.gate]


@pytest.mark.parametrize("stock", [lambda: build("qwen3_moe"), dense])
def test_models_that_shared_the_config_keep_theirs(stock: Any, tmp_path: Path) -> None:
    model = stock()
    other, before = type(model)(model.config).eval(), model.config.to_dict()
    if "Moe" in type(model).__name__:
        swap(model)
    else:
        airmoe.swap_ffn(model, layers=[1], router=air())
    assert other.config.to_dict() == before
    # One config for all parts of the model: options set later must reach them.
    configs = [getattr(part, "config", None) for part in model.modules()]
    found = {id(one) for one in configs if isinstance(one, PreTrainedConfig)}
    assert found == {id(model.config)} != {id(other.config)}
    assert model.config.model_type == f"airmoe_{other.config.model_type}"
    loaded = reloaded(other, tmp_path)
    assert type(loaded) is type(other) and torch.equal(logits_of(loaded), logits_of(other))


@pytest.mark.parametrize("family", BUILD)
def test_stock_weights_in_a_swapped_model_reset_the_codebook(family: str, tmp_path: Path) -> None:
    stock, model = build(family), calibrated(family)
    with torch.no_grad():
        for weight in stock.parameters():
            weight.mul_(1.5)
    stock.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    with transformers_log() as messages:
        loaded = type(model).from_pretrained(tmp_path, config=config)
    assert any("codebook" in message for message in messages)
    assert_uncalibrated(loaded)
    with pytest.warns(UserWarning, match=r"airmoe\.calibrate"):
        assert torch.equal(logits_of(loaded), logits_of(stock))
    model.load_state_dict(stock.state_dict())  # strict, as torch has it
    assert_uncalibrated(model)
    with pytest.warns(UserWarning, match=r"airmoe\.calibrate"):
        assert torch.equal(logits_of(model), logits_of(stock))


def test_an_incomplete_codebook_is_reset(tmp_path: Path) -> None:
    """`initialized` without its codewords must not pass for a codebook."""
    model = calibrated("mixtral")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in state.items() if not name.endswith("codewords")}
    assert len(kept) == len(state) - 2
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_uncalibrated(AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("family", BUILD)
def test_a_model_built_without_memory(family: str) -> None:
    config = calibrated(family).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu").init_weights()
    assert_uncalibrated(model)
    assert_uncalibrated(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "llama"])
def test_bfloat16_keeps_exact_codebooks(kind: str, tmp_path: Path) -> None:
    model = SWAPPED[kind]()
    loaded = reloaded(model, tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    state = loaded.state_dict()
    for name, value in model.state_dict().items():
        exact = ".codebook." in name
        assert torch.equal(state[name], value if exact else value.to(state[name].dtype)), name
    assert logits_of(loaded).dtype == torch.bfloat16
    again = reloaded(loaded, tmp_path)
    assert_same_state(again, loaded)
    assert torch.equal(logits_of(again), logits_of(loaded))


STOCK_PROBE = """
import sys
import transformers
for folder, stock in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        print(error)
    getattr(transformers, stock).from_pretrained(folder)
assert "airmoe" not in sys.modules
"""


@pytest.mark.slow
def test_without_airmoe_auto_classes_refuse_a_swapped_checkpoint(tmp_path: Path) -> None:
    """They do not know its type; the stock class says what it leaves out."""
    arguments = []
    for kind, stock in (("mixtral", "MixtralForCausalLM"), ("llama", "LlamaForCausalLM")):
        SWAPPED[kind]().save_pretrained(tmp_path / kind)
        arguments += [str(tmp_path / kind), stock]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", STOCK_PROBE, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("does not recognize") == 2
    for kind, unused in (("mixtral", "codebook"), ("llama", "MISSING")):
        assert f"`airmoe_{kind}`" in done.stdout
        assert f"airmoe_{kind}" in done.stderr and unused in done.stderr


def test_body_and_other_heads(tmp_path: Path) -> None:
    model = calibrated("mixtral")
    model.save_pretrained(tmp_path / "whole")
    body: Any = AutoModel.from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        expected = model.model(ids(1)).last_hidden_state
        assert torch.equal(body(ids(1)).last_hidden_state, expected)
    recorded = body(ids(1), output_router_logits=True).router_logits
    assert len(recorded) == 2 and not recorded[0].isfinite().all()
    config = type(build("mixtral").config)(**{**SIZES, "pad_token_id": 0})
    for auto, stock in (
        (AutoModelForSequenceClassification, MixtralForSequenceClassification),
        (AutoModelForTokenClassification, MixtralForTokenClassification),
        (AutoModelForQuestionAnswering, MixtralForQuestionAnswering),
    ):
        head = swap(stock(copy.deepcopy(config)), shortlist_size=4, layers=[1])
        airmoe.calibrate(head, BATCHES, passes=2)
        head.save_pretrained(tmp_path / "head")
        loaded = auto.from_pretrained(tmp_path / "head")
        assert type(loaded) is type(head)
        assert_same_state(loaded, head)
        airmoe.restore_routers(loaded)
        assert type(loaded) is stock
        assert type(loaded.base_model) is type(build("mixtral").model)


@pytest.mark.parametrize("kind", ["mixtral", "llama", "both"])
def test_copies_and_pickles(kind: str) -> None:
    model = SWAPPED[kind]()
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_state(one, model)
        assert torch.equal(logits_of(one), logits_of(model))
        config = pickle.loads(pickle.dumps(one.config))
        assert config.to_dict() == model.config.to_dict()
        if kind == "llama":  # layers must be told of padding by their own decoder
            assert_same(run(one, **PADDED), run(granular(), **PADDED))
        else:
            airmoe.restore_routers(one)
    if kind == "mixtral":
        assert type(one) is MixtralForCausalLM


def test_settings_changed_after_the_swap_survive_its_undoing() -> None:
    model = calibrated("mixtral")
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    airmoe.restore_routers(model)
    assert model.config.use_cache is False and model.config._attn_implementation == "eager"
    assert isinstance(AutoConfig.for_model("airmoe_mixtral").airmoe, type(None))


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        ({"shortlist_size": 1}, "must be >= 2"),
        ({"layers": [5]}, "got 5"),
        ({"probes": 2}, "is not an option"),
    ],
)
def test_an_edited_config_is_checked(edit: dict[str, Any], match: str) -> None:
    config = calibrated("mixtral").config
    config.airmoe = {**config.airmoe, **edit}
    with pytest.raises(airmoe.ConfigError, match=match):
        AutoModelForCausalLM.from_config(config)


def test_loading_another_codebook_changes_the_lists() -> None:
    model, other = calibrated("mixtral"), calibrated("mixtral")
    router = swapped_routers(model)[0]
    with torch.no_grad():
        before: Tensor = router.shortlists()
        state = other.state_dict()
        state["model.layers.0.mlp.gate.codebook.codewords"].neg_()
        model.load_state_dict(state)
        assert not torch.equal(router.shortlists(), before)


# -- new experts, alone and beside swapped routers ------------------------------------------------


def test_names_in_checkpoints(tmp_path: Path) -> None:
    model = granular()
    prefix = "model.layers.0.mlp."
    names = {name.removeprefix(prefix) for name in model.state_dict() if name.startswith(prefix)}
    parts = ("experts.gate", "experts.up", "experts.down", "post_norm.weight", "post_norm.bias")
    assert names >= {*parts, "router.centroids", "router.codebook.codewords"}
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "airmoe_llama" and "airmoe" not in saved
    assert set(saved["airmoe_ffn"]) == {"0", "2"}
    layer = saved["airmoe_ffn"]["2"]
    assert (layer["router"]["name"], layer["router"]["top_k"]) == ("air", 8)
    assert layer["experts"] == {"expert_size": 2, "activation": "geglu"}


@pytest.mark.parametrize(
    ("order", "routers"),
    [
        ("ffn+routers", True),
        ("routers+ffn", True),
        ("ffn+routers+back", False),
        ("routers+ffn+back", False),
        ("routers+ffn+back+routers", True),
        ("routers+back+ffn", False),
    ],
)
def test_both_swaps_in_any_order(order: str, routers: bool, tmp_path: Path) -> None:
    model = both(order)
    assert type(model).__name__ == "AirDeepseekV3ForCausalLM"
    assert model.config.model_type == "airmoe_deepseek_v3"
    assert bool(swapped_routers(model)) == routers == (model.config.airmoe is not None)
    loaded = reloaded(model, tmp_path)
    assert type(loaded) is type(model)
    assert_same_state(loaded, model)
    assert torch.equal(logits_of(loaded), logits_of(model))
    if not routers:
        with pytest.raises(airmoe.ConfigError, match="must have swapped routers"):
            airmoe.restore_routers(loaded)


def test_a_bare_body_comes_back(tmp_path: Path) -> None:
    """Its class need not have been used before: transformers registers classes by name."""
    model = dense().model
    airmoe.swap_ffn(model, layers=[1], router=air())
    with torch.no_grad():
        expected = model(ids(), output_hidden_states=True)
    model.save_pretrained(tmp_path)
    dict.pop(_CAN_RECORD_REGISTRY, str(type(dense().model)), None)
    loaded = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        actual = loaded(ids(), output_hidden_states=True)
    assert len(actual.hidden_states) == 4
    assert_same(actual.hidden_states, expected.hidden_states)


@pytest.mark.parametrize("family", ["Gemma2", "Qwen2"])
def test_shards_tied_embeddings_and_options(family: str, tmp_path: Path) -> None:
    model = dense(family, tie_word_embeddings=True)
    airmoe.swap_ffn(model, layers=[1], router=air())
    airmoe.calibrate(model, [ids(seed, batch=8) for seed in range(8)])
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for options in ({}, {"device_map": "auto"}, {"dtype": "auto", "use_safetensors": True}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
        assert torch.equal(logits_of(loaded), logits_of(model))


def test_types_are_known_before_any_swap() -> None:
    """No test swaps these."""
    models.register("granite")
    for name in ("granite", "gemma4_text"):
        assert AutoConfig.for_model(f"airmoe_{name}").airmoe_ffn is None


def test_a_router_that_is_not_known() -> None:
    config = granular().config
    assert isinstance(AutoModelForCausalLM.from_config(config).model.layers[2].mlp, airmoe.MoELayer)
    config.airmoe_ffn["0"]["router"]["name"] = "mine"
    with pytest.raises(airmoe.ConfigError, match=r"airmoe_ffn\.router\.name: got 'mine', must be"):
        AutoModelForCausalLM.from_config(config)
