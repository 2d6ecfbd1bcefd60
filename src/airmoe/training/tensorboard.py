"""The log's numbers as TensorBoard events."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LEFT_OUT = (
    "TensorBoard: left out, because it is not installed (log.jsonl has the same numbers). "
    "Run: pip install 'airmoe[track]'"
)


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """`write` takes log lines; events after the step a run resumes from are purged.

    A copy of the log is not worth a run: where it cannot be written, one warning ends it.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._file: IO[bytes] | None = None
        try:
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
            self._file = (folder / f"{name}.{os.getpid()}").open("ab")
            self._add(file_version="brain.Event:2")
            sessions = self._events.SessionLog
            self._add(step=first_step + 1, session_log=sessions(status=sessions.START))
        except OSError as error:
            self._switch_off(error)

    def write(self, line: dict[str, Any]) -> None:
        summary = self._summaries.Summary
        values = [
            summary.Value(tag=f"{line['kind']}/{name}", simple_value=float(value))
            for name, value in line.items()
            if isinstance(value, (int, float)) and name not in ("step", "tokens")
        ]
        try:
            self._add(step=line["step"], summary=summary(value=values))
        except OSError as error:
            self._switch_off(error)

    def _add(self, **fields: Any) -> None:
        """One event, at once: SummaryWriter has a thread for it, whose errors are tracebacks."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is not None:
            event = self._events.Event(wall_time=time.time(), **fields)
            RecordWriter(self._file).write(event.SerializeToString())
            self._file.flush()

    def _switch_off(self, error: OSError) -> None:
        self.close()
        warnings.warn(
            f"TensorBoard is off for the rest of this run: its file cannot be written ({error}). "
            "log.jsonl has the same numbers.",
            stacklevel=3,
        )

    def close(self) -> None:
        """Never raises, because the error that ends a run would be hidden."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # of what could not be written before, once more
                file.close()
