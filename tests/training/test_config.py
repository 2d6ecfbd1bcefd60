"""A run's settings: strict, nested overrides, and JSON both ways without loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from airmoe.errors import ConfigError
from airmoe.model import METHODS, AirMoeConfig
from airmoe.training import (
    MODEL_OPTIONS,
    PRESETS,
    DataOptions,
    RunConfig,
    TrainingOptions,
    model_options,
    override,
    preset,
)
from tests.training.runs import assignments, small_model, small_run


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_settings_survive_json(name: str, method: str) -> None:
    run = preset(name, method)
    again = RunConfig.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert again.to_json() == run.to_json()


def test_overrides_can_make_any_run_out_of_any_other(tmp_path: Path) -> None:
    wanted = small_run(tmp_path, small_model(router="peer", router_options={"num_heads": 2}))
    made = override(preset("medium-c5", "hierarchical"), assignments(wanted))
    assert dataclasses.replace(made, preset="tiny") == wanted


def test_an_override_changes_one_thing_and_not_the_original() -> None:
    start = preset("tiny")
    before = start.to_json()
    changed = override(start, ["training.learning_rate=0.5"])
    assert start.to_json() == before
    assert changed.training.learning_rate == 0.5
    assert dataclasses.replace(changed, training=start.training) == start


def test_values_are_json_or_plain_text() -> None:
    start = preset("tiny")
    made = override(
        start,
        [
            "training.steps=5",
            "training.steps=7",  # the last one counts
            "training.epochs=null",
            "training.learning_rate=1e-2",
            "training.track=none",
            "training.precision=bf16",
            'training.eval_every="epoch"',
            "data.corpus=some/where=odd.txt",
            'data.folder="7"',
            "model.moe_layers=[0, 2]",
            'model.router_options={"num_codewords": 16, "shortlist_size": 64}',
        ],
    )
    assert (made.training.steps, made.training.epochs) == (7, None)
    assert (made.training.learning_rate, made.training.track) == (0.01, "none")
    assert (made.training.precision, made.training.eval_every) == ("bf16", "epoch")
    assert (made.data.corpus, made.data.folder) == ("some/where=odd.txt", "7")
    assert made.model["moe_layers"] == [0, 2]
    assert made.model["router_options"] == {"num_codewords": 16, "shortlist_size": 64}


def test_router_options_are_reached_one_by_one() -> None:
    start = preset("tiny")
    made = override(
        start, ["model.router_options.jitter_std=0", "model.router_options.refresh_every=2"]
    )
    assert made.model["router_options"] == {
        **start.model["router_options"],
        "jitter_std": 0,
        "refresh_every": 2,
    }
    assert made.model_config(100, 1).router_config().jitter_std == 0


def test_another_router_starts_without_the_options_of_the_old_one() -> None:
    made = override(preset("tiny"), ["model.router=peer", "model.router_options.num_heads=2"])
    assert made.model["router_options"] == {"num_heads": 2}
    with pytest.raises(ConfigError, match="num_heads"):  # in the other order they are lost and said
        override(preset("tiny"), ["model.router_options.num_heads=2"])
    # Setting the router it has already also clears them: the rule does not look at the value.
    assert override(preset("tiny"), ["model.router=air"]).model["router_options"] == {}


@pytest.mark.parametrize(
    ("assignment", "field", "part"),
    [
        ("training.steps", "overrides", "key.path=value"),
        ("", "overrides", "key.path=value"),
        ("=5", "", "model, data, training"),
        ("steps=5", "steps", "model, data, training"),
        ("training=5", "training", "then a dot and an option"),
        ("preset=tiny", "preset", "model, data, training"),
        ("Training.steps=5", "Training.steps", "Did you mean 'training'?"),
        ("training.steps.more=5", "training.steps.more", "too deep"),
        ("model.router_options.a.b=5", "model.router_options.a.b", "too deep"),
        ("training.stepz=5", "training.stepz", "Did you mean 'steps'?"),
        ("model.top_k=5", "model.top_k", "num_experts_per_tok"),
        ("model.torch_dtype=bfloat16", "model.torch_dtype", "is not an option"),
        ("data.blocks=5", "data.blocks", "block_size"),
        ("model.router_options.dim=5", "model.router_options.dim", ""),
        ("model.router_options.shortlists=5", "model.router_options.shortlists", "shortlist_size"),
        ("training.steps=many", "training.steps", "whole number"),
        ("training.steps=5.0", "training.steps", "whole number"),
        ("training.epochs=5", "training.steps", "epochs = 5"),
        ("training.precision=fp8", "training.precision", "'bf16'"),
        ("training.micro_batch_size=3", "training.micro_batch_size", "must divide batch_size = 4"),
        ("training.seed=4294967296", "training.seed", "4294967296"),
        ("training.gradient_checkpointing=1", "training.gradient_checkpointing", "True or False"),
        ("training.keep_checkpoints=1", "training.keep_checkpoints", ">= 2"),
        ("training.warmup=1", "training.warmup", "< 1.0"),
        ("training.learning_rate=NaN", "training.learning_rate", "finite"),
        ("data.block_size=1", "data.block_size", ">= 2"),
        ("data.corpus=", "data.corpus", "non-empty"),
        ('data.folder="a\\u0000b"', "data.folder", "zero bytes"),
        ("model.num_experts_per_tok=0", "model.num_experts_per_tok", ">= 1"),
        ("model.rms_norm_eps=NaN", "model.rms_norm_eps", "finite"),
        ("model.num_key_value_heads=0", "model.num_key_value_heads", ">= 1"),
        ("model.intermediate_size=-1", "model.intermediate_size", ">= 1"),
        ("model.moe_post_norm_gain=true", "model.moe_post_norm_gain", ""),
        ("model.hidden_size=100.5", "model.hidden_size", "100.5"),
        ("model.num_attention_heads=3", "model.hidden_size", "num_attention_heads = 3"),
        ("model.vocab_size=many", "model.vocab_size", "'many'"),
        ("model.max_position_embeddings=64", "data.block_size", "64"),
    ],
)
def test_wrong_overrides_say_what_is_wrong(assignment: str, field: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(preset("tiny"), [assignment])
    assert error.value.field == field
    assert part in str(error.value)


def test_unknown_keys_list_the_valid_ones() -> None:
    with pytest.raises(ConfigError) as error:
        override(preset("tiny"), ["model.width=5"])
    assert error.value.remedy == f"Valid options: {', '.join(MODEL_OPTIONS)}."
    with pytest.raises(ConfigError) as error:
        TrainingOptions(batch_size=1, micro_batch_size=1, steps=1, stepz=1)  # pyright: ignore
    assert "stepz" in str(error.value) and "learning_rate" in str(error.value)


def test_the_vocabulary_follows_the_tokenizer(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    assert run.model_config(300, 299).vocab_size == 300
    assert run.model_config(300, 299).eos_token_id == 299
    larger = dataclasses.replace(run, model={**run.model, "vocab_size": 512})
    assert larger.model_config(300, 299).vocab_size == 512
    exact = dataclasses.replace(run, model={**run.model, "vocab_size": 300})
    assert exact.model_config(300, 299).vocab_size == 300
    with pytest.raises(ConfigError, match=r"model\.vocab_size.*>= 301"):
        exact.model_config(301, 300)


def test_model_options_rebuild_the_model() -> None:
    config = AirMoeConfig(
        vocab_size=11, hidden_size=24, num_hidden_layers=4, moe_layers=[1, 3], initializer_range=0.5
    )
    run = RunConfig(
        preset="x",
        model=model_options(config),
        data=DataOptions(corpus="c", tokenizer="bytes", block_size=8),
        training=TrainingOptions(batch_size=1, micro_batch_size=1, steps=1),
    )
    again = run.model_config(11, 10)
    for name in MODEL_OPTIONS:
        assert getattr(again, name) == getattr(config, name), name


def test_the_middle_layer_stays_the_middle_when_the_depth_changes() -> None:
    made = override(preset("tiny"), ["model.num_hidden_layers=8"])
    assert made.model_config(10, 1).moe_layers == [4]


def test_micro_batches_and_processes_share_a_batch() -> None:
    options = TrainingOptions(batch_size=32, micro_batch_size=4, steps=1)
    assert [options.accumulation_steps(count) for count in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ConfigError, match=r"training\.batch_size: got 32, .*4 x 3.*use 1, 2, 4, 8"):
        options.accumulation_steps(3)
