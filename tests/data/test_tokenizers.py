"""Tokenizers: ids that are right, text that comes back, files that others can open."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from airmoe import ConfigError
from airmoe.data import Tokenizer, load_tokenizer, make_tokenizer, tokenizer_choice
from tests.data.common import folder_bytes, made, make_texts, refused, save_own

NAMES = ["bytes", "bpe:400", "llama-3"]
SPECIALS = "<|endoftext|> <|end_of_text|> <|begin_of_text|>"

needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_models") is None, reason="needs PyPI's llama-models"
)


@cache
def build(name: str) -> Tokenizer:
    if name == "llama-3" and importlib.util.find_spec("llama_models") is None:
        pytest.skip("needs PyPI's llama-models")
    return make_tokenizer(name, make_texts(300))


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text())
@settings(max_examples=60)
def test_any_text_comes_back(name: str, text: str) -> None:
    tokenizer = build(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.identity.vocab_size for token in ids)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_added_and_specials_in_the_text_are_plain_text(name: str) -> None:
    tokenizer = build(name)
    ids = tokenizer.encode(SPECIALS)
    assert tokenizer.identity.eos_id not in ids and 128_000 not in ids
    assert tokenizer.decode(ids) == SPECIALS
    assert tokenizer.encode("") == []
    shown = "<|end_of_text|>" if name == "llama-3" else "<|endoftext|>"
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.identity.eos_id]) == "a" + shown


@pytest.mark.parametrize("name", NAMES)
def test_we_and_transformers_open_what_was_saved(name: str, tmp_path: Path) -> None:
    tokenizer = build(name)
    tokenizer.save(tmp_path / "saved")
    text = "\n".join(make_texts(20, seed=1))
    for other in (load_tokenizer(tmp_path / "saved"), make_tokenizer(str(tmp_path / "saved"))):
        assert other.identity == tokenizer.identity
        assert other.encode(text) == tokenizer.encode(text)

    if name == "llama-3":
        return  # test_transformers_opens_llama3_whole
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        opened = kind.from_pretrained(tmp_path / "saved")
        assert opened.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert opened.decode(tokenizer.encode(text)) == text
        assert opened.eos_token_id == tokenizer.identity.eos_id
        assert len(opened) == tokenizer.identity.vocab_size


def test_bytes_are_bytes() -> None:
    tokenizer = build("bytes")
    assert tokenizer.encode("é!") == [0xC3, 0xA9, 0x21]
    assert (tokenizer.identity.vocab_size, tokenizer.identity.eos_id) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


@needs_llama
def test_llama3_has_the_published_ids() -> None:
    tokenizer = build("llama-3")
    identity = tokenizer.identity
    assert (identity.kind, identity.vocab_size, identity.eos_id) == ("llama-3", 128_256, 128_001)
    assert tokenizer.encode("Hello, world!") == [9906, 11, 1917, 0]
    assert tokenizer.encode("hello world") == [15339, 1917]
    assert tokenizer.decode([128_000, 128_009]) == "<|begin_of_text|><|eot_id|>"
    assert tokenizer.decode([128_255]) == "<|reserved_special_token_250|>"


VARIED = [
    "Hello, world! It's 12345678 o'clock, WE'LL see.",
    "  def f(x):\n\t\treturn  x**2   # squared\n\n\n    \r\n  end   ",
    "naïve über 東京タワー العربية हिन्दी 👩‍👩‍👧‍👦 e\u0301 \u00a0\u2028\u3000x",
    " " * 83 + "a" + "\n" * 20 + "7" * 50,
    '{"key": [1.5e-7, null], "ключ": "\\u00e9"}',
    "\x00\x1b[31m\ufffd\U0010ffff",
    "<|begin_of_text|>system<|start_header_id|> <|eot_id|><|reserved_special_token_250|>",
    *make_texts(30, seed=3),
]


@needs_llama
@pytest.mark.slow
def test_transformers_opens_llama3_whole(tmp_path: Path) -> None:
    tokenizer = build("llama-3")
    tokenizer.save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(opened), opened.vocab_size + len(opened.added_tokens_decoder)) == (128_256,) * 2
    assert (opened.bos_token_id, opened.eos_token_id) == (128_000, 128_001)
    for text in VARIED:
        ids = tiktoken().encode(text, allowed_special="all")
        assert opened(text)["input_ids"] == ids, text  # nothing before it: training saw nothing
        assert opened.decode(ids) == text
        assert opened(text, split_special_tokens=True)["input_ids"] == tokenizer.encode(text), text
    assert any(128_255 in opened(text)["input_ids"] for text in VARIED)


@needs_llama
@given(text=st.text())
@settings(max_examples=200)
def test_llama3_has_the_ids_of_tiktoken(text: str) -> None:
    assert build("llama-3").encode(text) == tiktoken().encode_ordinary(text)


@cache
def tiktoken() -> Any:
    """Llama 3's own tokenizer, as its authors build it."""
    path = tokenizer_choice._installed_llama3()
    ranks = pytest.importorskip("tiktoken.load").load_tiktoken_bpe(str(path))
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
    named[9] = "eot_id"
    others = (f"reserved_special_token_{n}" for n in range(256))
    names = (f"<|{named.get(n) or next(others)}|>" for n in range(256))
    return pytest.importorskip("tiktoken").Encoding(
        name="llama-3",
        pat_str=tokenizer_choice._LLAMA3_WORDS,
        mergeable_ranks=ranks,
        special_tokens={name: 128_000 + n for n, name in enumerate(names)},
    )


@pytest.mark.parametrize(
    ("single", "options"),
    [
        (None, {}),
        ("<s> $A", {}),
        ("<s> $A </s>", {}),
        ("$A </s>", {}),
        (None, {"add_bos_token": True}),
    ],
)
def test_training_text_is_what_the_saved_tokenizer_gives(
    tmp_path: Path, single: str | None, options: dict[str, Any]
) -> None:
    own = save_own(tmp_path, single, **options)
    bare = shutil.copytree(own, tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    (bare / "special_tokens_map.json").unlink(missing_ok=True)
    for path in (own, own / "tokenizer.json", *([bare] if single == "<s> $A" else [])):
        tokenizer = make_tokenizer(str(path))
        tokenizer.save(tmp_path / "saved" / path.name)
        saved = load_tokenizer(tmp_path / "saved" / path.name)
        assert saved.identity == tokenizer.identity
        saved.save(tmp_path / "checkpoint" / path.name)
        opened = AutoTokenizer.from_pretrained(tmp_path / "checkpoint" / path.name)
        for text in make_texts(5):
            used = opened(text)["input_ids"]
            ended = used if used[-1] == opened.eos_token_id else [*used, opened.eos_token_id]
            assert saved.encode_documents([text])[0].tolist() == ended
            assert tokenizer.encode_start(text) == ended[:-1]
        has_bos = "<s>" in (single or "") or bool(options)
        bos_id = opened.convert_tokens_to_ids("<s>")
        assert tokenizer.identity.bos_id == (bos_id if has_bos else None)


def test_the_users_tokenizer_is_saved_whole(tmp_path: Path) -> None:
    own = save_own(tmp_path, "<s> $A")
    tokenizer = make_tokenizer(str(own))
    tokenizer.save(tmp_path / "first")
    load_tokenizer(tmp_path / "first").save(tmp_path / "saved")
    saved = folder_bytes(tmp_path / "saved")
    assert {"airmoe_tokenizer.json": saved["airmoe_tokenizer.json"]} | folder_bytes(own) == saved
    opened = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (opened.bos_token, opened.eos_token, opened.pad_token) == ("<s>", "</s>", "<pad>")
    assert (opened.padding_side, opened.model_max_length) == ("left", 77)
    messages = [{"role": "user", "content": "hi"}]
    assert opened.apply_chat_template(messages, tokenize=False) == "<s>hi"


@pytest.mark.parametrize("missing", ["files_sha256", "bos_id"])
def test_a_folder_written_before_a_field_was_kept_does_without_it(
    tmp_path: Path, missing: str
) -> None:
    tokenizer = make_tokenizer(str(save_own(tmp_path, "<s> $A")))
    tokenizer.save(tmp_path / "saved")
    file = tmp_path / "saved" / "airmoe_tokenizer.json"
    identity = json.loads(file.read_text())
    assert identity.pop(missing) == getattr(tokenizer.identity, missing) is not None
    file.write_text(json.dumps(identity))
    former = load_tokenizer(tmp_path / "saved")
    same = missing == "files_sha256"
    assert (former.identity == tokenizer.identity) == same
    assert former.encode_start("a") == tokenizer.encode_start("a")[0 if same else 1 :]


def test_a_changed_or_incomplete_tokenizer_folder_is_refused(tmp_path: Path) -> None:
    """Also for files that change no id of training text: they are copied into every checkpoint."""
    own, saved = save_own(tmp_path, "<s> $A"), tmp_path / "saved"
    make_tokenizer(str(own)).save(saved)
    for name, content in folder_bytes(own).items():
        (saved / name).write_bytes(content + b" ")
        with refused("has changed since it was saved"):
            load_tokenizer(saved)
        (saved / name).write_bytes(content)
    (saved / "vocab.txt").write_text("one more")
    with refused("has changed since it was saved"):
        load_tokenizer(saved)
    definition = (saved / "tokenizer.json").read_text()
    (saved / "tokenizer.json").write_text(definition[:-9])
    with refused("not a whole tokenizer folder"):
        load_tokenizer(saved)
    (saved / "tokenizer.json").unlink()
    for folder in (saved, tmp_path / "nowhere"):
        with refused("not a whole tokenizer folder"):
            load_tokenizer(folder)


def test_prepared_text_knows_the_files_of_its_tokenizer(tmp_path: Path) -> None:
    own = save_own(tmp_path, "<s> $A")
    (tmp_path / "text.txt").write_text("a\n\nb\n\nc")
    options: dict[str, Any] = {"corpus": str(tmp_path / "text.txt"), "tokenizer": str(own)}
    options["validation_fraction"] = 0.5
    prepared = made(tmp_path, **options)
    assert made(tmp_path, **options).manifest == prepared.manifest
    template = own / "chat_template.jinja"
    template.write_text(template.read_text() + "!")
    with refused("another tokenizer"):
        made(tmp_path, **options)
    identity = make_tokenizer(str(own)).identity
    assert identity == prepared.tokenizer().identity  # of ids it is the same one
    assert identity.files_sha256 != prepared.tokenizer().identity.files_sha256


def test_a_tokenizer_that_ends_texts_in_its_own_way_is_refused(tmp_path: Path) -> None:
    with refused("own", "with transformers", "eos_token after it", "save_pretrained"):
        make_tokenizer(str(save_own(tmp_path, "<s> $A [SEP]")))


@needs_llama
def test_a_model_file_gives_the_same_llama3(tmp_path: Path) -> None:
    build("llama-3").save(tmp_path)
    copy = (tmp_path / "tokenizer.model").rename(tmp_path / "other.model")
    assert make_tokenizer(str(copy)).identity == build("llama-3").identity
    copy.write_bytes(copy.read_bytes()[:-200])
    with refused("other.model", "128000 entries"):
        make_tokenizer(str(copy))


@pytest.mark.parametrize("text", ["a" * 500_000, " " * 200_000, "ab1\n" * 50_000])
@pytest.mark.parametrize("name", NAMES)
def test_a_very_long_text_takes_linear_time(name: str, text: str) -> None:
    tokenizer = build(name)
    start = time.process_time()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - start < 10, "quadratic time would be minutes"


def test_bpe_has_the_size_asked_for_and_merges_what_is_frequent() -> None:
    for size in (257, 300, 400):
        identity = make_tokenizer(f"bpe:{size}", make_texts(300)).identity
        assert identity.vocab_size == size and 0 <= identity.eos_id < size
    tokenizer = make_tokenizer("bpe:260", ["aaab aaab"] * 10)
    assert len(tokenizer.encode("aaab")) < 4
    assert len(tokenizer.encode("zzzz")) == 4


TRAIN = """
from airmoe.data import make_tokenizer
from tests.data.common import make_texts
print(make_tokenizer("bpe:500", make_texts(500)).identity.sha256)
"""


@pytest.mark.slow
def test_bpe_training_is_the_same_in_another_process() -> None:
    other = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env={"PYTHONHASHSEED": "2", "PYTHONPATH": "src:.", "RAYON_NUM_THREADS": "4"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    here = make_tokenizer("bpe:500", make_texts(500)).identity.sha256
    assert other.stdout.strip() == here


def test_bpe_is_trained_on_a_bounded_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_choice, "_TRAINING_CHARACTERS", 1000)
    read = []

    def texts() -> object:
        for text in make_texts(500):
            read.append(text)
            yield text

    make_tokenizer("bpe:270", texts())  # type: ignore[arg-type]
    assert 1000 <= len("".join(read)) < 1500


def test_bpe_from_too_little_text_says_how_much_it_gives() -> None:
    with refused("'bpe:1000'", "only 260 tokens", "bpe:260"):
        make_tokenizer("bpe:1000", ["abcd"])


@pytest.mark.parametrize("name", ["bpe:", "bpe:256", "bpe:8k", "bpe:-5", "bpe:1_000"])
def test_a_bad_bpe_size_is_refused(name: str) -> None:
    with refused(name, ">= 257"):
        make_tokenizer(name, make_texts(10))


def test_a_downloaded_tokenizer_folder_opens_with_its_own_end_of_text(tmp_path: Path) -> None:
    build("bpe:400").save(tmp_path)
    (tmp_path / "airmoe_tokenizer.json").unlink()
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    for eos in ("<|endoftext|>", {"__type": "AddedToken", "content": "<|endoftext|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            tokenizer = make_tokenizer(str(path))
            text = make_texts(1)[0]
            assert tokenizer.encode(text) == build("bpe:400").encode(text)
            assert tokenizer.identity.eos_id == build("bpe:400").identity.eos_id


def test_a_bare_tokenizer_json_needs_a_known_end_of_text(tmp_path: Path) -> None:
    build("bpe:400").save(tmp_path / "saved")
    bare = tmp_path / "tokenizer.json"
    definition = (tmp_path / "saved" / "tokenizer.json").read_text()
    bare.write_text(definition)
    assert make_tokenizer(str(bare)).identity == build("bpe:400").identity
    bare.write_text(definition.replace("<|endoftext|>", "<|stop|>"))
    with refused("which token ends a text", "eos_token"):
        make_tokenizer(str(bare))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with refused("'llama3'", "llama-3, bytes, bpe:"):
        make_tokenizer("llama3")
    with pytest.raises(ConfigError, match="neither a folder with"):
        make_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    with pytest.raises(ConfigError, match="could not be opened"):
        make_tokenizer(str(tmp_path))


def test_a_missing_package_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_choice.importlib.util, "find_spec", lambda _: None)
    with refused("llama-models", "pip install 'airmoe[data]'", "tokenizer.model"):
        make_tokenizer("llama-3")
