"""prepare: the right documents in the right split, once, and only with the settings asked for."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from airmoe import ConfigError
from airmoe.data import PrepareConfig, Prepared, PrepareProgress, make_tokenizer, prepare
from airmoe.data.shards import TOKEN_TYPE, SplitWriter
from tests.data.common import (
    folder_bytes,
    made,
    make_texts,
    refused,
    save_own,
    settings,
    write_jsonl,
)

MODULE = sys.modules[PrepareConfig.__module__]  # the package's `prepare` is the function


def documents_of(prepared: Prepared, split: str) -> list[str]:
    """The texts of a split, out of its raw shards."""
    info, tokenizer = prepared.manifest.splits[split], prepared.tokenizer()
    tokens = np.concatenate(
        [np.fromfile(prepared.folder / shard.file, TOKEN_TYPE) for shard in info.shards]
    )
    ends = np.flatnonzero(tokens == tokenizer.identity.eos_id)
    assert len(ends) == info.documents and ends[-1] == len(tokens) - 1 == info.tokens - 1
    pieces = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(piece[:-1].tolist()) for piece in pieces]


def by_hash(texts: list[str], fraction: float) -> dict[str, list[str]]:
    """The split rule, written once more."""
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    for text in texts:
        number = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) / 2**64
        splits["validation" if number < fraction else "train"].append(text)
    return splits


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    texts = make_texts(400)
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    return texts


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_every_document_is_in_the_split_its_hash_says(
    tmp_path: Path, texts: list[str], tokenizer: str
) -> None:
    prepared = made(tmp_path, tokenizer=tokenizer, validation_fraction=0.3)
    expected = by_hash(texts, 0.3)
    assert {split: documents_of(prepared, split) for split in expected} == expected
    assert len(prepared.manifest.splits["train"].shards) > 1
    assert sorted(folder_bytes(prepared.folder)) == sorted(
        [
            "manifest.json",
            "tokenizer/airmoe_tokenizer.json",
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
            *(s.file for split in prepared.manifest.splits.values() for s in split.shards),
        ]
    )
    assert not (tmp_path / "out.partial").exists()


def test_bpe_learns_from_the_train_split_only(tmp_path: Path, texts: list[str]) -> None:
    train = by_hash(texts, 0.3)["train"]
    write_jsonl(tmp_path / "only-train.jsonl", train)
    prepared = made(tmp_path, tokenizer="bpe:400", validation_fraction=0.3)
    assert prepared.manifest.tokenizer == make_tokenizer("bpe:400", train).identity


def test_given_validation_text_replaces_the_hash_rule(tmp_path: Path, texts: list[str]) -> None:
    """A file, or the validation split of a folder that has one."""
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "valid.jsonl", ["held out", "and more"])
    for split in ("train", "valid"):
        write_jsonl(tmp_path / "other" / f"{split}.jsonl", [split])
    for name, expected in (("valid.jsonl", ["held out", "and more"]), ("other", ["valid"])):
        out, validation = str(tmp_path / f"for {name}"), str(tmp_path / name)
        prepared = made(tmp_path, out=out, validation=validation)
        assert documents_of(prepared, "train") == texts
        assert documents_of(prepared, "validation") == expected
        assert prepared.manifest.recipe.split_rule == f"validation is {name}"


def test_official_splits_are_kept(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "corpus" / f"{split}.jsonl", [f"{split} {n}" for n in range(30)])
    prepared = made(tmp_path, corpus=str(tmp_path / "corpus"), shard_tokens=50)
    assert list(prepared.manifest.splits) == ["train", "validation", "test"]
    assert documents_of(prepared, "validation") == [f"valid {n}" for n in range(30)]
    assert documents_of(prepared, "test") == [f"test {n}" for n in range(30)]
    with refused("prepare.validation", "its own validation split"):
        made(tmp_path, corpus=str(tmp_path / "corpus"), validation="x")


def test_documents_of_a_users_tokenizer_begin_as_it_begins_texts(
    tmp_path: Path, texts: list[str]
) -> None:
    write_jsonl(tmp_path / "valid.jsonl", ["held out"])
    own = save_own(tmp_path, "<s> $A")
    config = settings(tmp_path, tokenizer=str(own), validation=str(tmp_path / "valid.jsonl"))
    prepared = prepare(config)
    opened = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    expected = [token for text in texts for token in (*opened(text).input_ids, opened.eos_token_id)]
    (shard,) = prepared.manifest.splits["train"].shards
    assert np.fromfile(prepared.folder / shard.file, TOKEN_TYPE).tolist() == expected
    assert opened.bos_token_id == expected[0] == prepared.manifest.tokenizer.bos_id
    assert prepare(config).manifest == prepared.manifest


def test_rows_without_text_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = ["null", '"one"', "null", '"two"', "null"]
    lines = "".join(f'{{"text": {row}}}\n' for row in rows)
    (tmp_path / "corpus.jsonl").write_text(lines)
    (tmp_path / "valid.jsonl").write_text('{"text": null}\n{"text": "held out"}\n')
    seen: list[PrepareProgress] = []
    config = settings(tmp_path, validation=str(tmp_path / "valid.jsonl"))
    prepared = prepare(config, seen.append, _shard_tokens=1)
    assert documents_of(prepared, "train") == ["one", "two"]
    skipped = {progress.split: progress.skipped for progress in seen}
    assert skipped == {"train": 3, "validation": 1}


def test_max_tokens_ends_train_with_the_document_that_reaches_it(
    tmp_path: Path, texts: list[str]
) -> None:
    write_jsonl(tmp_path / "valid.jsonl", ["held out"])
    lengths = np.cumsum([len(text.encode()) + 1 for text in texts])
    for limit in (int(lengths[50]), int(lengths[50]) + 1):
        options: dict[str, Any] = {"validation": str(tmp_path / "valid.jsonl"), "max_tokens": limit}
        prepared = made(tmp_path, out=str(tmp_path / f"out{limit}"), **options)
        count = int(np.searchsorted(lengths, limit)) + 1
        assert documents_of(prepared, "train") == texts[:count]
        assert documents_of(prepared, "validation") == ["held out"]


def test_progress_is_reported(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_BATCH_CHARACTERS", 5000)
    seen: list[PrepareProgress] = []
    prepared = prepare(settings(tmp_path, validation_fraction=0.2), seen.append)
    assert len(seen) > 5
    assert {progress.split for progress in seen} == {"train"}
    counts = [progress.documents for progress in seen]
    assert counts == sorted(counts) and counts[-1] == len(texts)
    assert seen[-1].tokens == prepared.tokens("train") + prepared.tokens("validation")
    assert seen[-1].fraction == 1.0
    assert all(0 < (progress.fraction or 0) <= 1 for progress in seen)


def test_a_finished_folder_is_returned_untouched(tmp_path: Path, texts: list[str]) -> None:
    first = made(tmp_path)
    times = {file: file.stat().st_mtime_ns for file in first.folder.rglob("*")}
    again = made(tmp_path)
    assert again.manifest == first.manifest
    assert {file: file.stat().st_mtime_ns for file in again.folder.rglob("*")} == times


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "bpe:300"},
        {"validation_fraction": 0.01},
        {"max_tokens": 100},
        {"text_field": "body"},
    ],
)
def test_a_folder_made_with_other_settings_is_refused(
    tmp_path: Path, texts: list[str], change: dict[str, Any]
) -> None:
    made(tmp_path)
    with refused("prepare.out", "other settings", "Delete it or use another out."):
        made(tmp_path, **change)


def test_other_text_of_the_same_name_and_size_is_refused(tmp_path: Path) -> None:
    """Of the corpus, or to validate on; a file may move."""
    for folder, text in (("a", "first"), ("b", "other")):
        (tmp_path / folder).mkdir()
        for name in ("text", "valid"):
            write_jsonl(tmp_path / folder / f"{name}.jsonl", [text])

    def make(corpus: str, validation: str) -> Prepared:
        given = str(tmp_path / validation / "valid.jsonl")
        return made(tmp_path, corpus=str(tmp_path / corpus / "text.jsonl"), validation=given)

    first = make("a", "a")
    for folders in (("b", "a"), ("a", "b")):
        with refused("prepare.out", "other text", "use another out", "data.folder"):
            make(*folders)
    assert documents_of(first, "train") == ["first"]
    (tmp_path / "a").rename(tmp_path / "c")
    assert make("c", "c").manifest == first.manifest


def test_a_foreign_folder_is_left_alone(tmp_path: Path, texts: list[str]) -> None:
    for name in ("out", "other.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    for out, rule in (("out", "not made by prepare"), ("other", "did not make there")):
        with refused("prepare.out", rule, "se another out"):
            made(tmp_path, out=str(tmp_path / out))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "other.partial" / "thesis.txt").read_text() == "years of work"


def test_two_prepares_into_one_folder_are_refused(tmp_path: Path, texts: list[str]) -> None:
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refused("prepare.out", "by another process", "stop it first"):
            made(tmp_path)
    assert documents_of(made(tmp_path), "train")


def test_an_empty_split_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", ["one"])
    with refused("no text for its validation split", "change validation_fraction", "validation="):
        made(tmp_path, validation_fraction=1e-9)
    with refused("prepare.corpus", "no text for its train split"):
        made(tmp_path, validation_fraction=0.999999)
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("corpus", ""),
        ("tokenizer", None),
        ("out", 3),
        ("validation", ""),
        ("validation_fraction", 0),
        ("seed", 1),
    ],
)
def test_bad_settings_are_refused(field: str, value: object) -> None:
    values: dict[str, Any] = {"corpus": "python-docs", "tokenizer": "bytes", "out": "x"}
    values[field] = value
    with pytest.raises(ConfigError, match=rf"^(prepare\.)?{field}: "):
        PrepareConfig(**values)


def test_a_full_disk_keeps_what_is_done(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = folder_bytes(made(tmp_path, out=str(tmp_path / "whole")).folder)
    add, calls = SplitWriter.add, []

    def add_until_full(self: SplitWriter, tokens: Any) -> bool:
        calls.append(len(tokens))
        if len(calls) == 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(self, tokens)

    monkeypatch.setattr(SplitWriter, "add", add_until_full)
    with pytest.raises(OSError, match="No space left") as raised:
        made(tmp_path)
    assert raised.value.errno == errno.ENOSPC
    resumed = made(tmp_path)
    assert folder_bytes(resumed.folder) == whole
    assert len(calls) < 200 + len(texts) - 100, "documents that were on disk are not done again"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds names of open files in /proc")
def test_every_file_is_forced_to_disk_before_the_folder_gets_its_name(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: dict[str, bytes] = {}

    def record(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert not (tmp_path / "out").exists() or file == tmp_path
        forced[file.name.removesuffix(".draft")] = file.read_bytes() if file.is_file() else b""

    monkeypatch.setattr(os, "fsync", record)
    prepared = made(tmp_path)
    for name, content in folder_bytes(prepared.folder).items():
        assert forced[Path(name).name] == content, name
    assert {"out.partial", "tokenizer", tmp_path.name} <= forced.keys()
