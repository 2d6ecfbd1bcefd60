"""The hash of a run's text is one of its tokens, not of names and packing."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

from airmoe.data import PrepareConfig, Prepared, prepare
from airmoe.training.run_folder import data_sha256


def prepared(folder: Path, text: str, *, packed: bool = False) -> Prepared:
    folder.mkdir()
    for split in ("train", "valid"):
        data = f"{split}: {text}".encode()
        name = f"{split}.txt.gz" if packed else f"{split}-of-mine.txt"
        (folder / name).write_bytes(gzip.compress(data) if packed else data)
    out = f"{folder}-tokens"
    return prepare(PrepareConfig(corpus=str(folder), tokenizer="bytes", out=out))


def test_names_and_packing_do_not_matter_but_tokens_do(tmp_path: Path) -> None:
    first = prepared(tmp_path / "one", "some words")
    same = prepared(tmp_path / "two", "some words", packed=True)
    assert first.manifest != same.manifest  # so there is something to ignore
    assert data_sha256(first) == data_sha256(same)
    other = prepared(tmp_path / "three", "other words")
    assert data_sha256(first) != data_sha256(other)


def test_the_tokenizer_and_which_split_is_which_matter(tmp_path: Path) -> None:
    text = prepared(tmp_path / "one", "some words")
    manifest = text.manifest
    tokenizer = replace(manifest.tokenizer, sha256="00" * 32)
    train, validation = (manifest.splits[name] for name in ("train", "validation"))
    for changed in (
        replace(manifest, tokenizer=tokenizer),
        replace(manifest, splits={"train": validation, "validation": train}),
        replace(manifest, splits={"train": train}),
    ):
        assert data_sha256(replace(text, manifest=changed)) != data_sha256(text)
