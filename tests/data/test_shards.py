"""Shards: a writer goes on where another stopped; blocks are the tokens in order."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from airmoe.data import BlockDataset, ShardInfo, SplitInfo
from airmoe.data.shards import TOKEN_TYPE, SplitWriter
from tests.data.common import folder_bytes, make_texts, prepare_texts


def written(
    folder: Path, documents: list[np.ndarray], shard: int, start: SplitInfo | None = None
) -> SplitWriter:
    writer = SplitWriter(folder, "train", shard, start)
    for document in documents:
        writer.add(document)
    return writer


def finish(writer: SplitWriter) -> SplitInfo:
    writer.finish_shard()
    return writer.synced()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    shard_tokens=st.integers(1, 30),
    saved=st.integers(0, 20),
    lost=st.integers(0, 20),
)
def test_going_on_from_any_document_changes_no_byte(
    lengths: list[int], shard_tokens: int, saved: int, lost: int
) -> None:
    ends = np.cumsum([0, *lengths])
    tokens = np.arange(ends[-1], dtype=np.uint32)
    documents = [tokens[a:b] for a, b in itertools.pairwise(ends)]
    with tempfile.TemporaryDirectory() as name:
        whole, resumed = Path(name, "whole"), Path(name, "resumed")
        whole.mkdir()
        resumed.mkdir()
        expected = finish(written(whole, documents, shard_tokens))

        first = written(resumed, documents[:saved], shard_tokens)
        state = first.synced()
        for document in documents[saved : saved + lost]:  # on disk, but nobody knows
            first.add(document)
        first.close()
        assert finish(written(resumed, documents[saved:], shard_tokens, state)) == expected
        assert folder_bytes(resumed) == folder_bytes(whole)

        content = b"".join((whole / shard.file).read_bytes() for shard in expected.shards)
        assert content == tokens.astype("<u4").tobytes()
        assert (expected.documents, expected.tokens) == (len(documents), len(tokens))
        for shard in expected.shards:
            file = whole / shard.file
            assert hashlib.sha256(file.read_bytes()).hexdigest() == shard.sha256
            assert file.stat().st_size == 4 * shard.tokens
        # The document that fills a shard, of at most 9 tokens, is its last.
        sizes = [shard.tokens for shard in expected.shards]
        assert all(shard_tokens <= size < shard_tokens + 9 for size in sizes[:-1])
        assert sizes[-1] < shard_tokens + 9


def write_shards(folder: Path, shards: list[list[int]]) -> SplitInfo:
    infos = []
    for number, tokens in enumerate(shards):
        file = folder / f"train-{number:05d}.bin"
        np.array(tokens, TOKEN_TYPE).tofile(file)
        infos.append(ShardInfo(file.name, len(tokens), ""))
    return SplitInfo(1, sum(map(len, shards)), tuple(infos))


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    block_size=st.integers(1, 30),
)
def test_blocks_are_the_concatenation_of_the_shards(sizes: list[int], block_size: int) -> None:
    tokens = list(range(sum(sizes)))
    ends = np.cumsum(sizes)
    with tempfile.TemporaryDirectory() as folder:
        shards = [tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        dataset = BlockDataset(Path(folder), write_shards(Path(folder), shards), block_size)
        assert dataset.num_tokens == len(tokens) and len(dataset) == len(tokens) // block_size
        for index in range(len(dataset)):
            block = dataset[index]
            expected = torch.arange(index * block_size, (index + 1) * block_size)
            assert block["input_ids"].dtype == torch.int64
            assert torch.equal(block["input_ids"], expected)
            assert torch.equal(block["labels"], expected)
            assert block["labels"] is not block["input_ids"]


def test_indices_outside_raise_and_iteration_ends(tmp_path: Path) -> None:
    dataset = BlockDataset(tmp_path, write_shards(tmp_path, [[1, 2, 3, 4, 5]]), 2)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            dataset[index]
    assert [block["input_ids"].tolist() for block in dataset] == [[1, 2], [3, 4]]


def test_a_used_dataset_pickles_small_and_reads_the_same(tmp_path: Path) -> None:
    dataset = BlockDataset(tmp_path, write_shards(tmp_path, [list(range(1000))] * 9), 8)
    first = dataset[500]["input_ids"]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000, "no tokens travel to the workers"
    assert torch.equal(pickle.loads(pickled)[500]["input_ids"], first)


def test_workers_of_a_dataloader_read_the_same_blocks(tmp_path: Path) -> None:
    dataset = prepare_texts(tmp_path, make_texts(200)).blocks("train", 64)
    alone = torch.cat([batch["input_ids"] for batch in DataLoader(dataset, batch_size=4)])
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert torch.equal(torch.cat([batch["input_ids"] for batch in loader]), alone)
