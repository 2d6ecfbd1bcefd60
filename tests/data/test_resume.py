"""Killed prepares go on, and end with the very bytes of an undisturbed one."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from airmoe import ConfigError
from airmoe.data import PrepareConfig
from airmoe.data.shards import SplitWriter
from airmoe.files import LOCK, locked
from tests.data.common import folder_bytes, made, make_texts, refused, write_jsonl
from tests.training.kills import killed_at_operation
from tests.training.runs import in_process


@pytest.mark.slow
def test_a_kill_at_any_moment_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before one operation on a file or document written after another, and twice."""
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(40))
    options = {"tokenizer": "bpe:300", "validation_fraction": 0.2, "shard_tokens": 700}
    (tmp_path / "whole").mkdir()
    whole = folder_bytes(made(tmp_path, out=str(tmp_path / "whole" / "out"), **options).folder)
    place = tmp_path / "killed"
    add = SplitWriter.add

    def operation(writer: SplitWriter, tokens: Any) -> bool:
        sys.audit("open", str(place))
        return add(writer, tokens)

    def job() -> None:
        made(tmp_path, out=str(place / "out"), **options)

    monkeypatch.setattr(SplitWriter, "add", operation)
    moment, codes = 1, []
    while 0 not in codes:
        place.mkdir()
        codes.append(killed_at_operation(job, place, moment))
        if (place / "out").exists():
            shown = folder_bytes(place / "out")
            shown.pop(LOCK, None)
            assert shown == whole, "half a folder shows"
        killed_at_operation(job, place, 12)  # the second try dies too, a little further on
        assert in_process(job) == 0
        assert folder_bytes(place / "out") == whole, f"killed at moment {moment}"
        assert [path.name for path in place.iterdir()] == ["out"]
        shutil.rmtree(place)
        moment += 1 if moment < 12 else 4  # the beginning in full, then a sample
    assert set(codes) == {0, -signal.SIGKILL} and len(codes) > 26


def test_nobody_comes_in_while_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prepares that had the same lock gave it a name each; the second found no folder."""
    rename, tried = Path.rename, []

    def try_to_come_in(path: Path, target: Path) -> Path:
        if path.name == "out.partial":
            with (
                pytest.raises(ConfigError, match="is being prepared by process "),
                locked(path, "prepare.out", "is being prepared"),
            ):
                pass
            tried.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", try_to_come_in)
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(60))
    folder = made(tmp_path, validation_fraction=0.2).folder
    assert tried == [folder] and not (folder / LOCK).exists()
    whole = folder_bytes(folder)
    (folder / LOCK).touch()  # a kill right after the name
    assert folder_bytes(made(tmp_path, validation_fraction=0.2).folder) == whole


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `.partial` with finished shards: its corpus breaks off."""
    monkeypatch.setattr(sys.modules[PrepareConfig.__module__], "_BATCH_CHARACTERS", 1000)
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(100))
    (tmp_path / "corpus.jsonl").open("a").write("{broken")
    with pytest.raises(ConfigError, match="line 101"):
        made(tmp_path)
    return tmp_path


def test_unfinished_work_with_other_settings_is_refused(unfinished: Path) -> None:
    before = folder_bytes(unfinished)
    with refused("prepare.out", "other settings", "Delete", "out.partial"):
        made(unfinished, tokenizer="bpe:300")
    assert folder_bytes(unfinished) == before
    with pytest.raises(ConfigError, match="line 101"):
        made(unfinished)


def test_settings_may_change_while_nothing_is_done(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", make_texts(1000))
    with pytest.raises(ConfigError, match="more than the training text yields"):
        made(tmp_path, tokenizer="bpe:9000")
    assert made(tmp_path, tokenizer="bpe:300").manifest.tokenizer.vocab_size == 300


def test_damaged_progress_is_refused(unfinished: Path) -> None:
    progress = unfinished / "out.partial" / "progress.json"
    content = progress.read_text()
    for bad in ("{", "{}", "[]", content.replace('"documents": ', '"documents": 1')):
        progress.write_text(bad)
        # It may not be ours, so it is never advised to be deleted.
        with refused("out.partial/progress.json", "Use another out.", without=("elete",)):
            made(unfinished)
    progress.write_text(content)
    for shard in (unfinished / "out.partial").glob("validation-*.bin"):
        shard.write_bytes(b"")
        with pytest.raises(ConfigError, match="of unfinished work but does not"):
            made(unfinished)
