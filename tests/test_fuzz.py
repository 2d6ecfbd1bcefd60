"""Random settings, overrides and damaged files: refused in one line, or taken exactly as given."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from airmoe import ConfigError
from airmoe.data import PrepareConfig, open_prepared, prepare
from airmoe.experiments.report import write_report
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.plan import make_plan
from airmoe.files import write_json
from airmoe.model import METHODS
from airmoe.training import method_run
from airmoe.training.checkpoints import check_checkpoint
from airmoe.training.config import SECTIONS
from airmoe.training.run_folder import data_sha256, open_run, read_result, read_test
from airmoe.training.trained import load_trained
from tests.data.common import save_own
from tests.test_config_errors import CONFIGS, GOOD
from tests.training.runs import small_run, train_here

ROUTER_CONFIGS = 200
OVERRIDES = 280
SUITE = make_plan("main", "tiny")
DAMAGES = 100  # of every file
LONGEST = 2_000  # characters of a message
TINY = method_run("tiny", "air").to_json()
# By the type of what stands there: values that may well be right.
PLAUSIBLE: dict[type, tuple[Any, ...]] = {
    int: (1, 2, 3, 4, 6, 8, 9, 12, 16, 36, 64),
    float: (0.0, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0, 2.0),
    bool: (True, False),
    str: ("euclidean", "static", "xavier", "unit", "expert_choice", "bf16", "swiglu", "gelu"),
}


HUGE = 10**5_000  # Python itself reads and writes no integer of more than 4,300 digits
# Each has broken a real reader somewhere: what JSON allows is far more than what a reader expects.
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    3,
    2**63,
    -(2**63),
    HUGE,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "7",
    "nan",
    "../../etc",
    "\0",
    "\ud800",
    "\x1b[31mred",
    [],
    [0],
    {},
    {"a": 1},
)


def assert_explained(error: ConfigError, what: object, fields: Sequence[str] = ()) -> None:
    """One line of readable length that names the field (one of these, where given) and the rule."""
    assert not fields or error.field.rpartition(".")[2] in fields, error
    message = str(error)
    assert error.field and error.rule and "\n" not in message, (what, message)
    assert len(message) < LONGEST, (what, message[:200])


def is_same(given: object, kept: object) -> bool:
    """Equal in value and type: True is not 1, and 4.0 is not 4."""
    if isinstance(given, float) and math.isnan(given):
        return isinstance(kept, float) and math.isnan(kept)
    return type(given) is type(kept) and given == kept


@pytest.mark.parametrize("name", GOOD)
def test_random_router_configs(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(CONFIGS[name])]
    taken = 0
    for seed in range(ROUTER_CONFIGS // len(GOOD)):
        chance = random.Random(f"{name} {seed}")
        changed = {
            field: _random_value(chance, getattr(CONFIGS[name](**GOOD[name]), field))
            for field in chance.sample(fields, chance.choice((1, 2, 3)))
        }
        options = {**GOOD[name], **changed}
        try:
            router = CONFIGS[name](**options).build()
        except ConfigError as error:
            assert_explained(error, options.keys(), fields)
            continue
        taken += 1
        for field, value in options.items():
            assert is_same(value, getattr(router.config, field)), field
        _check_routing(router)
    assert taken > 3, "too few of them reach the router"


def _random_value(chance: random.Random, before: object) -> Any:
    """One of the same type as before, or, every third time, anything."""
    if chance.random() < 0.35:
        return chance.choice(HOSTILE)
    return chance.choice(PLAUSIBLE.get(type(before), HOSTILE))


def _check_routing(router: Any) -> None:
    """It routes as its settings say, and the same way twice."""
    config, hidden = router.config, torch.randn(24, router.config.dim)
    for mode in (router.train(), router.eval()):
        mode.observe(hidden)
        routing = mode(hidden)
        again = mode(hidden).to_token_routing()
        chosen = routing.to_token_routing()
        assert torch.equal(chosen.expert_ids, again.expert_ids)
        assert torch.equal(chosen.weights, again.weights)
        assert torch.isfinite(chosen.weights).all()
        assert int(chosen.expert_ids.min()) >= 0 and int(chosen.expert_ids.max()) < (
            config.num_experts
        )
        if getattr(config, "gate", "token_choice") == "token_choice" and hasattr(router, "gate"):
            assert chosen.expert_ids.shape[1] == config.top_k


@pytest.mark.parametrize("method", METHODS)
def test_random_overrides(method: str) -> None:
    taken = 0
    for seed in range(-(-OVERRIDES // len(METHODS))):
        chance = random.Random(f"{method} {seed}")
        assignment, path, value = _random_assignment(chance)
        try:
            config = method_run("tiny", method, [assignment])
        except ConfigError as error:
            assert_explained(error, path)
            continue
        taken += 1
        # Other methods are made from the run with AIR: what they have no use for is left out.
        if method == "air" and len(path) == 2:
            assert is_same(value, config.to_json()[path[0]][path[1]]), assignment[:200]
    assert taken > 5, "too few of them are settings"


def _random_assignment(chance: random.Random) -> tuple[str, list[str], Any]:
    section = chance.choice(list(SECTIONS))
    path = [section, chance.choice(SECTIONS[section])]
    if path[1] == "router_options" or chance.random() < 0.2:
        options = [field.name for field in dataclasses.fields(CONFIGS["air"])]
        path = ["model", "router_options", chance.choice(options)]
    before: Any = TINY
    for name in path:
        before = (before or {}).get(name)
    value = _random_value(chance, before)
    if chance.random() < 0.05:
        path[-1] += "x"
    return f"{'.'.join(path)}={dump(value)}", path, value


def dump(value: Any) -> str:
    """JSON with integers of any length."""
    mark = "<huge>"

    def marked(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: marked(inner) for key, inner in one.items()}
        if isinstance(one, list):
            return [marked(inner) for inner in one]
        return mark if isinstance(one, int) and one == HUGE else one

    return json.dumps(marked(value)).replace(json.dumps(mark), "1" + "0" * 5_000)


# -- damaged files: one whole run, its data and a suite's plan --------------------------------


def damaged(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A JSON file cut, with a bit flipped, nested too deeply, or with a field changed."""
    place = chance.randrange(len(content))
    kind = chance.choice(("cut", "flip", "nest", "change", "change", "change", "remove", "add"))
    if kind == "cut":
        return f"cut at {place}", content[:place]
    if kind == "flip":
        flipped = bytes([content[place] ^ (1 << chance.randrange(8))])
        return f"bit of byte {place}", content[:place] + flipped + content[place + 1 :]
    if kind == "nest":
        before, colon, after = content.rpartition(b":")
        return "deep", before + colon + b"[" * 5_000 + b"]" * 5_000 + b"," + after
    values = copy.deepcopy(json.loads(content))
    holder, key = chance.choice(list(_places(values)))
    new = chance.choice(HOSTILE)
    if kind == "change":
        holder[key] = new
    elif kind == "remove":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, new)
    else:
        holder[f"{key}_"] = new
    shown = "huge" if isinstance(new, int) and new == HUGE else repr(new)
    return f"{kind} {key}: {shown}", dump(values).encode("utf-8", "surrogatepass")


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every (object or list, key) in a document."""
    for key in list(values) if isinstance(values, dict) else range(len(values)):
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    train_here(small_run(folder, documents=24, steps=4, eval_every=2), folder / "mine")
    own = save_own(folder, "<s> $A")
    write_json(own / "special_tokens_map.json", {"bos_token": "<s>", "eos_token": "</s>"})
    for name, tokenizer in (("words", "bpe:300"), ("owned", str(own))):
        corpus, out = str(folder / "text.txt"), str(folder / name)
        prepare(PrepareConfig(corpus=corpus, tokenizer=tokenizer, out=out, validation_fraction=0.1))
    numbers = {"step": 4, "tokens": 640, "loss": 5.5, "perplexity": 244.7}
    write_json(folder / "mine" / "test.json", numbers)
    SuiteFolder(folder / "suite").write(SUITE)
    write_report([folder / "mine"], folder / "report", folder / "records")
    return folder


def read_data(folder: Path, name: str) -> object:
    """All that training takes from prepared text."""
    prepared = open_prepared(folder / name)
    blocks = {
        split: [block["input_ids"].tolist() for block in prepared.blocks(split, 32)]
        for split in ("train", "validation")
    }
    return data_sha256(prepared), blocks, prepared.tokenizer().identity


def read_model(folder: Path) -> object:
    """What a loaded model answers, and when its text ends."""
    trained = load_trained(folder / "mine", "best")
    with torch.no_grad():
        logits = trained.model(torch.arange(24).view(2, 12)).logits
    run = trained.run.config
    return run.model, run.data, run.training, trained.model.config.eos_token_id, logits.tolist()


def read_to_resume(folder: Path) -> object:
    run = open_run(folder / "mine")
    return check_checkpoint(run.path / "checkpoint-4", run.sha256(), to_resume=True)


def read_reported(path: Path) -> object:
    """What differs in a valid record is another record: only errors count, in words."""
    for problem in read_all([path]).problems:
        raise ConfigError("record", str(path), problem, "")
    return None


# Another number in a result is another measurement: only errors count.
READERS: dict[str, Callable[[Path], object]] = {
    "tokens/manifest.json": lambda made: read_data(made, "tokens"),
    "tokens/tokenizer/airmoe_tokenizer.json": lambda made: read_data(made, "tokens"),
    "words/tokenizer/tokenizer.json": lambda made: read_data(made, "words"),
    "words/tokenizer/tokenizer_config.json": lambda made: read_data(made, "words"),
    "owned/tokenizer/special_tokens_map.json": lambda made: read_data(made, "owned"),
    "mine/run.json": read_model,
    "mine/checkpoint-4/config.json": read_model,
    "mine/checkpoint-4/generation_config.json": read_model,
    "mine/checkpoint-4/training.json": read_model,
    "mine/checkpoint-4/manifest.json": read_to_resume,
    "mine/result.json": lambda made: bool(read_result(made / "mine" / "result.json")),
    "mine/test.json": lambda made: bool(read_test(made / "mine" / "test.json")),
    "suite/suite.json": lambda made: SuiteFolder(made / "suite").check(SUITE),
    "report/report.json": lambda made: read_reported(made / "report" / "report.json"),
    "records/single/mine.json": lambda made: read_reported(made / "records"),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_json(made: Path, name: str) -> None:
    """Refused in words, or read with the same result as the whole file."""
    file, read = made / name, READERS[name]
    content, whole = file.read_bytes(), read(made)
    chance, refused = random.Random(zlib.crc32(name.encode())), 0
    try:
        for _ in range(DAMAGES):
            what, damage = damaged(content, chance)
            file.write_bytes(damage)
            try:
                assert read(made) == whole, what
            except ConfigError as error:
                assert_explained(error, what)
                refused += 1
    finally:
        file.write_bytes(content)
    assert refused > DAMAGES // 4, "most damage goes unnoticed"
