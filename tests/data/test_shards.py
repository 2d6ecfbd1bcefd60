"""A writer that goes on from a saved state writes what one writer would have written."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from airmoe.data import SplitInfo
from airmoe.data.shards import SplitWriter, WriterState
from tests.data.common import folder_bytes


def write(folder: Path, documents: list[np.ndarray], state: WriterState, shard: int) -> SplitWriter:
    writer = SplitWriter(folder, "train", state, shard)
    for document in documents:
        writer.add(document)
    return writer


def finish(writer: SplitWriter) -> SplitInfo:
    writer.finish_shard()
    return writer.saved_state().finished


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
        expected = finish(write(whole, documents, WriterState(), shard_tokens))

        first = write(resumed, documents[:saved], WriterState(), shard_tokens)
        state = first.saved_state()
        for document in documents[saved : saved + lost]:  # on disk, but nobody knows
            first.add(document)
        first.close()
        assert finish(write(resumed, documents[saved:], state, shard_tokens)) == expected
        assert folder_bytes(resumed) == folder_bytes(whole)

        content = b"".join((whole / shard.file).read_bytes() for shard in expected.shards)
        assert content == tokens.astype("<u4").tobytes()
        assert (expected.documents, expected.tokens) == (len(documents), len(tokens))
        for shard in expected.shards:
            file = whole / shard.file
            assert hashlib.sha256(file.read_bytes()).hexdigest() == shard.sha256
            assert file.stat().st_size == 4 * shard.tokens
        assert all(shard.tokens >= shard_tokens for shard in expected.shards[:-1])
