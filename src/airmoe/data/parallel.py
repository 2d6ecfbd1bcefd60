"""Batches of texts -> token ids, in order, by this process or by several others."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from airmoe.data.shards import TOKEN_TYPE, Tokens
from airmoe.data.tokenizers import Tokenizer
from airmoe.errors import ConfigError

BATCHES_ALONE = 16  # some megabytes are encoded sooner than workers have started
_READ_AHEAD = 4  # batches per worker that are read before the first of them is needed


@dataclass(frozen=True)
class EncodedDocument:
    """Tokens of a whole document, with the end of text behind them."""

    tokens: Tokens
    is_validation: bool


@dataclass(frozen=True)
class Encoder:
    """What one worker does with a text."""

    tokenizer: Tokenizer
    validation_fraction: float
    """Documents whose hash falls below it are validation; 0 where the corpus says which are."""

    def encode(self, texts: list[str]) -> list[EncodedDocument]:
        return [
            EncodedDocument(
                np.array(self.tokenizer.encode_document(text), TOKEN_TYPE),
                in_validation(text, self.validation_fraction),
            )
            for text in texts
        ]


def in_validation(text: str, fraction: float) -> bool:
    """The split rule: a text is always on the same side, whatever is around it."""
    if not fraction:
        return False
    head = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return int.from_bytes(head, "big") / 2**64 < fraction


class EncoderPool:
    """Runs an `Encoder` in `workers` processes; with one worker, or little text, in this process.

    Workers end when this process dies, however suddenly.
    """

    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._encoder = encoder
        self._wanted = workers if workers > 1 else 0
        self._executor: ProcessPoolExecutor | None = None
        self._workers: set[Any] = set()  # processes, for their exit codes

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def encode(self, batches: Iterable[list[str]]) -> Generator[list[EncodedDocument]]:
        """Encoded batches in the order of `batches`, of which few are held at any time."""
        batches = iter(batches)
        alone = None if not self._wanted else 0 if self._executor else BATCHES_ALONE
        for batch in itertools.islice(batches, alone):
            yield self._encoder.encode(batch)
        waiting: deque[Future[list[EncodedDocument]]] = deque()
        try:
            for batch in batches:
                self._executor = self._executor or self._start()
                waiting.append(self._executor.submit(_encode, batch))
                self._workers.update(multiprocessing.active_children())
                if len(waiting) == _READ_AHEAD * self._wanted:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise self._death() from error
        finally:
            for future in waiting:
                future.cancel()

    def _start(self) -> ProcessPoolExecutor:
        # Forking from a fresh server is safe whatever threads run here, and what it has
        # imported (torch, with the package) is loaded once for all workers.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        executor = ProcessPoolExecutor(self._wanted, context, _prepare_worker, (self._encoder,))
        # The server must not import what happens to lie in the working folder.
        safe = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            executor.submit(int)  # starts the server
        finally:
            os.environ.pop("PYTHONSAFEPATH")
            if safe is not None:
                os.environ["PYTHONSAFEPATH"] = safe
        return executor

    def _death(self) -> ConfigError:
        assert self._executor is not None
        self._executor.shutdown()  # it stops the other workers
        codes = [worker.exitcode for worker in self._workers]
        code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), "unknown")
        return ConfigError(
            "prepare.workers",
            self._wanted,
            f"a worker process ended by itself (exit code {code}; -9 is often a lack of "
            "memory, 1 a script with no `if __name__ == '__main__':`)",
            "Use fewer workers, or 1; running again goes on where this stopped.",
        )


# -- in a worker ----------------------------------------------------------------------------------

_encoder: Encoder


def _prepare_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """An executor's worker would wait for ever for a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(texts: list[str]) -> list[EncodedDocument]:
    try:
        return _encoder.encode(texts)
    except Exception:  # as text: not every exception survives the way back
        raise RuntimeError(f"a worker of prepare failed:\n{traceback.format_exc()}") from None
