"""Batches of texts -> token ids, in order, by this process or by several others."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np

from airmoe.data.shards import TOKEN_TYPE
from airmoe.data.tokenizers import Tokenizer
from airmoe.errors import ConfigError

BATCHES_ALONE = 16  # some megabytes are encoded sooner than workers have started
_READ_AHEAD = 4  # finished batches per worker that may wait for a slower one
_GOODBYE_SECONDS = 5.0


@dataclass(frozen=True)
class EncodedDocument:
    """Tokens of a whole document, with the end of text behind them."""

    tokens: np.ndarray[Any, np.dtype[np.uint32]]
    is_validation: bool


@dataclass(frozen=True)
class Encoder:
    """What one worker does with a text."""

    tokenizer: Tokenizer
    validation_fraction: float
    """Documents whose hash falls below it are validation; 0 where the corpus says which are."""

    def encode(self, texts: list[str]) -> list[EncodedDocument]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> EncodedDocument:
        ids = self.tokenizer.encode_document(text)
        return EncodedDocument(
            np.array(ids, TOKEN_TYPE), in_validation(text, self.validation_fraction)
        )


def in_validation(text: str, fraction: float) -> bool:
    """The split rule: a text is always on the same side, whatever stands around it."""
    if not fraction:
        return False
    head = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return int.from_bytes(head, "big") / 2**64 < fraction


class EncoderPool:
    """Runs an `Encoder` in `workers` processes; with one worker, or little text, in this process.

    Each worker has a pipe of its own and works on one batch at a time: when this process dies,
    however suddenly, the pipes close and the workers end. A standard pool would leave them behind.
    """

    def __init__(self, encoder: Encoder, workers: int) -> None:
        self._encoder = encoder
        self._wanted = workers if workers > 1 else 0
        self._workers: dict[Connection, Any] = {}

    def _start_all(self) -> None:
        # Forking from a fresh server is safe whatever threads run here, and what it has
        # imported (torch, with the package) is loaded once for all workers.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # The server must not import what happens to lie in the working folder.
        safe = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            for _ in range(self._wanted):
                self._start(context)
        finally:
            os.environ.pop("PYTHONSAFEPATH")
            if safe is not None:
                os.environ["PYTHONSAFEPATH"] = safe

    def _start(self, context: Any) -> None:
        ours, theirs = context.Pipe()
        worker = context.Process(target=_serve, args=(theirs, self._encoder), daemon=True)
        worker.start()
        theirs.close()  # or the end of the worker would go unnoticed
        self._workers[ours] = worker

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._workers:
            connection.close()
        for worker in self._workers.values():
            worker.join(_GOODBYE_SECONDS)
            if worker.is_alive():
                worker.terminate()
                worker.join()

    def encode(self, batches: Iterable[list[str]]) -> Generator[list[EncodedDocument]]:
        """Encoded batches in the order of `batches`, of which few are held at any time."""
        batches = iter(batches)
        alone = None if not self._wanted else 0 if self._workers else BATCHES_ALONE
        for batch in itertools.islice(batches, alone):
            yield self._encoder.encode(batch)
        if (following := next(batches, None)) is None:
            return
        if not self._workers:
            self._start_all()
        batches = itertools.chain([following], batches)
        busy: dict[Connection, int] = {}  # the number of the batch each worker has
        try:
            yield from self._encode_elsewhere(enumerate(batches), busy)
        except GeneratorExit:  # nobody wants the rest: leave no answer in a pipe
            for connection in busy:
                self._receive(connection)
            raise

    def _encode_elsewhere(
        self, numbered: Iterator[tuple[int, list[str]]], busy: dict[Connection, int]
    ) -> Iterator[list[EncodedDocument]]:
        idle = list(self._workers)
        done: dict[int, list[EncodedDocument]] = {}  # results whose turn has not come
        turn = 0
        while True:
            while idle and len(busy) + len(done) < _READ_AHEAD * len(self._workers):
                if (job := next(numbered, None)) is None:
                    break
                number, batch = job
                self._send(idle[-1], batch)
                busy[idle.pop()] = number
            if not busy and turn not in done:
                return
            for ready in wait(list(busy), timeout=0 if turn in done else None):
                assert isinstance(ready, Connection)
                done[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)
            if turn in done:
                yield done.pop(turn)
                turn += 1

    def _send(self, connection: Connection, batch: list[str]) -> None:
        try:
            connection.send(batch)
        except OSError as error:
            raise self._death(connection) from error

    def _receive(self, connection: Connection) -> list[EncodedDocument]:
        try:
            result = connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(connection) from error
        if isinstance(result, _WorkerTrouble):
            raise RuntimeError(f"a worker of prepare failed:\n{result.trace}")
        return result

    def _death(self, connection: Connection) -> ConfigError:
        worker = self._workers[connection]
        worker.join(_GOODBYE_SECONDS)
        return ConfigError(
            "prepare.workers",
            len(self._workers),
            f"a worker process ended by itself (exit code {worker.exitcode}; -9 is often a lack of "
            "memory, 1 a script with no `if __name__ == '__main__':`)",
            "Use fewer workers, or 1; running again goes on where this stopped.",
        )


@dataclass(frozen=True)
class _WorkerTrouble:
    """An exception in a worker, as text: not every exception survives a pipe."""

    trace: str


def _serve(connection: Connection, encoder: Encoder) -> None:
    """The life of a worker: it ends when the other side of the pipe does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    try:
        while True:
            texts = connection.recv()
            try:
                result = encoder.encode(texts)
            except Exception:
                result = _WorkerTrouble(traceback.format_exc())
            connection.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
