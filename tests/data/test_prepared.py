"""Opening a prepared folder: what it gives, and every way it can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airmoe import ConfigError
from airmoe.data import Prepared, open_prepared
from airmoe.files import read_json, write_json
from tests.data.common import make_texts, prepare_texts, refused


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return prepare_texts(tmp_path, make_texts(100))


def test_an_opened_folder_equals_the_prepared_one(prepared: Prepared) -> None:
    opened = open_prepared(str(prepared.folder))
    assert opened.manifest == prepared.manifest
    manifest = opened.manifest
    assert manifest.recipe.corpus == "corpus.jsonl"
    assert manifest.recipe.split_rule.endswith("sha256(text) / 2^64 < 0.2")
    assert manifest.tokenizer == opened.tokenizer().identity
    assert list(manifest.splits) == ["train", "validation"]
    assert sum(split.documents for split in manifest.splits.values()) == 100
    assert opened.tokens("train") == manifest.splits["train"].tokens


def test_the_folder_names_no_machine(prepared: Prepared) -> None:
    manifest = (prepared.folder / "manifest.json").read_text()
    assert str(prepared.folder.parent) not in manifest


def damage_last_byte(folder: Path) -> None:
    file = folder / "train-00001.bin"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


def truncate(folder: Path) -> None:
    file = folder / "train-00001.bin"
    file.write_bytes(file.read_bytes()[:-4])


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:

    def harm(folder: Path) -> None:
        values = read_json(folder / "manifest.json")
        change(values)
        write_json(folder / "manifest.json", values)

    return harm


def edited_split(**fields: object) -> Callable[[Path], None]:
    return edited(lambda values: values["splits"]["train"].update(fields))


@pytest.mark.parametrize(
    ("harm", "parts"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), ["has no manifest.json"]),
        (lambda folder: (folder / "manifest.json").write_text("{"), ["cannot be read"]),
        (lambda folder: (folder / "manifest.json").write_text("[]"), ["cannot be read"]),
        (edited(lambda values: values.pop("splits")), ["cannot be read", "lacks splits"]),
        (edited_split(tokens=64), ["says 64 tokens in its train split"]),
        (edited_split(shards=[{"file": "x.bin", "tokens": 64.0, "sha256": ""}], tokens=64),
         ["cannot be read", "tokens is 64.0"]),
        (edited(lambda values: values.update(format_version=99)), ["format version 99", "reads 1"]),
        (lambda folder: (folder / "train-00001.bin").unlink(), ["train-00001.bin", "not in the"]),
        (truncate, ["train-00001.bin", "bytes instead of"]),
        (damage_last_byte, ["train-00001.bin", "is damaged", "sha256"]),
        (lambda folder: folder.rename(folder.with_name("other")), ["airmoe prepare"]),
        (lambda folder: folder.rename(f"{folder}.partial"), ["not finished", "to go on"]),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(
    prepared: Prepared, harm: Callable[[Path], object], parts: list[str]
) -> None:
    harm(prepared.folder)
    with refused("prepare", *parts, without=("elete",)):
        open_prepared(prepared.folder)


def test_a_folder_or_file_of_text_is_told_how_to_be_prepared(tmp_path: Path) -> None:
    """Never to be deleted: it may be years of work."""
    texts = tmp_path / "my texts"
    texts.mkdir()
    (texts / "a.txt").write_text("years of work")
    for path in (texts, texts / "a.txt"):
        parts = (f"airmoe prepare '{path}' --out ", "then data.folder=")
        with refused("has no manifest.json", *parts, without=("elete",)):
            open_prepared(path)
    with pytest.raises(ConfigError, match=r"--out 'data/my texts' .*data\.folder='data/my texts'"):
        open_prepared(texts)


def test_an_unfinished_folder_is_refused_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with refused("is not finished", "airmoe prepare"):
        open_prepared(tmp_path / "out.partial")


def test_without_verify_content_is_trusted_but_sizes_are_not(prepared: Prepared) -> None:
    damage_last_byte(prepared.folder)
    open_prepared(prepared.folder, verify=False)
    truncate(prepared.folder)
    with pytest.raises(ConfigError, match="bytes instead of"):
        open_prepared(prepared.folder, verify=False)


def test_an_unknown_split_lists_the_known_ones(prepared: Prepared) -> None:
    for use in (lambda: prepared.tokens("test"), lambda: prepared.blocks("test", 8)):
        with refused("'test'", "train, validation"):
            use()


def test_a_block_must_fit_into_the_split(prepared: Prepared) -> None:
    tokens = prepared.tokens("validation")
    assert len(prepared.blocks("validation", tokens)) == 1
    with refused("data.block_size", f"must be <= {tokens}", "'validation'"):
        prepared.blocks("validation", tokens + 1)
    with pytest.raises(ConfigError, match=r"data\.block_size"):
        prepared.blocks("train", 0)


def test_another_tokenizer_in_the_folder_is_refused(prepared: Prepared) -> None:
    edited(lambda values: values["tokenizer"].update(sha256="0"))(prepared.folder)
    with pytest.raises(ConfigError, match="holds another tokenizer"):
        open_prepared(prepared.folder).tokenizer()
