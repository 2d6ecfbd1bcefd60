"""Swapped checkpoints: nothing lost on the way, nothing made up, and a way back."""

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
    AutoModelForSequenceClassification,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
)

import airmoe
from tests.model.test_saving import transformers_log
from tests.moe.families import (
    BATCHES,
    BUILD,
    SIZES,
    build,
    calibrated,
    ids,
    logits_of,
    stock_routers,
    swapped_routers,
)


def assert_same_state(found: Any, expected: Any) -> None:
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def assert_untaught(model: Any) -> None:
    """Nothing of the codebooks is left unwritten: tests fill such memory with NaN."""
    assert swapped_routers(model)
    for router in swapped_routers(model):
        codebook = router.codebook
        assert not codebook.initialized and codebook.updates == 0
        torch.testing.assert_close(codebook.codewords.norm(dim=-1), torch.ones(4))
        assert (codebook.counts == 0).all() and (codebook.sums == 0).all()
        assert (codebook.scales == 1).all()
        assert 0 <= int(codebook.seed) < 2**62


@pytest.mark.parametrize("how", ["class", "auto"])
@pytest.mark.parametrize("family", BUILD)
def test_round_trip(family: str, how: str, tmp_path: Path) -> None:
    model = calibrated(family)
    model.save_pretrained(tmp_path)
    loader: Any = type(model) if how == "class" else AutoModelForCausalLM
    with transformers_log() as messages:
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
    # About sizes of made-up models transformers has opinions, which are not meant here.
    assert not [message for message in messages if "RoPE" not in message]
    assert not any(info.values()), info
    assert type(loaded) is type(model) and isinstance(loaded, type(build(family)))
    assert_same_state(loaded, model)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert all(
        torch.equal(ours.shortlists(), theirs.shortlists())
        for ours, theirs in zip(swapped_routers(loaded), swapped_routers(model), strict=True)
    )


@pytest.mark.parametrize("family", BUILD)
def test_restored_models_are_stock_again(family: str, tmp_path: Path) -> None:
    stock, model = build(family), calibrated(family)
    model.save_pretrained(tmp_path / "swapped")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "swapped")
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
        airmoe.swap_routers(one, num_codewords=4, shortlist_size=8)
        assert_untaught(one)
        one.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert type(again) is type(one)
        assert_same_state(again, one)


def test_the_config_says_what_was_swapped_and_others_keep_theirs(tmp_path: Path) -> None:
    stock = build("qwen3_moe")
    config = stock.config
    other = type(stock)(config)
    airmoe.swap_routers(stock, num_codewords=4, shortlist_size=8, layers=[1])
    assert other.config is config and config.model_type == "qwen3_moe"
    assert stock.config.model_type == "airmoe_qwen3_moe"
    assert stock.config.hidden_size == config.hidden_size
    assert {id(module.config) for module in stock.modules() if hasattr(module, "config")} == {
        id(stock.config)
    }
    stock.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["airmoe"] == {"num_codewords": 4, "shortlist_size": 8, "layers": [1]}
    assert written["architectures"] == ["AirQwen3MoeForCausalLM"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert swapped_routers(loaded) == [loaded.model.layers[1].mlp.gate]


@pytest.mark.parametrize("family", BUILD)
def test_stock_weights_in_a_swapped_model_start_the_codebook_anew(
    family: str, tmp_path: Path
) -> None:
    stock, model = build(family), calibrated(family)
    with torch.no_grad():
        for weight in stock.parameters():
            weight.mul_(1.5)
    stock.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    with transformers_log() as messages:
        loaded = type(model).from_pretrained(tmp_path, config=config)
    assert any("codebook" in message for message in messages)
    assert_untaught(loaded)
    with pytest.warns(UserWarning, match=r"airmoe\.calibrate"):
        assert torch.equal(logits_of(loaded), logits_of(stock))
    model.load_state_dict(stock.state_dict())  # strict, as torch has it
    assert_untaught(model)
    with pytest.warns(UserWarning, match=r"airmoe\.calibrate"):
        assert torch.equal(logits_of(model), logits_of(stock))


def test_a_torn_codebook_starts_anew(tmp_path: Path) -> None:
    """`initialized` without its codewords must not pass for a codebook."""
    model = calibrated("mixtral")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in state.items() if not name.endswith("codewords")}
    assert len(kept) == len(state) - 2
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_untaught(AutoModelForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("family", BUILD)
def test_a_model_built_without_memory(family: str) -> None:
    config = calibrated(family).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu").init_weights()
    assert_untaught(model)
    assert_untaught(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_bfloat16_keeps_exact_codebooks(family: str, tmp_path: Path) -> None:
    model = calibrated(family)
    model.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    for ours, theirs in zip(swapped_routers(loaded), swapped_routers(model), strict=True):
        assert_same_state(ours.codebook, theirs.codebook)
    assert logits_of(loaded).dtype == torch.bfloat16
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(again, loaded)
    assert torch.equal(logits_of(again), logits_of(loaded))


STOCK_PROBE = """
import sys
from transformers import AutoModelForCausalLM, MixtralForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
model = MixtralForCausalLM.from_pretrained(sys.argv[1])
assert "airmoe" not in sys.modules and type(model.model.layers[0].mlp.gate).__module__.startswith(
    "transformers."
)
"""
OUR_PROBE = """
import sys
import airmoe.moe.swap.models
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model).__name__, bool(model.model.layers[0].mlp.gate.codebook.initialized))
"""


def test_who_can_open_a_swapped_checkpoint(tmp_path: Path) -> None:
    """Auto classes refuse a type they do not know; the stock class says what it leaves out."""
    calibrated("mixtral").save_pretrained(tmp_path)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    stock, ours = (
        subprocess.Popen(
            [sys.executable, "-c", probe, str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for probe in (STOCK_PROBE, OUR_PROBE)
    )
    output, messages = stock.communicate()
    assert stock.returncode == 0, messages
    assert "`airmoe_mixtral`" in output and "does not recognize" in output
    assert "airmoe_mixtral" in messages and "codebook" in messages
    output, messages = ours.communicate()
    assert output.split() == ["AirMixtralForCausalLM", "True"], messages


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
    head: Any = airmoe.swap_routers(
        MixtralForSequenceClassification(config), num_codewords=4, shortlist_size=4, layers=[1]
    )
    airmoe.calibrate(head, BATCHES, passes=2)
    head.save_pretrained(tmp_path / "head")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")
    assert type(loaded) is type(head)
    assert_same_state(loaded, head)
    airmoe.restore_routers(loaded)
    assert type(loaded) is MixtralForSequenceClassification
    assert type(loaded.model) is type(build("mixtral").model)


def test_copies_and_pickles() -> None:
    model = calibrated("mixtral")
    expected = logits_of(model)
    again = pickle.loads(pickle.dumps(model))
    for one in (copy.deepcopy(model), again):
        assert torch.equal(logits_of(one), expected)
        airmoe.restore_routers(one)
        assert type(one) is MixtralForCausalLM
    assert torch.equal(logits_of(model), expected)


def test_settings_changed_meanwhile_survive_the_restoration() -> None:
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
