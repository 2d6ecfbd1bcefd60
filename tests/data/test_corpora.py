"""Names and paths -> splits; the Hub is played by a fake `load_dataset`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airmoe.data.corpora import open_corpus
from tests.data.common import refused, write_jsonl


def texts_of(name: str | Path, split: str = "train") -> list[str]:
    """Its texts; "" stands for a row without one."""
    return [
        document.text if document else "" for document in open_corpus(str(name), "text").read(split)
    ]


def play_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_wikitext_rows_become_articles_of_the_official_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = ["", " = One = \n", "", " first \n", " = = Part = = \n", "", " = Two = \n", "", " b \n"]
    calls = []

    def load_dataset(path: str, name: str, *, split: str, streaming: bool) -> list[dict[str, str]]:
        calls.append((path, name, split, streaming))
        return [{"text": row} for row in rows]

    play_hub(monkeypatch, load_dataset)
    assert list(open_corpus("wikitext103", "text").splits) == ["train", "validation", "test"]
    assert texts_of("wikitext103", "test") == [
        " = One = \n \n first \n = = Part = = \n ",
        " = Two = \n \n b ",
    ]
    assert calls == [("Salesforce/wikitext", "wikitext-103-raw-v1", "test", True)]


@pytest.mark.parametrize(
    ("name", "path", "config"),
    [
        ("c5", "BramVanroy/CommonCrawl-CreativeCommons", "eng"),
        ("openwebtext2", "Geralt-Targaryen/openwebtext2", None),
    ],
)
def test_web_corpora_are_streamed_and_have_no_official_validation(
    monkeypatch: pytest.MonkeyPatch, name: str, path: str, config: str | None
) -> None:
    def load_dataset(*found: object, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        assert (*found, split, streaming) == (path, config, "train", True)
        texts = ["one\n\ntwo", "  ", None, "three"]
        return iter([{"text": text} for text in texts])

    play_hub(monkeypatch, load_dataset)
    assert list(open_corpus(name, "text").splits) == ["train"]
    assert texts_of(name) == ["one\n\ntwo", "", "three"]


def test_a_failure_of_the_hub_is_one_line_at_the_start_and_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    def broken(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise TimeoutError("read timed out")

    def gated(*_: object, **__: object) -> None:
        raise FileNotFoundError("Dataset is a gated dataset on the Hub.")  # as `datasets` does

    copy = "Check the network and run again to go on, or give the path of a local copy."
    page = "https://huggingface.co/datasets/BramVanroy/CommonCrawl-CreativeCommons"
    for load_dataset, reason, remedy in (
        (unreachable, "Couldn't reach", copy),
        (broken, "TimeoutError: read", copy),
        (gated, "is a gated dataset", f"accept the terms on {page}, run `hf auth login`"),
    ):
        play_hub(monkeypatch, load_dataset)
        with refused("CommonCrawl-CreativeCommons", reason, remedy):
            texts_of("c5")


def test_without_datasets_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused("datasets", "pip install 'airmoe[data]'"):
        texts_of("c5")


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl", "a/c/y.jsonl", "a.jsonl", ".hidden.jsonl", ".git/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    (tmp_path / "README.md").write_text("not text of the corpus")
    assert texts_of(tmp_path) == ["a/c/y.jsonl", "a/z.jsonl", "a.jsonl", "b.jsonl"]


def test_files_named_train_and_valid_are_the_official_splits(tmp_path: Path) -> None:
    for name in ("train-1.jsonl", "train-0.jsonl", "test.jsonl", "notes.jsonl"):
        write_jsonl(tmp_path / name, [name])
    assert list(open_corpus(str(tmp_path), "text").splits) == ["train"]
    assert len(texts_of(tmp_path)) == 4, "train alone is no official split"
    write_jsonl(tmp_path / "Validation.jsonl", ["Validation.jsonl"])
    assert texts_of(tmp_path) == ["train-0.jsonl", "train-1.jsonl"]
    assert texts_of(tmp_path, "validation") == ["Validation.jsonl"]
    assert texts_of(tmp_path, "test") == ["test.jsonl"]


def test_the_fingerprint_follows_names_and_contents_only(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return open_corpus(str(tmp_path / "corpus"), "text").sha256

    (tmp_path / "corpus").mkdir()
    file = write_jsonl(tmp_path / "corpus" / "a.jsonl", ["one"])
    first = fingerprint()
    os.utime(file, (0, 0))
    assert fingerprint() == first
    write_jsonl(file, ["two"])  # as long as before
    os.utime(file, (0, 0))
    assert fingerprint() != first
    write_jsonl(file, ["other"])
    assert fingerprint() != first
    write_jsonl(file, ["one"])
    assert fingerprint() == first
    file.rename(file.with_name("b.jsonl"))
    write_jsonl(file.with_name("b.jsonl"), ["one"])
    assert fingerprint() != first


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("text")
    for name in (tmp_path, tmp_path / "notes.md"):
        with refused(name.name, ".txt", ".jsonl.zst", ".parquet"):
            open_corpus(str(name), "text")
    with refused("'wikitext-103'", "python-docs", "wikitext103", "c5", "openwebtext2"):
        open_corpus("wikitext-103", "text")


def test_only_regular_files_and_links_to_them_are_read(tmp_path: Path) -> None:
    """A pipe or a device would be read for ever."""
    write_jsonl(tmp_path / "real.jsonl", ["one"])
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").symlink_to(tmp_path / "real.jsonl")
    (tmp_path / "corpus" / "folder.txt").mkdir()
    assert texts_of(tmp_path / "corpus") == ["one"]
    odd = tmp_path / "corpus" / "b.jsonl"
    for make in (
        lambda: os.mkfifo(odd),
        lambda: odd.symlink_to("/dev/zero"),
        lambda: odd.symlink_to("nowhere"),
    ):
        make()
        for name in (odd, tmp_path / "corpus"):
            if name.exists():
                with refused("b.jsonl", "must be a regular file or a link to one"):
                    open_corpus(str(name), "text")
        odd.unlink()
